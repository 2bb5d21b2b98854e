"""Prompts that are pooled are the tokens that transformers makes, and what sentence-transformers puts before them."""

from pathlib import Path

import pytest
from quire_proto.convert import pooling_from_proto, pooling_to_proto
from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.pooling import PoolingParams, Task, check_dimensions
from quire_proto.text.pooled_prompt import SentencePrompts, Texts
from quire_proto.text.tokenizer import ModelTokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.sentence_folders import word_level

PAIRS = [
    ("the fox runs", "a lazy dog sleeps under the river"),
    ("a lazy dog sleeps under the red river", "the fox"),
    ("the fox runs over a dog", "the cat sleeps under a river"),
]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=word_level(), pad_token="[PAD]")


@pytest.mark.parametrize("length", [None, 4, 5, 6, 7, 9, 12])
def test_texts_and_pairs_are_cut_as_transformers_cuts_them(oracle: PreTrainedTokenizerFast, length: int | None) -> None:
    tokenizer = ModelTokenizer(word_level(), None)
    cut = {} if length is None else {"truncation": "longest_first", "max_length": length}
    for given in (*PAIRS, *(text for pair in PAIRS for text in pair)):
        parts = (given,) if isinstance(given, str) else given
        wanted = oracle(*parts, return_token_type_ids=True, **cut)
        (got,) = tokenizer.encode_pooled([given], 64, truncate=length)
        assert got.token_ids == wanted.input_ids
        types = wanted.token_type_ids
        assert got.second_text_start == (types.index(1) if 1 in types else 0)


@pytest.mark.parametrize(("given", "added"), [("the fox", 2), (("the fox", "a dog"), 3)])
def test_a_length_without_room_for_the_marks_of_the_tokenizer_is_refused(given: Texts, added: int) -> None:
    tokenizer = ModelTokenizer(word_level(), None)
    with pytest.raises(QuireError, match=f"adds {added} tokens") as refusal:
        tokenizer.encode_pooled([given], 64, truncate=added - 1)
    assert refusal.value.param == "truncate_prompt_tokens"
    (cut,) = tokenizer.encode_pooled([given], 64, truncate=added)
    assert len(cut.token_ids) == added


def test_a_text_without_the_marks_of_the_tokenizer(oracle: PreTrainedTokenizerFast) -> None:
    tokenizer = ModelTokenizer(word_level(), None)
    (bare,) = tokenizer.encode_pooled(["the fox"], 64, add_special_tokens=False)
    assert bare.token_ids == oracle("the fox", add_special_tokens=False).input_ids


def test_a_text_that_is_far_too_long_is_refused_before_it_is_read() -> None:
    tokenizer = ModelTokenizer(word_level(), None)
    with pytest.raises(QuireError, match="context length is 256 tokens"):
        tokenizer.encode_pooled(["a " * 20_000], 256)
    (cut,) = tokenizer.encode_pooled(["a " * 20_000], 256, truncate=256)
    assert len(cut.token_ids) == 256
    with pytest.raises(QuireError, match="surrogate"):
        tokenizer.encode_pooled(["\ud800"], 8)


def test_prompts_by_their_names() -> None:
    prompts = SentencePrompts.read(Path("p"), {"prompts": {"query": "Q: "}, "default_prompt_name": "query"})
    assert prompts.text(None) == prompts.text("query") == "Q: "
    assert SentencePrompts.read(Path("p"), {}).text(None) == ""
    with pytest.raises(QuireError, match="no prompt named 'other'; it has query"):
        prompts.text("other")
    with pytest.raises(TokenizerLoadError, match="no texts"):
        SentencePrompts.read(Path("p"), {"prompts": {"query": 1}})


@pytest.mark.parametrize(
    "params",
    [PoolingParams(), PoolingParams(dimensions=8, use_activation=False), PoolingParams(Task.CLASSIFY, None, True, 7)],
)
def test_params_survive_the_wire(params: PoolingParams) -> None:
    assert pooling_from_proto(pooling_to_proto(params)) == params


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"task": Task.GENERATE}, "is not pooled"),
        ({"dimensions": 0}, "between 1 and"),
        ({"task": Task.CLASSIFY, "dimensions": 4}, "no dimensions"),
        ({"second_text_start": -1}, "at least 0"),
    ],
)
def test_params_out_of_range(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(QuireError, match=sentence):
        PoolingParams(**values)


def test_dimensions_that_a_model_was_trained_for() -> None:
    for fitting in (None, 16, 64):
        check_dimensions(fitting, 64, (16, 32))
    check_dimensions(5, 64, ())
    with pytest.raises(QuireError, match="trained for 16, 32, 64"):
        check_dimensions(20, 64, (16, 32))
