"""Models without a native implementation run through transformers, exactly or not at all: what paged memory cannot do
is refused when the model is loaded, never computed wrongly.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.loader import read_model_config
from quire_engine.models.transformers_backend import (
    PAGED_ATTENTION,
    PROBE_ATTENTION,
    TransformersConfig,
    TransformersModel,
    probed_positions,
    sliding_window_of,
)
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from tests.model.models import FALLBACK, SmallModels, small_model
from tests.support.executors import load_executor

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LLAMA4: dict[str, Any] = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}


def write(folder: Path, model_type: str, *, weights: bool = True, **special: Any) -> Path:
    """A small random model of any type, or only its configuration."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **special})
    torch.manual_seed(0)
    if weights:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def load(folder: Path, **settings: Any) -> TorchExecutor:
    return load_executor(folder, **{"kv_cache_memory": 1 << 20, "swap_bytes": 0, **settings})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert str(folder) in text
    return text


# What cannot be served


@pytest.mark.parametrize(
    ("model_type", "architecture", "special", "said"),
    [
        ("bloom", "BloomForCausalLM", {}, "attention cannot be replaced"),
        ("falcon", "FalconForCausalLM", {"alibi": True}, "attention cannot be replaced"),
        ("mamba", "MambaForCausalLM", {}, "a state that KV blocks cannot hold"),
        ("jamba", "JambaForCausalLM", {"num_hidden_layers": 8}, "a state that KV blocks cannot hold"),
        ("rwkv", "RwkvForCausalLM", {}, "a state that KV blocks cannot hold"),
        ("t5", "T5ForConditionalGeneration", {}, "an encoder with a decoder"),
        ("bert", "BertForMaskedLM", {}, "makes no text"),
        ("mllama", "MllamaForConditionalGeneration", {}, "more than text"),
    ],
)
def test_what_the_configuration_rules_out_is_refused_before_any_weight_is_read(
    tmp_path: Path, model_type: str, architecture: str, special: dict[str, Any], said: str
) -> None:
    folder = edited(write(tmp_path / "model", model_type, weights=False, **special), architectures=[architecture])
    text = refusal(folder)
    assert said in text
    assert "config.json" in text


@pytest.mark.parametrize(
    ("model_type", "special", "said"),
    [
        ("bert", {}, "not causal, and not causal within a window"),
        ("nemotron", {}, "do not hand on"),
        ("diffllama", {}, "exactly one attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "differ in scales or soft caps"),
    ],
)
def test_an_attention_that_no_backend_can_do_is_refused(
    tmp_path: Path, model_type: str, special: dict[str, Any], said: str
) -> None:
    text = refusal(write(tmp_path / "model", model_type, **special))
    assert said in text
    assert "cannot be served" in text


@pytest.mark.parametrize("count", [lambda places: torch.arange(len(places)), lambda places: places - places.min()])
def test_a_model_that_counts_positions_its_own_way_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = write(tmp_path / "model", "gpt_neox", num_key_value_heads=4)
    load(folder)
    run = TransformersModel._run_decoder

    def wrong(self: TransformersModel, tokens: torch.Tensor, places: torch.Tensor, **context: object) -> Any:
        return run(self, tokens, count(places), **context)

    monkeypatch.setattr(TransformersModel, "_run_decoder", wrong)
    assert "other logits than by itself" in refusal(folder)


def test_a_state_beside_the_keys_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token also sees the one that was computed before it, whosever that is: as a short convolution would."""
    folder = write(tmp_path / "model", "granite")
    forward = TransformersModel.forward

    def mixing(self: TransformersModel, *arguments: Any) -> torch.Tensor:
        hidden = forward(self, *arguments)
        return hidden + torch.cat([hidden[:1] * 0, hidden[:-1]])

    monkeypatch.setattr(TransformersModel, "forward", mixing)
    assert "other logits than by itself" in refusal(folder)


# Masks and windows


@st.composite
def masks(draw: st.DrawFn) -> tuple[str, torch.Tensor]:
    """A mask of one of several kinds, as the probe sees it: the rows that it asks for, over all keys."""
    keys = draw(st.integers(8, 400))
    kind = draw(st.sampled_from(["causal", "window", "chunks", "both ways", "prefix"]))
    size = draw(st.integers(2, keys // 2))
    rows = probed_positions(keys)[:, None]
    columns = torch.arange(keys)
    causal = columns <= rows
    seen = {
        "causal": causal,
        "window": causal & (columns > rows - size),
        "chunks": causal & (columns // size == rows // size),
        "both ways": torch.ones_like(causal),
        "prefix": causal | (columns < size),
    }[kind]
    return f"{kind} {size}", seen[None, None]


@given(masks())
def test_a_window_is_read_from_the_mask_and_no_other_mask_is_taken_for_one(case: tuple[str, torch.Tensor]) -> None:
    name, mask = case
    kind, _, size = name.rpartition(" ")
    if kind == "causal":
        assert sliding_window_of(mask) is None
    elif kind == "window":
        assert sliding_window_of(mask) == int(size)
    else:
        with pytest.raises(ModelError):
            sliding_window_of(mask)


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 6, 9), torch.ones(1, 1, 9, dtype=torch.bool)])
def test_a_mask_of_a_models_own_making_is_refused(mask: torch.Tensor | None) -> None:
    with pytest.raises(ModelError):
        sliding_window_of(mask)


@pytest.mark.parametrize(
    ("model_type", "special", "windows"),
    [
        ("gemma3_text", {"head_dim": 8, "sliding_window": 8}, (8, 8)),
        (
            "gemma3_text",
            {"head_dim": 8, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            (None, 8),
        ),
        ("phi3", {"sliding_window": 8}, (8, 8)),
        ("phi3", {"sliding_window": None}, (None, None)),
        # Whose window is in its mask only, and nowhere in what its attention is called with.
        ("phimoe", {"sliding_window": 8, "num_local_experts": 2}, (8, 8)),
        ("starcoder2", {"sliding_window": 64}, (None, None)),
        # Longer than the length before YaRN stretches it.
        (
            "starcoder2",
            {"sliding_window": 100, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            (100, 100),
        ),
    ],
)
def test_each_layer_has_the_window_of_its_mask(
    tmp_path: Path, model_type: str, special: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    layers = load(write(tmp_path / "model", model_type, **special))._worker.runner._model.attention_layers
    assert tuple(layer.window for layer in layers) == windows


# Configuration


@pytest.mark.parametrize(
    ("model_type", "special", "length"),
    [
        ("gpt2", {}, 64),
        ("gemma3_text", {}, 64),
        ("llama4_text", {"attention_chunk_size": 16, **LLAMA4}, 16),
        ("granite", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 64),
        ("granite", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, 256),
        (
            "phi3",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 16,
                },
            },
            16,
        ),
    ],
)
def test_the_length_is_what_the_rope_reaches_without_turning_old_keys(
    tmp_path: Path, model_type: str, special: dict[str, Any], length: int
) -> None:
    folder = write(tmp_path / "model", model_type, **special)
    assert read_model_config(folder).max_length == length
    assert load(folder).max_model_len == length


def test_facts_of_the_model_are_those_of_its_folder(tmp_path: Path) -> None:
    folder = edited(write(tmp_path / "model", "gpt_neox"), eos_token_id=[5, 7])
    (folder / "generation_config.json").unlink()
    config = read_model_config(folder)
    assert isinstance(config, TransformersConfig)
    assert (config.architecture, config.vocab_size) == ("GPTNeoXForCausalLM", 64)
    assert config.eos_token_ids == (5, 7)
    assert config.model_revision != read_model_config(edited(folder, eos_token_id=5)).model_revision


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}, "never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "evil"}, "'evil'"),
        ({"model_type": None}, "None"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_act": "no such thing"}, "cannot be loaded"),
        ({"num_attention_heads": 5}, "attention heads"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(edited(write(tmp_path / "model", "gpt_neox"), **changes))


# Weights


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "gpt_neox")
    weights = load_file(folder / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no tensor gpt_neox.layers.1.mlp.dense_h_to_4h.weight" in refusal(folder)


def test_tensors_without_a_use_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "model", "gpt_neox")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "gpt_neox.strange": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "1 tensors that the model does not use: gpt_neox.strange" in caplog.text


def test_weights_are_read_from_safetensors_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "gpt_neox")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("name", FALLBACK)
def test_bfloat16_stays_near_float32(small_models: SmallModels, name: str) -> None:
    from tests.model.test_greedy import _logits

    tokens = small_models.prompts[9]
    executor = load(small_models.folder(name), dtype="bfloat16", attention="auto")
    assert executor.dtype_name == "bfloat16"
    rounded, exact = _logits(executor, tokens), _logits(load(small_models.folder(name)), tokens)
    assert (rounded.float() - exact).norm() < 0.1 * exact.norm()


# What is left behind


def test_loading_adds_two_names_to_transformers_and_changes_nothing_else(tmp_path: Path) -> None:
    folder = small_model("gpt-neox", tmp_path)
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    their_model = AutoModelForCausalLM.from_pretrained(folder)
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    executor = load(folder)
    assert state == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    attentions, masks_ = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    assert attentions == before[0] | {name: attentions[name] for name in (PAGED_ATTENTION, PROBE_ATTENTION)}
    assert masks_ == before[1] | {PROBE_ATTENTION: masks_[PROBE_ATTENTION]}
    assert their_model.config._attn_implementation == "sdpa"
    assert executor._worker.runner._model._causal.config._attn_implementation == PAGED_ATTENTION
    their_model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
