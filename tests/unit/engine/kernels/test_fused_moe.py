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
from quire_engine.kernels.fused_moe import sort_by_expert

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when Triton is imported, and compiles nothing: the test has a process of its own.
MIXTURES = """
import torch
from quire_engine.kernels import fused_moe
from quire_engine.kernels.fused_moe import FusedExperts
from quire_engine.layers.mlp import ExpertLoop, GatedMLP
from quire_engine.quantization.unquantized import PackedLinear

noise = torch.Generator().manual_seed(0)
CASES = [(1, 5, 2, 0, 5), (9, 7, 3, 2, 4), (40, 3, 3, 0, 3), (7, 6, 2, 4, 0), (300, 4, 2, 0, 4), (3, 8, 1, 6, 2)]
for tokens, count, top, first, held in CASES:
    for dtype, inner in ((torch.float16, 40), (torch.float32, 72)):
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

COMPILED = """
from quire_engine.kernels.fused_moe import COLUMNS, DEPTH, ROWS, combine_kernel, grouped_linear_kernel
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
for dtype in ("bf16", "fp16", "fp32"):
    signature = {
        **dict.fromkeys(("x", "weight", "out"), f"*{dtype}"),
        **dict.fromkeys(("sorted_pairs", "tile_experts"), "*i64"),
        **dict.fromkeys(("pairs", "experts", "columns", "depth", "x_stride"), "i32"),
        **dict.fromkeys(("share", "row_tile", "column_tile", "depth_tile", "precision"), "constexpr"),
    }
    for rows in (ROWS, 64):
        constants = {"share": 8, "row_tile": rows, "column_tile": COLUMNS, "depth_tile": DEPTH, "precision": "ieee"}
        assert compile(ASTSource(grouped_linear_kernel(), signature, constants), target=TARGET).asm["ptx"]
    signature = {
        **dict.fromkeys(("outputs", "out"), f"*{dtype}"),
        "weights": "*fp32", "chosen": "*i64", "first": "i32", "experts": "i32", "columns": "i32",
        **dict.fromkeys(("top", "rounds", "block"), "constexpr"),
    }
    constants = {"top": 8, "rounds": True, "block": 512}
    assert compile(ASTSource(combine_kernel(), signature, constants), target=TARGET).asm["ptx"]
print("all compiled")
"""


def run(script: str, **variables: str) -> str:
    environment = os.environ | variables
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return ran.stdout or ran.stderr


@needs_triton
def test_grouped_products_are_a_loop_over_the_experts() -> None:
    """In fp16 and fp32, as Triton's interpreter knows no products in bf16."""
    assert run(MIXTURES, TRITON_INTERPRET="1") == "all agree\n"


@needs_triton
def test_the_compiler_takes_the_kernels() -> None:
    assert run(COMPILED) == "all compiled\n"


@given(st.data())
def test_every_pair_is_in_one_tile_of_its_expert(data: st.DataObject) -> None:
    experts, tokens, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 8))
    top = data.draw(st.integers(1, experts))
    first = data.draw(st.integers(0, experts - 1))
    held = data.draw(st.integers(1, experts - first))
    picks = st.permutations(range(experts)).map(lambda order: order[:top])
    chosen = torch.tensor([data.draw(picks) for _ in range(tokens)])
    tiles = sort_by_expert(chosen, first, held, rows)
    assert tiles.pairs.shape == (len(tiles.experts) * rows,)
    seen = []
    for expert, pairs in zip(tiles.experts.tolist(), tiles.pairs.split(rows), strict=True):
        real = [pair for pair in pairs.tolist() if pair < tokens * top]
        assert not real or expert < held
        assert all(chosen.flatten()[pair] == first + expert for pair in real)
        seen += real
    wanted = [pair for pair, expert in enumerate(chosen.flatten().tolist()) if first <= expert < first + held]
    assert sorted(seen) == wanted
