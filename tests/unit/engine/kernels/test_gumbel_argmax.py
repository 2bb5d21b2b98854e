"""The Triton sampler: what it draws in Triton's interpreter is what torch draws, to the bit, and what the compiler
makes of it for a GPU fuses and approximates nothing.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when Triton is imported, and compiles nothing: its test has a process of its own.
DRAWS = """
import math

import numpy as np
import torch
from quire_engine.kernels import gumbel_argmax
from quire_engine.sampling.metadata import SamplingMetadata, gumbel_noise
from quire_engine.sampling.sample_kernel import sample_rows_in_triton
from quire_engine.sampling.sample_ops import MIN_TEMPERATURE, finite_rows, sample
from quire_proto.sampling import SamplingParams

gumbel_argmax.BLOCK = 128
drawn, draw = [], gumbel_argmax.gumbel_argmax
gumbel_argmax.gumbel_argmax = lambda *inputs, **params: drawn.append(draw(*inputs, **params)) or drawn[-1]
gumbel_argmax.draw_something(torch.device("cpu"))
STYLES = [
    {"temperature": 0}, {}, {"temperature": 1e-40}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 100}, {"min_p": 0.1},
    {"top_p": 0.9}, {"top_p": 1e-9}, {"temperature": 1.7, "top_k": 40, "top_p": 0.5, "min_p": 0.01},
]
SHAPES = [(1, torch.float16), (50, torch.bfloat16), (200, torch.float32)]
for seed, (width, dtype) in enumerate(SHAPES):
    logits = torch.randn(4, width + 3, generator=torch.Generator().manual_seed(seed)).mul_(3)[:, :width].to(dtype)
    logits[1] = logits[1].round()
    logits[2, :-1], logits[3, 0] = -math.inf, math.nan
    count = len(STYLES)
    rows = (np.arange(count) + seed) % 3  # over the seeds, each style draws from each row
    params = [SamplingParams(**style) for style in STYLES]
    metadata = SamplingMetadata.from_params(params, range(seed, seed + count), range(count))
    made = sample_rows_in_triton(gumbel_argmax, logits, rows, metadata)
    assert made.token_ids.tolist() == sample(logits[rows].float(), metadata).tolist()
    assert made.finite.tolist() == finite_rows(logits).tolist()
    assert made.highest.nan_to_num(9e9).tolist() == logits.float().amax(-1).nan_to_num(9e9).tolist()
    some = SamplingMetadata.from_params(params[-2:], range(2), range(2))
    broken = sample_rows_in_triton(gumbel_argmax, logits, np.full(2, 3), some)
    assert ((broken.token_ids >= 0) & (broken.token_ids < width)).all()
    # The noise of the winner, too, to the last bit.
    (_, noisy), scores = drawn[-2], logits[rows].float()
    on_cpu = metadata.to(logits.device)
    noise = gumbel_noise(on_cpu.keys, made.token_ids[:, None].int()).masked_fill_(on_cpu.temperature[:, None] == 0, 0)
    temperature = torch.where(on_cpu.temperature == 0, 1, on_cpu.temperature.clamp(min=MIN_TEMPERATURE))
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    assert torch.equal(noisy, (scores.gather(1, made.token_ids[:, None]) + noise).squeeze(1))
print("all agree")
"""
POINTERS = {
    "row_of": "*i64", "temperatures": "*fp32", "top_ks": "*i64", "top_ps": "*fp64", "log_min_ps": "*fp32",
    "keys": "*i32", "token_ids": "*i64", "noisy": "*fp32",
}  # fmt: skip


def test_triton_draws_the_same_bits_as_torch() -> None:
    command, variables = [sys.executable, "-c", DRAWS], os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout == "all agree\n", ran.stderr


def test_what_is_compiled_for_a_gpu_fuses_and_approximates_nothing() -> None:
    """For GPUs that need not be there."""
    from quire_engine.kernels import gumbel_argmax
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {"logits": "*bf16", **POINTERS, "stride": "i64", "width": "i32", "block": "constexpr"}
    source = ASTSource(gumbel_argmax.draw, signature, {"block": gumbel_argmax.BLOCK})
    options = {"enable_fp_fusion": False, "num_warps": gumbel_argmax.WARPS}
    code = compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]
    assert "mul.rn.f32" in code
    assert "div.rn.f32" in code
    assert not any(word in code for word in ("fma", "div.full", "div.approx", ".ftz"))
