"""A mixture of experts computes what transformers' own block computes, and is read from either way to store it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.config import MoEConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import EngineArgs, ExecutorConfig
from quire_engine.errors import ModelError
from quire_engine.layers.mlp import MoE, make_experts
from quire_engine.models.loader import load_model, read_decoder_config, read_model_config
from quire_engine.quantization.unquantized import PackedLinear, UnquantizedMethod
from quire_engine.worker.model_runner import load_model_and_attention
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

CPU = torch.device("cpu")
HIDDEN, INNER = 24, 16
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "head_dim": 12}


@cache
def their_block(family: str, count: int, per_token: int, normalized: bool, dtype: torch.dtype) -> torch.nn.Module:
    if family == "mixtral":
        config = MixtralConfig(**SIZES, num_local_experts=count, num_experts_per_tok=per_token)
        block: torch.nn.Module = MixtralSparseMoeBlock(config)
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                **SIZES,
                num_experts=count,
                num_experts_per_tok=per_token,
                moe_intermediate_size=INNER,
                norm_topk_prob=normalized,
            )
        )
    generator = torch.Generator().manual_seed(count)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, generator)
    return block.to(dtype).eval()


def our_block(block: Any, family: str, per_token: int, normalized: bool) -> MoE:
    """The same weights in our own code."""
    weights = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
    count, dtype = len(weights[0]), weights[0].dtype
    experts = MoEConfig(count, per_token, INNER, normalized, family == "qwen3", (True,))
    # Deterministic layers are packed for the kernel whatever the processor is.
    method = UnquantizedMethod(LoadOptions(ExecutorConfig(deterministic=True)), dtype)
    made = make_experts(experts, method, weights.__getitem__, slice(0, count), dtype)
    return MoE(experts, PackedLinear(block.gate.weight.detach()), made)


@settings(deadline=None)  # the first call may compile the kernels
@given(
    family=st.sampled_from(["mixtral", "qwen3"]),
    count=st.integers(1, 7),
    per_token=st.integers(1, 7),
    normalized=st.booleans(),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_every_token_gets_what_transformers_block_gives_it(
    family: str, count: int, per_token: int, normalized: bool, tokens: int, seed: int
) -> None:
    per_token = min(per_token, count)
    normalized = normalized or family == "mixtral"
    theirs = their_block(family, count, per_token, normalized, torch.float32)
    ours = our_block(theirs, family, per_token, normalized)
    states = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        expected, made = theirs(states[None])[0], ours(states)
    assert made.shape == expected.shape
    assert torch.allclose(made, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_bfloat16_is_rounded_where_transformers_rounds(family: str) -> None:
    theirs = their_block(family, 6, 3, True, torch.bfloat16)
    ours = our_block(theirs, family, 3, True)
    states = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        expected, made = theirs(states[None])[0].float(), ours(states).float()
    assert (made - expected).norm() < 0.01 * expected.norm()


@settings(deadline=None)  # the first call may compile the kernels
@given(st.integers(2, 30), st.integers(0, 100))
def test_a_token_is_not_changed_by_its_neighbours(tokens: int, seed: int) -> None:
    ours = our_block(their_block("qwen3", 5, 2, True, torch.float32), "qwen3", 2, True)
    states = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        together = ours(states)
        alone = torch.cat([ours(states[place : place + 1]) for place in range(tokens)])
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


def write(folder: Path, family: str, **changes: Any) -> Path:
    """A small model with experts in every layer, as it is published."""
    config_class, special = {"mixtral": (MixtralConfig, MIXTRAL), "qwen3": (Qwen3MoeConfig, QWEN)}[family]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_class(**SIZES, **{**special, **changes})).save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    from quire_engine.worker.memory import CacheSizes

    from tests.support.steps import KnownChunk, prepare

    config = EngineArgs(model=folder, dtype="float32", attention="reference", enforce_eager=True)
    parts = load_model_and_attention(config, read_model_config(folder), CPU)
    kv = parts.make_kv_cache(CacheSizes(1 << 20, 0))
    batch = prepare([KnownChunk(0, list(range(3, 33)), 0, [1, 2])], 16).model_input
    parts.attention.prepare(*batch.attention)
    with torch.inference_mode():
        hidden = parts.model.forward(batch.token_ids, batch.positions, kv.layers, parts.attention)
        return parts.model.logits(hidden)


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_both_ways_to_store_experts_are_the_same_model(tmp_path: Path, family: str) -> None:
    published = write(tmp_path / "published", family)
    model = AutoModelForCausalLM.from_pretrained(published)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = [set(load_file(tmp_path / form / "model.safetensors")) for form in ("published", "stacked")]
    assert not any("experts" in name for name in names[0] & names[1]), "the two ways do not differ"
    made = logits(published)
    assert torch.equal(made, logits(tmp_path / "stacked"))
    with torch.inference_mode():
        expected = model(torch.arange(3, 33)[None]).logits[0]
    assert (made - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [True, True, True, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
        ({"decoder_sparse_step": 9}, [False, False, False, False]),
    ],
)
def test_experts_are_in_the_layers_that_have_them(tmp_path: Path, changes: dict[str, Any], sparse: list[bool]) -> None:
    config = Qwen3MoeConfig(**{**SIZES, **QWEN, "num_hidden_layers": 4, **changes})
    model = AutoModelForCausalLM.from_config(config)
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == sparse
    model.save_pretrained(tmp_path)
    experts = read_decoder_config(tmp_path).moe
    assert experts is not None
    assert list(experts.is_moe_layer) == sparse
    load_model(read_model_config(tmp_path), tmp_path, LoadOptions(ExecutorConfig(dtype="float32")))


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen3", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3", {"mlp_only_layers": "all"}, "mlp_only_layers"),
    ],
)
def test_experts_that_cannot_be_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], said: str) -> None:
    folder = edited(write(tmp_path / "model", family), **changes)
    with pytest.raises(ModelError) as caught:
        read_model_config(folder)
    assert said in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3", "model.layers.1.mlp.experts.4.up_proj.weight"),
    ],
)
def test_a_missing_expert_is_named(tmp_path: Path, family: str, missing: str) -> None:
    folder = write(tmp_path / "model", family)
    weights = load_file(folder / "model.safetensors")
    del weights[missing]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"no tensor {missing}"):
        load_model(read_model_config(folder), folder, LoadOptions(ExecutorConfig(dtype="float32")))


def test_stacked_experts_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path / "published", "qwen3"))
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    folder = edited(tmp_path / "stacked", num_local_experts=6)
    with pytest.raises(ModelError, match=r"\[5, 24\], but config.json asks for \[6, 24\]"):
        load_model(read_model_config(folder), folder, LoadOptions(ExecutorConfig(dtype="float32")))
