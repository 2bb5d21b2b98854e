"""Linear layers with weights in int8: sums of integers are exact, a row has the same bits in any company, and little
memory is held.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.kernels import bindings, packed_linear
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_linear import GROUP, PackedInt8, PlainInt8, on_huge_pages, quantize
from quire_engine.quantization.int8 import Int8Linear
from quire_engine.quantization.schemes import make_linear
from torch.nn import functional as F

from tests.support.processors import FORMS, compile_for, on_threads

INT8 = LoadOptions(ExecutorConfig(quantization="int8"))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], PackedInt8 | PlainInt8]


@pytest.fixture(scope="module", params=FORMS)
def make(request) -> Make:
    """Makes the product of a quantised weight by a build for one kind of processor, or in torch."""
    if request.param == "torch":
        return lambda weight, scales, bias, dtype: PlainInt8(weight, scales, bias)
    native = bindings.library()
    if native is None:
        pytest.skip("the kernels cannot be compiled here")
    build = native if request.param == "native" else compile_for(request.param, "int8.cpp")
    return lambda weight, scales, bias, dtype: PackedInt8(build, weight, scales, bias, dtype)


def draw(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Exact:
    """A product whose numbers are whole numbers of eight bits times powers of two: nothing of them is rounded."""

    weight: torch.Tensor
    bias: torch.Tensor
    x: torch.Tensor
    expected: torch.Tensor


def exact_case(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> Exact:
    """Every channel of the weight, and every group of every row of ``x``, has 127 as its largest and an exponent of
    its own. Rows of ``x`` have gaps between them, in which nothing may be read.
    """
    random = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=random)

    weight, x = whole(-9, 9, outputs, inputs), whole(-127, 127, rows, inputs)
    weight[:, int(whole(0, inputs - 1, 1))] = 127
    groups = x.split(GROUP, dim=1)
    for group in groups:
        group[:, int(whole(0, group.shape[1] - 1, 1))] = -127
    shifted = torch.cat([group << whole(0, 3, rows, 1) for group in groups], dim=1)
    weight_shift = whole(0, 3, outputs)
    bias = whole(-100, 100, outputs)
    expected = (shifted @ weight.T << weight_shift) + bias
    wide = torch.full((rows, inputs + 3), torch.nan, dtype=dtype)
    wide[:, 1:-2] = shifted
    return Exact((weight << weight_shift[:, None]).to(dtype), bias.to(dtype), wide[:, 1:-2], expected.to(dtype))


shapes = {"rows": st.integers(0, 40), "inputs": st.integers(1, 300), "outputs": st.integers(1, 100), "dtype": DTYPES}
seeds = st.integers(0, 1 << 16)
TALL = {"rows": 500, "inputs": 131, "outputs": 33, "dtype": torch.bfloat16, "seed": 1}
WIDE = {"rows": 13, "inputs": 1024, "outputs": 514, "dtype": torch.float32, "seed": 2}


@settings(max_examples=25, deadline=None)
@given(**shapes, seed=seeds)
@example(**TALL)
@example(**WIDE)
def test_whole_numbers_are_multiplied_exactly(make, rows, inputs, outputs, dtype, seed):
    case = exact_case(rows, inputs, outputs, dtype, seed)
    result = make(*quantize(case.weight), case.bias, dtype).matmul(case.x, gated=False)
    assert result.dtype == dtype
    assert torch.equal(result, case.expected)


@settings(max_examples=25, deadline=None)
@given(**shapes, threads=st.integers(1, 3), data=st.data())
@example(rows=300, inputs=1000, outputs=70, dtype=torch.bfloat16, threads=3, data=None)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    make, rows, inputs, outputs, dtype, threads, data
):
    outputs += outputs % 2
    product = make(*quantize(draw(outputs, inputs, dtype=dtype)), draw(outputs, dtype=dtype, seed=2), dtype).matmul
    x = draw(rows, inputs, dtype=dtype, seed=1)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=30)) if data and rows else list(range(0, rows, 7))
    for gated in (False, True):
        together = product(x, gated=gated)
        with on_threads(threads):
            assert torch.equal(product(x[chosen], gated=gated), together[chosen])
        for row in chosen[:5]:
            assert torch.equal(product(x[row : row + 1], gated=gated)[0], together[row])


@settings(max_examples=25, deadline=None)
@given(**shapes, has_bias=st.booleans())
def test_the_result_is_the_plain_layers_to_about_two_digits(make, rows, inputs, outputs, dtype, has_bias):
    weight, x = draw(outputs, inputs, dtype=dtype), draw(rows, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if has_bias else None
    result = make(*quantize(weight), bias, dtype).matmul(x, gated=False).double()
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a step of each number that is rounded, at most, and the rounding of the result.
    steps = x.double().abs().amax(1, keepdim=True) if rows else x.double()[:, :1]
    limit = F.linear(steps.expand(x.shape) / 253, weight.double().abs())
    limit += F.linear(x.double().abs(), weight.double().abs().amax(1, keepdim=True).expand(weight.shape) / 253)
    limit += steps * weight.double().abs().amax(1) * inputs / 253**2 + expected.abs() / 200 + 1e-6
    assert bool(((result - expected).abs() <= limit).all())


def test_on_noise_the_error_is_one_percent(make):
    weight, x = draw(256, 1024, dtype=torch.float32), draw(64, 1024, dtype=torch.float32, seed=1)
    expected = F.linear(x, weight)
    result = make(*quantize(weight), None, torch.float32).matmul(x, gated=False)
    assert (result - expected).norm() / expected.norm() < 0.012


def test_an_outlier_costs_only_its_own_group_its_digits(make):
    weight, x = draw(64, 4 * GROUP, dtype=torch.float32), draw(8, 4 * GROUP, dtype=torch.float32, seed=1)
    weight[:, :GROUP] = 0
    product = make(*quantize(weight), None, torch.float32).matmul
    expected = product(x, gated=False)
    x[:, 5] = 1e6
    assert torch.equal(product(x, gated=False), expected)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 30), inputs=st.integers(1, 200), half=st.integers(1, 60), has_bias=st.booleans())
def test_gate_and_up_meet_as_they_would_apart(make, rows, inputs, half, has_bias):
    weight, x = draw(2 * half, inputs, dtype=torch.float32), draw(rows, inputs, dtype=torch.float32, seed=1)
    bias = draw(2 * half, dtype=torch.float32, seed=2) if has_bias else None
    product = make(*quantize(weight), bias, torch.float32).matmul
    expected = silu_mul(product(x, gated=False))
    torch.testing.assert_close(product(x, gated=True), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows_it_in_every_output_and_spoils_no_other(make, strange):
    product = make(*quantize(draw(50, 300, dtype=torch.bfloat16)), None, torch.bfloat16).matmul
    x = draw(14, 300, dtype=torch.bfloat16, seed=1)
    expected = product(x, gated=False)
    x[3, 200] = strange
    result = product(x, gated=False)
    assert not result[3].isfinite().any()
    others = [row for row in range(14) if row != 3]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("tiny", [0.0, 1e-38, 1e-44])
def test_tiny_values_count_as_zero(make, tiny):
    bias = draw(40, dtype=torch.float32)
    weight, x = draw(40, 130, dtype=torch.float32), draw(3, 130, dtype=torch.float32)
    weight[7], x[1] = tiny, tiny
    result = make(*quantize(weight), bias, torch.float32).matmul(x, gated=False)
    assert torch.equal(result[1], bias)
    assert torch.equal(result[:, 7], bias[7].expand(3))


@given(rows=st.integers(1, 60), inputs=st.integers(1, 60), dtype=DTYPES)
def test_a_quantized_weight_is_near_the_weight(rows, inputs, dtype):
    weight = draw(rows, inputs, dtype=dtype) * torch.logspace(-3, 3, rows)[:, None].to(dtype)
    values, scales = quantize(weight)
    assert values.dtype == torch.int8
    assert int(values.abs().amax()) == 127
    assert torch.equal(values.float().abs().amax(1), torch.full((rows,), 127.0))
    error = (values.double() * scales[:, None].double() - weight.double()).abs()
    assert bool((error <= scales[:, None].double() * 0.50001).all())


def test_a_large_weight_is_quantized_part_by_part_to_the_same(monkeypatch):
    weight = draw(37, 50, dtype=torch.bfloat16)
    whole = quantize(weight)
    monkeypatch.setattr(packed_linear, "_NUMBERS_AT_ONCE", 500)
    assert all(torch.equal(part, other) for part, other in zip(quantize(weight), whole, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 3, GROUP])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_torchs_private_product_is_that_of_whole_numbers_in_float32(monkeypatch, rows, depth):
    x, weight = torch.full((rows, depth), 127.0), torch.full((6, depth), -127, dtype=torch.int8)
    x[1:2], weight[2, 0] = -3, 100
    expected = (x.long() @ weight.long().T).float()
    assert torch.equal(packed_linear._exact_matmul(x, weight).float(), expected)
    monkeypatch.delattr(torch, "_int_mm", raising=False)
    assert torch.equal(packed_linear._exact_matmul(x, weight), expected)


# The layer.


def test_options_choose_the_layer():
    weight = draw(8, 4, dtype=torch.float32)
    assert isinstance(make_linear(weight, None, INT8), Int8Linear)
    assert not isinstance(make_linear(weight, None, LoadOptions()), Int8Linear)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_quantized_layer_takes_half_of_bfloat16s_memory_and_frees_the_weight(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(packed_linear, "library", lambda: None)
    elif bindings.library() is None:
        pytest.skip("the kernels cannot be compiled here")
    weight = draw(576, 1536, dtype=torch.bfloat16)
    gone = weakref.ref(weight.untyped_storage())
    layer = Int8Linear(weight)
    assert isinstance(layer._product, PackedInt8 if kernel else PlainInt8)
    assert 0.5 <= layer.nbytes / weight.nbytes < 0.51
    del weight
    assert gone() is None


def test_shapes_without_a_kernel_are_computed_in_torch():
    weight, x = draw(12, 30, dtype=torch.float16), draw(3, 30, dtype=torch.float16, seed=1)
    result = Int8Linear(weight)(x)
    assert result.dtype == torch.float16
    assert (result.float() - F.linear(x.float(), weight.float())).norm() < 0.3


def test_columns_may_lie_apart():
    weight, x = draw(12, 30, dtype=torch.float32), draw(30, 3, dtype=torch.float32, seed=1)
    layer = Int8Linear(weight)
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.zeros(2, 5), id="too wide"),
        pytest.param(torch.zeros(4), id="no rows"),
        pytest.param(torch.zeros(2, 4, dtype=torch.bfloat16), id="another dtype"),
        pytest.param(torch.zeros(2, 4, device="meta"), id="another device"),
    ],
)
def test_mismatched_shapes_are_refused(x):
    layer = Int8Linear(draw(6, 4, dtype=torch.float32))
    for call in (layer, layer.forward_silu_mul):
        with pytest.raises(ValueError, match="int8"):
            call(x)


def test_an_odd_number_of_outputs_has_no_gate():
    with pytest.raises(ValueError, match="7 outputs"):
        Int8Linear(draw(7, 4, dtype=torch.float32)).forward_silu_mul(torch.zeros(1, 4))


# Huge pages.


def test_copies_on_huge_pages_are_whole_aligned_and_apart(monkeypatch):
    monkeypatch.setattr(packed_linear, "_MAPPING_BYTES", 1 << 14)
    packed_linear._huge_pages.cache_clear()
    plain = [draw(size, dtype=torch.bfloat16, seed=size) for size in (1, 33, 5000, 9000, 70, 0, 3000)]
    held = [on_huge_pages(tensor) for tensor in plain]
    packed_linear._huge_pages.cache_clear()
    assert all(torch.equal(one, other) for one, other in zip(plain, held, strict=True))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in held)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held if len(tensor))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells of mappings")
def test_memory_for_huge_pages_is_private_as_shared_memory_gets_none():
    address = on_huge_pages(torch.ones(1)).data_ptr()
    mappings = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [([int(bound, 16) for bound in span.split("-")], access) for span, access in mappings]
    assert [access for (start, end), access in bounds if start <= address < end] == ["rw-p"]
