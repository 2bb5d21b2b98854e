"""Prompts that are pooled are the tokens that transformers makes, and what sentence-transformers puts before them."""

import tracemalloc
from pathlib import Path
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.convert import pooling_from_proto, pooling_to_proto
from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.pooling import PoolingParams, Task, check_dimensions
from quire_proto.text.pooled_prompt import SentencePrompts, Texts
from quire_proto.text.tokenizer import ModelTokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.sentence_folders import WORDS, word_level

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
    for texts in (*PAIRS, *(text for pair in PAIRS for text in pair)):
        parts = (texts,) if isinstance(texts, str) else texts
        wanted = oracle(*parts, return_token_type_ids=True, **cut)
        (got,) = tokenizer.encode_pooled([texts], 64, truncate=length)
        assert list(got.token_ids) == wanted.input_ids
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
    assert list(bare.token_ids) == oracle("the fox", add_special_tokens=False).input_ids


PROCESSORS = {
    "none": None,
    "BERT": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "RoBERTa": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "byte level": processors.ByteLevel(trim_offsets=True),
    "template": word_level().post_processor,
    "marks behind": processors.TemplateProcessing("$A [SEP]", "$A [SEP] [SEP] $B:1", [("[SEP]", 3)]),
    "two": processors.Sequence([processors.ByteLevel(), word_level().post_processor]),
}
SENTENCES = st.lists(st.sampled_from([*WORDS, "", "é"]), max_size=6).map(" ".join)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(SENTENCES, SENTENCES) | SENTENCES, min_size=1, max_size=4), special=st.booleans())
def test_prompts_are_those_of_the_tokenizer_itself(name: str, pairs: list[Texts], special: bool) -> None:
    """Each text is encoded once, and what the tokenizer adds is put around it."""
    tokenizer = word_level()
    if PROCESSORS[name] is not None:
        tokenizer.post_processor = PROCESSORS[name]
    else:
        tokenizer.post_processor = processors.Sequence([])
    for pair, got in zip(
        pairs, ModelTokenizer(tokenizer, None).encode_pooled(pairs, 64, add_special_tokens=special), strict=True
    ):
        wanted = tokenizer.encode(*([pair] if isinstance(pair, str) else pair), add_special_tokens=special)
        assert list(got.token_ids) == wanted.ids
        assert got.second_text_start == (wanted.type_ids.index(1) if 1 in wanted.type_ids else 0)


def test_a_query_of_many_pairs_is_encoded_once_and_counted_before_a_prompt_is_made() -> None:
    tokenizer = ModelTokenizer(word_level(), None)
    pairs = [("fox " * 20_000, f"dog {number}") for number in range(2_000)]
    begun = thread_time()
    tracemalloc.start()
    with pytest.raises(QuireError, match=r"The prompts have 400\d+ tokens in all, and at most 1000000") as refusal:
        tokenizer.encode_pooled(pairs, 2**16, max_tokens=10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusal.value.param == "prompts"
    assert peak < 16e6
    assert thread_time() - begun < 5


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
    with pytest.raises(TokenizerLoadError, match="not texts"):
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
