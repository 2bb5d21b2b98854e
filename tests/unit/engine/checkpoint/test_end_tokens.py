"""Tests of the tokens that end an output, which a folder names in up to four files."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.checkpoint.end_tokens import end_token_ids
from quire_engine.models.loader import read_decoder_config

from tests.unit.engine.checkpoint.test_weights import write

VOCABULARY = {"a": 3, "</s>": 5, "<|im_end|>": 6}
ADDED = [{"id": 7, "content": "<|eot|>", "special": True}, {"id": 6, "content": "<|im_end|>", "special": True}]
BPE = {"added_tokens": ADDED, "model": {"type": "BPE", "vocab": VOCABULARY}}
UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
Files = dict[str, Any]


def named_in(folder: Path, files: Files) -> tuple[int, ...]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return end_token_ids([], folder, vocab_size=30)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 5}, (5, 2)), ({"eos_token_id": [7, 5, 7]}, (7, 5, 2))],
)
def test_end_tokens_of_both_configurations_count(
    tmp_path: Path, generation: dict[str, Any] | None, ids: tuple[int, ...]
) -> None:
    folder = write(tmp_path / "model")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_decoder_config(folder).eos_token_ids == ids


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": BPE}, (6,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eot|>"}}, "tokenizer.json": BPE}, (7,)),
        ({"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": BPE}, (5,)),
        ({"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": UNIGRAM}, (1,)),
        ({"tokenizer_config.json": {"eos_token": "x", "added_tokens_decoder": {"9": {"content": "x"}}}}, (9,)),
        ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}, "tokenizer.json": BPE}, (5,)),
        ({"tokenizer_config.json": {"eos_token": None}, "tokenizer.json": BPE}, ()),
        ({"tokenizer_config.json": "[1]", "tokenizer.json": BPE}, ()),
        ({"tokenizer_config.json": "not JSON", "tokenizer.json": BPE}, ()),
        ({}, ()),
    ],
)
def test_the_tokenizers_end_token_counts_wherever_it_is_named(
    tmp_path: Path, files: Files, ids: tuple[int, ...]
) -> None:
    assert named_in(tmp_path, files) == ids


@pytest.mark.parametrize("tokenizer", [{}, {"added_tokens": 3, "model": []}, {"model": {"vocab": {"</s>": "x"}}}])
def test_an_end_token_that_the_tokenizer_lacks_is_logged(
    tmp_path: Path, tokenizer: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": tokenizer}
    assert named_in(tmp_path, files) == ()
    assert "</s>" in caplog.text
    assert "tokenizer_config.json" in caplog.text


def test_an_end_token_of_the_tokenizer_adds_to_those_of_the_configurations(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    named_in(folder, {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": BPE})
    assert read_decoder_config(folder).eos_token_ids == (2, 6)


def test_a_configuration_with_ids_of_no_token_is_read_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model", eos_token_id=["</s>", -1, 10**9, True, 1.5, 4])
    assert read_decoder_config(folder).eos_token_ids == (4,)
    assert caplog.text.count("config.json") == 5


not_tokens = st.integers(max_value=-1) | st.integers(min_value=30) | st.text(max_size=5) | st.booleans()
not_tokens |= st.floats() | st.lists(st.integers(), max_size=2) | st.none()


@given(st.lists(st.integers(0, 29), max_size=5), st.lists(not_tokens, max_size=5), st.randoms(use_true_random=False))
def test_what_is_no_token_changes_nothing_and_is_logged(good: list[int], bad: list[Any], random: Any) -> None:
    mixed = [*good, *bad]
    random.shuffle(mixed)
    logger, records = logging.getLogger("quire_engine.checkpoint.end_tokens"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        ids = end_token_ids([(Path("config.json"), mixed)], Path("/nowhere"), vocab_size=30)
    finally:
        logger.removeHandler(handler)
    assert ids == tuple(dict.fromkeys(each for each in mixed if each in good and type(each) is int))
    assert len(records) == len(bad)
