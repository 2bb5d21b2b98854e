"""Engines are refused for what the table of capabilities refuses, with its sentence, and for nothing else."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quire_engine.config import EngineConfig
from quire_engine.config.capabilities import (
    CUDA,
    DEVICES,
    ENCODER,
    EXCLUDES,
    KEEPS_STATE,
    MODELS,
    NATIVE,
    NEEDS,
    NO_EXPERTS,
    REFERENCE_ON_CUDA,
    THROUGH_TRANSFORMERS,
    CapabilityRow,
    Feature,
)
from quire_engine.errors import ModelError
from quire_engine.executor.start_checks import check_start
from quire_engine.factory import load_executor
from quire_engine.kernels.bindings import library
from quire_engine.models.loader import capability_rows, read_model_config

from tests.model.models import SmallModels
from tests.support.sentence_folders import decoder_folder, encoder_folder

ON: Mapping[Feature, Mapping[str, Any]] = {
    Feature.DATA_PARALLEL: {"data_parallel_size": 2},
    Feature.TENSOR_PARALLEL: {"tensor_parallel_size": 2},
    Feature.PIPELINE_PARALLEL: {"pipeline_parallel_size": 2},
    Feature.EXPERT_PARALLEL: {"tensor_parallel_size": 2},
    Feature.ALL_TO_ALL: {"all2all_backend": "alltoall"},
    Feature.DUAL_BATCH_OVERLAP: {"enable_dbo": True},
    Feature.NODES: {"nnodes": 2, "tensor_parallel_size": 2},
    Feature.QUANTIZATION: {"quantization": "int8"},
    Feature.KV_CACHE_INT8: {"kv_cache_dtype": "int8"},
    Feature.KV_CACHE_FP8: {"kv_cache_dtype": "fp8"},
    Feature.WEIGHTS_MEMORY: {"weights_memory_gb": 1},
    Feature.CPU_OFFLOAD: {"cpu_offload_gb": 1},
    Feature.DETERMINISTIC: {"deterministic": True},
    Feature.LORA: {"enable_lora": True},
    Feature.POOLING: {"runner": "pooling"},
    Feature.SPECULATION: {"speculative_method": "ngram"},
    Feature.ASYNC_SCHEDULING: {"async_scheduling": True},
    Feature.CPU_ATTENTION: {"attention": "cpu"},
    Feature.FLASHINFER: {"attention": "flashinfer"},
    Feature.PREFIX_CACHING: {"enable_prefix_caching": True},
    Feature.HOST_CACHING: {"enable_host_caching": True},
    Feature.SWAP_SPACE: {"swap_space": 0.01},
    Feature.MAX_SWAPPED: {"max_swapped": 4},
    Feature.SWAP_AHEAD: {"swap_ahead": 0.5},
    Feature.SWAP_ONLY: {"preemption_mode": "swap"},
    Feature.RECOMPUTE_ONLY: {"preemption_mode": "recompute"},
    Feature.KV_DISK: {"kv_disk_path": "kv", "kv_disk_space": 0.01},
    Feature.RECORDING: {"record_steps": "steps"},
}
OFF: Mapping[Feature, Mapping[str, Any]] = {
    Feature.PREFIX_CACHING: {"enable_prefix_caching": False},
    Feature.HOST_CACHING: {"enable_host_caching": False},
    Feature.SWAP_SPACE: {"swap_space": 0},
    Feature.MAX_SWAPPED: {"max_swapped": 0},
}
"""The settings without a feature, where that is not the default."""
EXAMPLES: Mapping[str, tuple[CapabilityRow, ...]] = {
    "mixtral": (NATIVE,),
    "llama3": (NATIVE, NO_EXPERTS),
    "gpt2": (THROUGH_TRANSFORMERS,),
    "lfm2": (THROUGH_TRANSFORMERS, KEEPS_STATE),
    "embedding decoder": (NATIVE, NO_EXPERTS),
    "encoder": (ENCODER,),
}
"""Models, with the rows of the table that are theirs."""
CHEAP = (
    Feature.QUANTIZATION,
    Feature.KV_CACHE_INT8,
    Feature.WEIGHTS_MEMORY,
    Feature.DETERMINISTIC,
    Feature.LORA,
    Feature.SPECULATION,
    Feature.ASYNC_SCHEDULING,
    Feature.CPU_ATTENTION,
)
"""Features with which an engine of one process starts on a CPU at once."""


def settings_of(*features: Feature) -> dict[str, Any]:
    """The settings that ask for the features, and for what they need. Raises ``ValueError`` where two have another
    value of one setting.
    """
    settings: dict[str, Any] = {}
    for each in (*features, *(need for feature in features for need in NEEDS.get(feature, {}))):
        for name, value in ON[each].items():
            if settings.setdefault(name, value) != value:
                raise ValueError(name)
    return settings


def asked_by(settings: Mapping[str, Any]) -> set[Feature]:
    return {feature for feature, needed in ON.items() if needed.items() <= settings.items()}


def read(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": "/models/m", **settings})


# Settings


@pytest.mark.parametrize("feature", Feature)
def test_settings_ask_for_the_features_that_they_name(feature: Feature) -> None:
    asked, defaults = read(**settings_of(feature)).features, read().features
    assert (feature in defaults) == (feature in OFF)
    assert feature in asked
    assert asked - defaults - {Feature.EXPERT_PARALLEL} <= asked_by(settings_of(feature))


@pytest.mark.parametrize("one", Feature)
def test_two_features_are_refused_where_they_exclude_each_other_and_nowhere_else(one: Feature) -> None:
    for other in set(Feature) - {one}:
        try:
            settings = settings_of(one, other)
        except ValueError:
            continue
        refused = refused_pairs(settings)
        if not refused:
            assert {one, other} <= read(**settings).features
            continue
        with pytest.raises(ValidationError) as caught:
            read(**settings)
        assert sentence_of(caught.value) in refused


def refused_pairs(settings: Mapping[str, Any]) -> set[str]:
    asked = asked_by(settings)
    return {sentence for one in asked for other, sentence in EXCLUDES.get(one, {}).items() if other in asked}


def sentence_of(error: ValidationError) -> str:
    return str(error.errors()[0]["ctx"]["error"])


@pytest.mark.parametrize(("feature", "need"), [(each, need) for each, needs in NEEDS.items() for need in needs])
def test_a_feature_is_refused_without_one_that_it_needs(feature: Feature, need: Feature) -> None:
    settings = {name: value for name, value in settings_of(feature).items() if name not in ON[need]}
    with pytest.raises(ValidationError) as caught:
        read(**settings, **OFF.get(need, {}))
    assert sentence_of(caught.value) == NEEDS[feature][need]


# Models and devices


@pytest.fixture
def folder_of(small_models: SmallModels, tmp_path: Path) -> Callable[[str], Path]:
    others = {"embedding decoder": decoder_folder, "encoder": encoder_folder}

    def make(name: str) -> Path:
        return others[name](tmp_path) if name in others else small_models.folder(name)

    return make


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_models_class_says_which_rows_are_its_own(folder_of: Callable[[str], Path], name: str) -> None:
    assert capability_rows(read_model_config(folder_of(name))) == EXAMPLES[name]


def test_there_is_an_example_of_every_kind_of_model() -> None:
    assert {row.name for rows in EXAMPLES.values() for row in rows} == {row.name for row in MODELS}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_start_is_refused_where_the_table_says_so_and_nowhere_else(
    folder_of: Callable[[str], Path], name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    folder = folder_of(name)
    config, place = read_model_config(folder), torch.device(device)
    for feature in Feature:
        start = partial(check_start, read(model=folder, **settings_of(feature)), config, place)
        sentences = refusals((*EXAMPLES[name], DEVICES[device]), feature, config.architecture, device)
        if not sentences:
            start()
            continue
        with pytest.raises(ModelError) as caught:
            start()
        assert str(caught.value) in sentences, feature


def refusals(rows: tuple[CapabilityRow, ...], feature: Feature, architecture: str, device: str) -> set[str]:
    """The sentences that may refuse the feature, for itself or for what it needs."""
    facts = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "quantization": "int8"}
    asked = asked_by(settings_of(feature))
    return {
        row.refused[each].format(architecture=architecture, device=device, **facts)
        for row in rows
        for each in asked
        if each in row.refused
    }


def refused_cells() -> Iterator[tuple[str, Feature]]:
    for (name, rows), feature in product(EXAMPLES.items(), Feature):
        if any(feature in row.refused for row in (*rows, DEVICES["cpu"])):
            yield name, feature


@pytest.mark.parametrize(("name", "feature"), list(refused_cells()))
def test_an_engine_that_is_started_is_refused_with_the_sentence_of_the_cell(
    folder_of: Callable[[str], Path], name: str, feature: Feature
) -> None:
    folder = folder_of(name)
    sentences = refusals((*EXAMPLES[name], DEVICES["cpu"]), feature, read_model_config(folder).architecture, "cpu")
    with pytest.raises(ModelError) as caught:
        load_executor(read(model=folder, device="cpu", **settings_of(feature)))
    assert str(caught.value) in sentences


def allowed_cells() -> Iterator[tuple[str, Feature]]:
    for (name, rows), feature in product(EXAMPLES.items(), CHEAP):
        if not any(feature in row.refused for row in (*rows, DEVICES["cpu"])):
            yield name, feature


@pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
@pytest.mark.parametrize(("name", "feature"), list(allowed_cells()))
def test_an_engine_starts_with_a_feature_that_no_cell_refuses(
    folder_of: Callable[[str], Path], name: str, feature: Feature
) -> None:
    pools = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 21, "swap_space": 0}
    with closing(load_executor(read(model=folder_of(name), **pools, **settings_of(feature)))) as executor:
        assert executor.max_model_len > 0


def test_the_reference_attention_is_not_deterministic_on_a_gpu(small_models: SmallModels) -> None:
    folder = small_models.folder("llama3")
    engine = read(model=folder, attention="reference", deterministic=True)
    with pytest.raises(ModelError) as caught:
        check_start(engine, read_model_config(folder), torch.device("cuda"))
    assert str(caught.value) == REFERENCE_ON_CUDA.refused[Feature.DETERMINISTIC]
    check_start(engine, read_model_config(folder), torch.device("cpu"))
    assert Feature.DETERMINISTIC not in CUDA.refused


def test_steps_that_are_cuda_graphs_are_not_divided(small_models: SmallModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    folder = small_models.folder("llama3")
    engine = read(model=folder, **settings_of(Feature.DUAL_BATCH_OVERLAP), dbo_prefill_token_threshold=511)
    check_start(engine, read_model_config(folder), torch.device("cpu"))
    with pytest.raises(ModelError, match="--dbo-prefill-token-threshold 511 would divide steps that are CUDA graphs"):
        check_start(engine, read_model_config(folder), torch.device("cuda"))
