"""Which engines get requests: those that serve what the router serves, with the same tokens."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text.model_folder import (
    DIGEST_BYTES,
    folder_config_digest,
    folder_vocabulary_digest,
    vocabulary_digest,
)
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines.model_matcher import ModelIdentity
from quire_router.engines.pool import EnginePool
from tokenizers import Tokenizer, models

from tests.support.model_folders import byte_level, sentencepiece_like, write_model_folder
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

OURS = ModelIdentity(Path("/models/ours"), b"o" * DIGEST_BYTES)


async def told_of(
    caplog: pytest.LogCaptureFixture, engine: ScriptedEngine, ready: Mapping[str, int], ours: ModelIdentity = OURS
) -> list[str]:
    """What the router says above information of an engine, after the models came to have so many engines."""
    caplog.set_level(logging.INFO)
    fleet = EnginePool(StaticDiscovery([await engine.start()]), ready, vocabularies={"m": ours})
    await fleet.start()
    try:
        await until(lambda: "is connected" in caplog.text)
        assert {model: fleet.ready(model) for model in ready} == ready
        limited = {model for model in ready if fleet.limits(model) is not None}
        assert limited == {model for model, count in ready.items() if count}
    finally:
        await fleet.close()
        await engine.stop()
    records = [
        record for record in caplog.records if record.name.endswith("model_matcher") and record.levelno > logging.INFO
    ]
    return [f"{record.levelname} {record.getMessage()}" for record in records]


@pytest.mark.parametrize("digest", [OURS.digest, b""], ids=["the same", "none"])
async def test_an_engine_with_the_same_tokenizer_digest_or_none_serves(
    digest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert await told_of(caplog, ScriptedEngine(tokenizer_digest=digest), {"m": 1}) == []


async def test_an_engine_with_another_tokenizer_digest_is_excluded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(tokenizer_digest=b"t" * DIGEST_BYTES, models=["m", "free"])
    (line,) = await told_of(caplog, engine, {"m": 0, "free": 1})
    assert line.startswith(f"ERROR engine {engine.address} serves 'm' with another tokenizer")
    assert str(OURS.folder) in line


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"vocab_size": 2000}, "a vocabulary of 2000 tokens"),
        ({"config_digest": b"d" * DIGEST_BYTES}, "a model of another architecture or size"),
    ],
)
async def test_an_engine_of_another_model_with_the_same_tokenizer_is_excluded_and_named(
    description: dict[str, object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = ModelIdentity(OURS.folder, OURS.digest, config_digest=b"c" * DIGEST_BYTES, size=1000)
    engine = ScriptedEngine(tokenizer_digest=ours.digest, **description)
    (line,) = await told_of(caplog, engine, {"m": 0}, ours)
    assert line.startswith(f"ERROR engine {engine.address} serves 'm' with {words}")
    assert str(OURS.folder) in line


async def test_an_engine_without_a_fact_that_a_later_one_reports_serves(caplog: pytest.LogCaptureFixture) -> None:
    ours = ModelIdentity(OURS.folder, OURS.digest, config_digest=b"c" * DIGEST_BYTES, size=1000)
    assert await told_of(caplog, ScriptedEngine(tokenizer_digest=ours.digest), {"m": 1}, ours) == []


SIZES = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"transformers_version": "9", "torch_dtype": "float16", "head_dim": 16, "quantization_config": {}}, True),
        ({"max_position_embeddings": 9000}, True),
        ({"num_hidden_layers": 3}, False),
        ({"hidden_size": 128}, False),
        ({"vocab_size": 2000}, False),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_models_of_other_sizes_differ_and_rewritten_files_do_not(
    changed: dict[str, object], same: bool, tmp_path: Path
) -> None:
    for name, config in (("one", SIZES), ("other", {**SIZES, **changed})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    one, other = (folder_config_digest(tmp_path / name) for name in ("one", "other"))
    assert len(one) == DIGEST_BYTES
    assert (one == other) is same


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"vocab_size": true}', "[" * 100_000, '{"vocab_size": 1}'])
def test_a_folder_without_sizes_is_not_compared(content: str, tmp_path: Path) -> None:
    assert folder_config_digest(tmp_path) == b""
    (tmp_path / "config.json").write_text(content)
    assert folder_config_digest(tmp_path) == b""
    assert ModelIdentity.of(tmp_path, OURS.digest).config_digest == b""


async def test_an_engine_of_some_of_the_models_is_none_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    assert await told_of(caplog, ScriptedEngine(), {"m": 1, "n": 0}) == []


async def test_an_engine_of_other_models_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(models=["other"])
    (line,) = await told_of(caplog, engine, {"m": 0, "n": 0})
    assert re.match(r"WARNING engine \S+ serves 'other', which this router does not \(it serves 'm', 'n'\)", line)


TOKENS = st.lists(st.text(max_size=3), min_size=2, max_size=8, unique=True)


def named(tokens: list[str]) -> bytes:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return vocabulary_digest(Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])))


@settings(max_examples=30, deadline=None)
@given(TOKENS, TOKENS)
def test_digests_are_equal_exactly_where_all_ids_mean_the_same(one: list[str], other: list[str]) -> None:
    assert named(one) == named(list(one))
    assert (named(one) == named(other)) == (one == other)


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_like()], ids=["bytes", "pieces"])
def test_a_file_that_only_looks_different_has_the_same_digest(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_model_folder(tmp_path / "one", tokenizer)
    content = json.loads((folder / "tokenizer.json").read_text())
    other = write_model_folder(tmp_path / "other", tokenizer)
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (other / "tokenizer.json").write_text(json.dumps(content, indent=4))
    assert (
        folder_vocabulary_digest(folder)
        == folder_vocabulary_digest(other)
        == ModelTokenizer.load(other).vocabulary_digest
    )


def test_a_token_that_was_added_counts(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    before = folder_vocabulary_digest(folder)
    more = Tokenizer.from_file(str(folder / "tokenizer.json"))
    more.add_tokens(["<|more|>"])
    more.save(str(folder / "tokenizer.json"))
    assert folder_vocabulary_digest(folder) != before


def test_a_folder_without_a_tokenizer_has_no_digest(tmp_path: Path) -> None:
    assert folder_vocabulary_digest(tmp_path) == b""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert folder_vocabulary_digest(tmp_path) == b""
