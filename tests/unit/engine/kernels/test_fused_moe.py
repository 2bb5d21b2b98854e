"""The grouped products of experts in Triton: in its interpreter they are what a loop over the experts makes, for every
part of the experts that a rank holds, and the compiler takes them for a GPU.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.kernels.fused_moe import (
    BLOCK_SIZE_K,
    BLOCK_SIZE_M,
    BLOCK_SIZE_N,
    fused_moe_kernel,
    moe_align_block_size,
    moe_sum_kernel,
)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when Triton is imported, and compiles nothing: the test has a process of its own.
MIXTURES = """
import torch
from quire_engine.kernels import fused_moe
from quire_engine.kernels.fused_moe import FusedExperts
from quire_engine.layers.mlp import ExpertLoop, GatedMLP
from quire_engine.quantization.unquantized import PackedLinear

noise = torch.Generator().manual_seed(0)
CASES = [(1, 5, 2, 0, 5), (9, 7, 3, 2, 4), (40, 3, 3, 0, 3), (7, 6, 2, 4, 0), (70, 2, 2, 0, 2), (3, 8, 1, 6, 2)]
for number, (tokens, count, top, first, held) in enumerate(CASES):
    for dtype, inner in [((torch.float16, 40), (torch.float32, 72))[number % 2]]:
        states = torch.randn(tokens, 24, generator=noise).to(dtype)
        gate_up = (torch.randn(count, 2 * inner, 24, generator=noise) / 5).to(dtype)
        down = (torch.randn(count, 24, inner, generator=noise) / 5).to(dtype)
        weights, chosen = torch.randn(tokens, count, generator=noise).softmax(-1).topk(top)
        own = slice(first, first + held)
        parts = [GatedMLP(PackedLinear(gate_up[e]), PackedLinear(down[e])) for e in range(count)[own]]
        expected = ExpertLoop(parts, own, count, round_weights=False)(states, weights, chosen)
        many = FusedExperts(gate_up[own], down[own], first, count, round_weights=False, deterministic=False)
        made = many(states, weights, chosen)
        tolerance = 2e-2 if dtype is torch.float16 else 1e-4
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)
        few = FusedExperts(gate_up[own], down[own], first, count, round_weights=True, deterministic=True)
        whole = few(states, weights, chosen)
        for part in (slice(0, 1), slice(tokens // 2, tokens)):
            assert torch.equal(few(states[part], weights[part], chosen[part]), whole[part])
print("all agree")
"""


@needs_triton
def test_grouped_products_are_a_loop_over_the_experts() -> None:
    """In fp16 and fp32, as Triton's interpreter knows no products in bf16."""
    command, variables = [sys.executable, "-c", MIXTURES], os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout == "all agree\n", ran.stderr


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_compiler_takes_the_kernels(dtype: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    target = GPUTarget("cuda", 90, 32)
    signature = {
        **dict.fromkeys(("a", "b", "c"), f"*{dtype}"),
        **dict.fromkeys(("sorted_token_ids", "expert_ids"), "*i64"),
        **dict.fromkeys(("num_valid_tokens", "num_experts", "n", "k", "stride_am"), "i32"),
        **dict.fromkeys(("top_k", "block_size_m", "block_size_n", "block_size_k", "precision"), "constexpr"),
    }
    for rows in (BLOCK_SIZE_M, 64):
        sizes = {"block_size_m": rows, "block_size_n": BLOCK_SIZE_N, "block_size_k": BLOCK_SIZE_K}
        constants = {"top_k": 8, **sizes, "precision": "ieee"}
        assert compile(ASTSource(fused_moe_kernel(), signature, constants), target=target).asm["ptx"]
    signature = {
        **dict.fromkeys(("outputs", "out"), f"*{dtype}"),
        **{"topk_weights": "*fp32", "topk_ids": "*i64", "first": "i32", "num_experts": "i32", "columns": "i32"},
        **dict.fromkeys(("top_k", "rounds", "block"), "constexpr"),
    }
    constants = {"top_k": 8, "rounds": True, "block": 512}
    assert compile(ASTSource(moe_sum_kernel(), signature, constants), target=target).asm["ptx"]


@given(st.data())
def test_every_pair_is_in_one_block_of_its_expert(data: st.DataObject) -> None:
    experts, tokens, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 8))
    top = data.draw(st.integers(1, experts))
    first = data.draw(st.integers(0, experts - 1))
    held = data.draw(st.integers(1, experts - first))
    picks = st.permutations(range(experts)).map(lambda order: order[:top])
    topk_ids = torch.tensor([data.draw(picks) for _ in range(tokens)])
    blocks = moe_align_block_size(topk_ids, rows, first, held)
    assert blocks.sorted_token_ids.shape == (len(blocks.expert_ids) * rows,)
    seen = []
    for expert, pairs in zip(blocks.expert_ids.tolist(), blocks.sorted_token_ids.split(rows), strict=True):
        real = [pair for pair in pairs.tolist() if pair < tokens * top]
        assert not real or expert < held
        assert all(topk_ids.flatten()[pair] == first + expert for pair in real)
        seen += real
    wanted = [pair for pair, expert in enumerate(topk_ids.flatten().tolist()) if first <= expert < first + held]
    assert sorted(seen) == wanted
