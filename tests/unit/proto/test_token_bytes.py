"""The bytes of single tokens, against the text that they make together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text.tokenizer import ModelTokenizer

from tests.support.model_folders import SPECIAL, byte_level, sentencepiece_like

BYTE_LEVEL = ModelTokenizer(byte_level(), None)
SENTENCEPIECE = ModelTokenizer(sentencepiece_like(), None)
TEXTS = st.text(max_size=40) | st.text("helo wrdu", max_size=40) | st.text("é€😀你\ufffd a", max_size=12)


def bytes_of(text: ModelTokenizer, token_ids) -> bytes:
    return b"".join(text.token_bytes(token_id) for token_id in token_ids)


@settings(deadline=None)
@given(TEXTS)
def test_the_bytes_of_all_tokens_are_the_text_in_byte_level_vocabularies(text):
    assert bytes_of(BYTE_LEVEL, BYTE_LEVEL.encode_plain(text)) == text.encode()


@settings(deadline=None)
@given(TEXTS.filter(bool))
def test_the_bytes_of_all_tokens_are_the_text_and_its_first_space_with_fallback_to_bytes(text):
    assert bytes_of(SENTENCEPIECE, SENTENCEPIECE.encode_plain(text)) == f" {text}".encode()


@pytest.mark.parametrize("name", [*SPECIAL, "<think>"])
def test_a_special_token_is_its_name(name):
    assert BYTE_LEVEL.token_bytes(byte_level().token_to_id(name)) == name.encode()


@pytest.mark.parametrize("text", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_every_token_has_bytes_and_no_other_id_has(text):
    assert all(text.token_bytes(token_id) for token_id in range(text.vocab_size))
    assert text.token_bytes(text.vocab_size) is None


def test_all_256_bytes_can_be_written():
    singles = {text for text in map(BYTE_LEVEL.token_bytes, range(BYTE_LEVEL.vocab_size)) if len(text) == 1}

    assert singles == {bytes([byte]) for byte in range(256)}
