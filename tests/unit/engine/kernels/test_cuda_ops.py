"""What a GPU computes besides attention: FlashInfer's small kernels, on an emulation of them, against their torch
twins, and the product whose order of summation is fixed, in Triton's interpreter.
"""

import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.kernels import cuda_ops, ops
from quire_engine.quantization.base import with_activation
from quire_engine.quantization.unquantized import BatchInvariantLinear
from torch.nn import functional as F

from tests.support.flashinfer_emulation import installed

BF16 = torch.bfloat16
TOLERANCES = {torch.float16: 4e-3, BF16: 3e-2}
DTYPES = st.sampled_from(sorted(TOLERANCES, key=str))


@pytest.fixture(autouse=True, scope="module")
def emulation():
    """On the CPU torch aligns memory less than on a GPU."""
    cuda_ops._flashinfer.cache_clear()
    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ops, "_TENSOR_ALIGNMENT", 16)
        yield
    cuda_ops._flashinfer.cache_clear()


def noise(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.outer(torch.arange(tokens).float(), torch.rand(half))
    return turned.cos(), turned.sin()


def assert_near(mine: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[mine.dtype]
    torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.sampled_from([64, 576, 1024]), DTYPES, st.sampled_from([0.0, 1.0]))
def test_norms_are_their_twins(tokens, width, dtype, offset):
    x, residual, weight = (
        noise(tokens, width, dtype=dtype),
        noise(tokens, width, dtype=dtype),
        noise(width, dtype=dtype),
    )
    normed = cuda_ops.flashinfer_rms_norm(x, weight, 1e-5, offset=offset)
    assert_near(normed, ops.rms_norm(x, weight, 1e-5, offset=offset))
    summed = residual.clone()
    expected = ops.add_rms_norm(x.clone(), summed, weight, 1e-5, offset=offset)
    assert_near(cuda_ops.flashinfer_add_rms_norm(x, residual, weight, 1e-5, offset=offset), expected)
    assert_near(residual, summed)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(2, 5), st.sampled_from([64, 128]), DTYPES)
def test_a_norm_of_each_head_takes_slices_of_a_wider_tensor(tokens, heads, dim, dtype):
    part = noise(tokens, heads + 3, dim, dtype=dtype)[:, 1 : heads + 1]
    weight = noise(dim, dtype=dtype)
    assert_near(cuda_ops.flashinfer_rms_norm(part, weight, 1e-5), ops.rms_norm(part, weight, 1e-5))
    assert cuda_ops.flashinfer_rms_norm(part, weight, 1e-5, offset=1.0) is None


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.sampled_from([8, 1536]), DTYPES)
def test_the_activations_are_their_twins(tokens, width, dtype):
    gate_up = noise(tokens, 2 * width, dtype=dtype)
    assert_near(cuda_ops.flashinfer_silu_mul(gate_up), ops.silu_mul(gate_up))
    assert_near(cuda_ops.flashinfer_gelu_mul(gate_up), ops.gelu_mul(gate_up))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 5), st.sampled_from([(64, 32), (128, 64), (128, 32)]), DTYPES, st.booleans())
def test_rotation_is_its_twin_and_touches_no_other_head(tokens, heads, size, dtype, together):
    dim, half = size
    wide = noise(tokens, heads + 2, dim, dtype=dtype)
    expected = wide.clone()
    cos, sin = angles(tokens, half)
    ops.rotate(expected[:, 1:-1], cos, sin)
    if together:
        cos, sin = torch.cat((cos, sin), 1).chunk(2, dim=1)
    assert cuda_ops.flashinfer_rotate(wide[:, 1:-1], cos, sin)
    assert_near(wide, expected)


def test_angles_that_lie_beside_each_other_are_not_copied():
    both = torch.randn(5, 64)
    cos, sin = both.chunk(2, dim=1)
    assert cuda_ops._cos_sin_table(cos, sin).data_ptr() == both.data_ptr()
    for first, second in ((sin, cos), (cos, cos), (cos, sin.clone()), (cos.contiguous(), sin.contiguous())):
        joined = cuda_ops._cos_sin_table(first, second)
        assert torch.equal(joined, torch.cat((first, second), 1))
        assert joined.data_ptr() != both.data_ptr()


def test_tensors_that_flashinfer_does_not_support_are_left_to_torch():
    x, narrow = noise(4, 64), noise(4, 12)
    assert cuda_ops.flashinfer_rms_norm(x.float(), noise(64).float(), 1e-5) is None
    assert cuda_ops.flashinfer_rms_norm(x, noise(64).float(), 1e-5) is None
    assert cuda_ops.flashinfer_rms_norm(narrow, noise(12), 1e-5) is None
    assert cuda_ops.flashinfer_rms_norm(noise(64, 4).t(), noise(64), 1e-5) is None
    assert cuda_ops.flashinfer_rms_norm(noise(4 * 64 + 1)[1:].view(4, 64), noise(64), 1e-5) is None
    assert cuda_ops.flashinfer_rms_norm(noise(0, 64), noise(64), 1e-5) is None
    residual = noise(4, 70)[:, :64]
    before = residual.clone()
    assert cuda_ops.flashinfer_add_rms_norm(x, residual, noise(64), 1e-5) is None
    assert torch.equal(residual, before)
    assert cuda_ops.flashinfer_silu_mul(noise(4, 24)) is None
    assert cuda_ops.flashinfer_silu_mul(noise(4, 64)[:, :32]) is None
    heads = noise(4, 2, 64)
    for part, half in ((heads[:, :1], 32), (heads, 4), (heads.float(), 32)):
        before = part.clone()
        assert not cuda_ops.flashinfer_rotate(part, *angles(4, half))
        assert torch.equal(part, before)


def test_without_flashinfer_every_operation_is_left_to_torch_with_one_warning(monkeypatch, caplog):
    cuda_ops._flashinfer.cache_clear()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with caplog.at_level(logging.WARNING):
        assert cuda_ops.flashinfer_silu_mul(noise(4, 64)) is None
        assert cuda_ops.flashinfer_rms_norm(noise(4, 64), noise(64), 1e-5) is None
    assert len(caplog.records) == 1
    cuda_ops._flashinfer.cache_clear()


PRODUCTS = """
import torch
from quire_engine.kernels.batch_invariant import batch_invariant_linear
noise = torch.Generator().manual_seed(0)
for rows, depth, columns, biased in ((1, 64, 64, True), (5, 200, 130, False), (130, 72, 40, True)):
    x, weight = (torch.randn(n, depth, generator=noise).half() for n in (rows, columns))
    bias = torch.randn(columns, generator=noise).half() if biased else None
    whole = batch_invariant_linear(x, weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=2e-2, rtol=2e-3)
    for part in (slice(0, 1), slice(rows - 1, rows), slice(rows // 2, rows)):
        assert torch.equal(batch_invariant_linear(x[part], weight, bias), whole[part])
    wide = torch.cat((x, x), dim=1)[:, :depth]
    assert torch.equal(batch_invariant_linear(wide, weight, bias), whole)
assert batch_invariant_linear(x[:0], weight, bias).shape == (0, 40)
print("the products agree")
"""


NORMS_AND_ROTATIONS = """
import torch
from quire_engine.kernels import ops
from quire_engine.kernels.norm_rotate import triton_norm_rotate
noise = torch.Generator().manual_seed(0)
for tokens, queries, keys, dim in ((1, 16, 8, 128), (7, 9, 3, 64), (33, 4, 4, 256), (0, 2, 2, 64)):
    for dtype in (torch.float32, torch.float16):
        made = torch.randn(tokens, queries + 2 * keys, dim, generator=noise).to(dtype)
        expected = made.clone()
        query, key = (torch.randn(dim, generator=noise).to(dtype) for _ in range(2))
        angles = torch.outer(torch.arange(tokens).float(), torch.rand(dim // 2, generator=noise))
        cos, sin = torch.cat((angles.cos(), angles.sin()), 1).chunk(2, dim=1)
        norms = ops.HeadNorms(query, key, queries, 1e-6)
        assert triton_norm_rotate(made[:, :-keys], cos, sin, query=query, key=key, num_queries=queries, eps=1e-6)
        ops.norm_rotate(expected[:, :-keys], norms, cos, sin)
        tolerance = 1e-2 if dtype is torch.float16 else 1e-5
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)
x, weight = torch.randn(3, 4, 64), torch.randn(64)
cos = sin = torch.ones(3, 32)
for changed in (x.transpose(0, 2), x.half(), torch.randn(3, 4, 48), torch.randn(3, 4, 128)):
    assert not triton_norm_rotate(changed, cos, sin, query=weight, key=weight, num_queries=2, eps=1e-6)
print("the norms agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_are_their_formulas_for_any_rows():
    """In fp16, as Triton's interpreter knows no products in bf16."""
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PRODUCTS + NORMS_AND_ROTATIONS]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout == "the products agree\nthe norms agree\n", ran.stderr


def test_an_invariant_layer_refuses_what_makes_no_product():
    layer = BatchInvariantLinear(noise(6, 8), noise(6))
    assert (layer.in_features, layer.out_features) == (8, 6)
    for x in (noise(2, 7), noise(2, 8).float()):
        with pytest.raises(ValueError, match="make no product"):
            layer(x)


def test_an_invariant_layer_multiplies_and_gates(monkeypatch):
    """The kernel itself is tested above; here torch stands in for it."""
    monkeypatch.setattr("quire_engine.quantization.unquantized.batch_invariant_linear", F.linear)
    weight, bias, x = noise(6, 8), noise(6), noise(2, 8)
    layer = BatchInvariantLinear(weight, bias)
    assert torch.equal(layer(x), F.linear(x, weight, bias))
    assert torch.equal(with_activation(layer, ops.silu_mul)(x), ops.silu_mul(F.linear(x, weight, bias)))
