"""Words that outputs may not have, in the tokens that write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, SamplingParams
from quire_proto.text.tokenizer import MAX_WORDS, ModelTokenizer, encode_bad_words

from tests.support.model_folders import byte_level, sentencepiece_like

TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}
WORDS = st.lists(st.text("helo wrd", min_size=1, max_size=6).filter(str.strip), max_size=4)


def completed(ids: list[int], forbidden: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(ids[at : at + len(word)]) == word for word in forbidden for at in range(len(ids)))


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@settings(deadline=None)
@given(words=WORDS)
def test_no_text_that_is_a_bad_word_or_a_space_before_one_can_be_written_as_the_tokenizer_writes_it(tokenizer, words):
    forbidden = encode_bad_words(words, ModelTokenizer(tokenizer, None))

    for word in words:
        for written in (word.lstrip(), " " + word.lstrip()):
            assert completed(tokenizer.encode(written, add_special_tokens=False).ids, forbidden)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@settings(deadline=None)
@given(words=WORDS)
def test_every_forbidden_sequence_writes_a_bad_word_and_is_listed_once(tokenizer, words):
    forbidden = encode_bad_words(words, ModelTokenizer(tokenizer, None))

    for tokens in forbidden:
        assert tokenizer.decode(list(tokens)).strip() in {word.strip() for word in words}
    assert len(set(forbidden)) == len(forbidden)


def test_a_sequence_that_ends_with_another_forbidden_one_is_left_out():
    forbidden = encode_bad_words(["hello"], ModelTokenizer(sentencepiece_like(), None))

    assert len(forbidden) == 1
    assert len(encode_bad_words(["world"], ModelTokenizer(byte_level(), None))) == 2


def test_special_tokens_that_the_tokenizer_adds_by_itself_are_no_part_of_a_word():
    assert byte_level().token_to_id("<|begin|>") not in sum(
        encode_bad_words(["hello"], ModelTokenizer(byte_level(), None)), ()
    )


@pytest.mark.parametrize(
    "words", [["a"] * (MAX_WORDS + 1), [""], ["   "], ["x" * (MAX_BAD_WORD_CHARACTERS + 1)]], ids=len
)
def test_too_many_empty_and_endless_words_are_refused(words):
    with pytest.raises(QuireError) as refusal:
        encode_bad_words(words, ModelTokenizer(byte_level(), None))
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, "bad_words")


def test_as_many_words_as_are_allowed_are_never_too_many_tokens():
    words = [f"{chr(ord('a') + number % 26)}{number}" for number in range(MAX_WORDS)]
    forbidden = encode_bad_words(words, ModelTokenizer(byte_level(), None))

    assert len(forbidden) <= MAX_BAD_WORDS
    assert SamplingParams(bad_words=forbidden).bad_words == forbidden
