"""Which models pool prompts, and how, as their folders and the settings say."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from quire_engine.checkpoint.pooler_config import max_seq_length, read_pooler_config
from quire_engine.config import EngineConfig
from quire_engine.core.pooling import PoolingType
from quire_engine.errors import ModelError
from quire_proto.pooling import Task

GENERATES = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8}
EMBEDS = {**GENERATES, "architectures": ["Qwen3Model"]}
CLASSIFIES = {**GENERATES, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a"}}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8, "type_vocab_size": 2}


def write_modules(folder: Path, *kinds: str, **configs: dict[str, object]) -> None:
    modules = [{"path": kind if kind in configs else "", "type": f"a.b.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    for kind, config in configs.items():
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config))


def read(folder: Path, raw: dict[str, Any], **settings: object) -> Any:
    return read_pooler_config(folder, raw, EngineConfig.model_validate({"model": folder, **settings}))


@pytest.mark.parametrize(
    ("raw", "settings", "task"),
    [
        (GENERATES, {}, None),
        (GENERATES, {"runner": "pooling"}, Task.EMBED),
        (GENERATES, {"convert": "embed"}, Task.EMBED),
        (EMBEDS, {}, Task.EMBED),
        (BERT, {}, Task.EMBED),
        (CLASSIFIES, {}, Task.CLASSIFY),
        (CLASSIFIES, {"convert": "embed"}, Task.EMBED),
    ],
)
def test_what_a_model_does_with_prompts(
    tmp_path: Path, raw: dict[str, Any], settings: dict[str, object], task: Task | None
) -> None:
    config = read(tmp_path, raw, **settings)
    assert (config and config.task) == task


def test_a_decoder_pools_its_last_token_and_an_encoder_its_first(tmp_path: Path) -> None:
    assert read(tmp_path, EMBEDS).pooling_type is PoolingType.LAST
    assert read(tmp_path, BERT).pooling_type is PoolingType.CLS
    assert read(tmp_path, BERT, pooling_type="mean").pooling_type is PoolingType.MEAN
    assert read(tmp_path, BERT).use_activation


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}]
)
def test_a_folder_of_sentence_transformers(tmp_path: Path, pooling: dict[str, object]) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", Pooling=pooling)
    config = read(tmp_path, {**GENERATES, "matryoshka_dimensions": [4, 2]})
    assert (config.task, config.pooling_type, config.use_activation) == (Task.EMBED, PoolingType.MEAN, False)
    assert (config.pooled_size, config.matryoshka_dimensions) == (8, (2, 4))
    assert read(tmp_path, GENERATES, convert="none") is None, "unless it is to generate all the same"


def test_scores_stay_as_they_are_where_the_folder_says_so(tmp_path: Path) -> None:
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert read(tmp_path, CLASSIFIES).use_activation
    assert not read(tmp_path, {**CLASSIFIES, **own}).use_activation


@pytest.mark.parametrize(
    ("kinds", "configs", "sentence"),
    [
        (("Transformer", "Dense"), {}, "has a module 'Dense'"),
        (("Pooling",), {"Pooling": {"pooling_mode": "max"}}, "pools by max"),
        (("Pooling",), {"Pooling": {"pooling_mode": ["mean", "cls"]}}, "pools by mean and cls"),
        (("Pooling",), {"Pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
        (("LogitScore",), {"LogitScore": {}}, "true_token_id"),
    ],
)
def test_modules_that_are_not_run(
    tmp_path: Path, kinds: tuple[str, ...], configs: dict[str, dict[str, object]], sentence: str
) -> None:
    write_modules(tmp_path, *kinds, **configs)
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, GENERATES)


@pytest.mark.parametrize(
    ("raw", "settings", "sentence"),
    [
        (EMBEDS, {"runner": "generate"}, "makes no text"),
        (EMBEDS, {"convert": "classify"}, "no layer that classifies"),
        ({**EMBEDS, "hidden_size": None}, {}, "no hidden_size"),
        ({**EMBEDS, "matryoshka_dimensions": "x"}, {}, "matryoshka_dimensions"),
    ],
)
def test_what_a_model_is_not_made_for(
    tmp_path: Path, raw: dict[str, Any], settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, raw, **settings)


@pytest.mark.parametrize(
    "settings", [{"runner": "generate", "convert": "embed"}, {"runner": "pooling", "convert": "none"}]
)
def test_settings_that_exclude_each_other(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        read(tmp_path, GENERATES, **settings)


def test_the_longest_prompt_is_that_of_the_folder(tmp_path: Path) -> None:
    assert max_seq_length(tmp_path, 512) == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert (max_seq_length(tmp_path, 512), max_seq_length(tmp_path, 128)) == (256, 128)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": "x"}')
    with pytest.raises(ModelError, match="max_seq_length"):
        max_seq_length(tmp_path, 512)
