"""Linear layers with weights in four bits: sums of integers are exact, a row has the same bits in any company, scales
suit the weights, and little memory is held.
"""

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.kernels import bindings, packed_groups
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_groups import GROUP_SIZES, GroupedWeight, PackedGroups, PlainGroups
from quire_engine.kernels.packed_linear import GROUP
from quire_engine.quantization import int4
from quire_engine.quantization.int4 import quantize_int4
from quire_engine.quantization.quantized_linear import GroupedLinear
from quire_engine.quantization.schemes import make_linear
from torch.nn import functional as F

from tests.support.processors import FORMS, compile_for, on_threads

INT4 = LoadOptions(ExecutorConfig(quantization="int4"))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
Make = Callable[[GroupedWeight, torch.Tensor | None, torch.dtype], PackedGroups | PlainGroups]


@pytest.fixture(scope="module", params=FORMS)
def make(request) -> Make:
    """Makes the product of a weight by a build for one kind of processor, or in torch."""
    if request.param == "torch":
        return lambda weight, bias, dtype: PlainGroups(weight, bias)
    native = bindings.library()
    if native is None:
        pytest.skip("the kernels cannot be compiled here")
    build = native if request.param == "native" else compile_for(request.param, "groups.cpp")
    return lambda weight, bias, dtype: PackedGroups(build, weight, bias, dtype)


def draw(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(low: int, high: int, *size: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=random)


def draw_weight(outputs: int, inputs: int, group: int, seed: int = 0) -> GroupedWeight:
    """Any q, scales that are powers of two, and zeros that are whole or halves."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scales = 2.0 ** whole(-2, 3, outputs, groups, random=random)
    zeros = whole(0, 30, outputs, groups, random=random) / 2
    return GroupedWeight(whole(0, 15, outputs, inputs, random=random).to(torch.uint8), scales, zeros, group)


def draw_rounded(rows: int, inputs: int, seed: int) -> torch.Tensor:
    """Activations that int8 holds exactly, with an exponent of its own for every group of every row, in rows that have
    gaps between them, in which nothing may be read. Whole numbers [rows, inputs] in fp32.
    """
    random = torch.Generator().manual_seed(seed)
    groups = whole(-127, 127, rows, inputs, random=random).split(GROUP, dim=1)
    for group in groups:
        group[:, int(whole(0, group.shape[1] - 1, 1, random=random))] = -127
    shifted = [group << whole(0, 3, rows, 1, random=random) for group in groups]
    wide = torch.full((rows, inputs + 3), torch.nan)
    wide[:, 1:-2] = torch.cat(shifted, dim=1)
    return wide[:, 1:-2]


shapes = {
    "rows": st.integers(0, 40),
    "inputs": st.integers(1, 300),
    "outputs": st.integers(1, 100),
    "group": st.sampled_from(GROUP_SIZES[4]),
    "dtype": DTYPES,
}
seeds = st.integers(0, 1 << 16)
TALL = {"rows": 500, "inputs": 131, "outputs": 33, "group": 32, "dtype": torch.bfloat16, "seed": 1}
WIDE = {"rows": 13, "inputs": 1024, "outputs": 514, "group": 64, "dtype": torch.float32, "seed": 2}


@settings(max_examples=25, deadline=None)
@given(**shapes, seed=seeds)
@example(**TALL)
@example(**WIDE)
def test_activations_that_int8_holds_are_multiplied_exactly(make, rows, inputs, outputs, group, dtype, seed):
    weight, x = draw_weight(outputs, inputs, group, seed), draw_rounded(rows, inputs, seed).to(dtype)
    bias = draw(outputs, dtype=dtype, seed=seed)
    result = make(weight, bias, dtype).matmul(x, gated=False)
    expected = F.linear(x.double(), weight.dequantize().double(), bias.double())
    assert result.dtype == dtype
    # All terms have few digits, so fp32 holds their sums: nothing but the bias and the result is rounded.
    torch.testing.assert_close(result.double(), expected.to(dtype).double(), atol=1e-2, rtol=1e-7)


@settings(max_examples=25, deadline=None)
@given(**shapes, threads=st.integers(1, 3), data=st.data())
@example(rows=300, inputs=1000, outputs=70, group=32, dtype=torch.bfloat16, threads=3, data=None)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    make, rows, inputs, outputs, group, dtype, threads, data
):
    outputs += outputs % 2
    weight = quantize_int4(draw(outputs, inputs, dtype=dtype), group)
    product = make(weight, draw(outputs, dtype=dtype, seed=2), dtype).matmul
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
def test_the_result_is_that_of_the_dequantised_weight_to_the_rounding_of_activations(
    make, rows, inputs, outputs, group, dtype, has_bias
):
    weight, x = quantize_int4(draw(outputs, inputs, dtype=dtype), group), draw(rows, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if has_bias else None
    result = make(weight, bias, dtype).matmul(x, gated=False).double()
    plain = weight.dequantize().double()
    expected = F.linear(x.double(), plain, None if bias is None else bias.double())
    # Half a step of each number that is rounded, at most; fp16's digits of scales and zeros; the result's rounding.
    steps = x.double().abs().amax(1, keepdim=True) if rows else x.double()[:, :1]
    limit = F.linear(steps.expand(x.shape) / 253, plain.abs()) + expected.abs() / 200 + 1e-6
    spans = (weight.scales * (15 + weight.zeros)).amax(1).double()
    limit += x.double().abs().sum(1, keepdim=True) * spans / 2000
    assert bool(((result - expected).abs() <= limit).all())


def test_kernels_and_torch_agree(make):
    weight = quantize_int4(draw(66, 520, dtype=torch.float32))
    x, bias = draw_rounded(30, 520, 3), draw(66, dtype=torch.float32, seed=4)
    expected = PlainGroups(weight, bias).matmul(x, gated=False)
    result = make(weight, bias, torch.float32).matmul(x, gated=False)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-2)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 30), inputs=st.integers(1, 200), half=st.integers(1, 60), has_bias=st.booleans())
def test_gate_and_up_meet_as_they_would_apart(make, rows, inputs, half, has_bias):
    weight, x = quantize_int4(draw(2 * half, inputs, dtype=torch.float32)), draw(rows, inputs, dtype=torch.float32)
    bias = draw(2 * half, dtype=torch.float32, seed=2) if has_bias else None
    product = make(weight, bias, torch.float32).matmul
    expected = silu_mul(product(x, gated=False))
    torch.testing.assert_close(product(x, gated=True), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows_it_in_every_output_and_spoils_no_other(make, strange):
    product = make(quantize_int4(draw(50, 300, dtype=torch.bfloat16)), None, torch.bfloat16).matmul
    x = draw(14, 300, dtype=torch.bfloat16, seed=1)
    expected = product(x, gated=False)
    x[3, 200] = strange
    result = product(x, gated=False)
    assert not result[3].isfinite().any()
    others = [row for row in range(14) if row != 3]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("tiny", [0.0, 1e-44])
def test_tiny_values_count_as_zero(make, tiny):
    bias = draw(40, dtype=torch.float32)
    weight, x = draw(40, 130, dtype=torch.float32), draw(3, 130, dtype=torch.float32)
    weight[7], x[1] = tiny, tiny
    result = make(quantize_int4(weight), bias, torch.float32).matmul(x, gated=False)
    assert torch.equal(result[1], bias)
    torch.testing.assert_close(result[:, 7], bias[7].expand(3))


# Quantising.


@settings(max_examples=25, deadline=None)
@given(outputs=st.integers(1, 40), inputs=st.integers(1, 300), group=st.sampled_from(GROUP_SIZES[4]), dtype=DTYPES)
def test_a_searched_scale_has_no_larger_error_than_that_of_the_whole_range(outputs, inputs, group, dtype):
    plain = draw(outputs, inputs, dtype=dtype).float() * torch.logspace(-4, 4, outputs)[:, None]
    weight = quantize_int4(plain, group)
    error = (weight.dequantize() - plain).square()
    for first in range(0, inputs, group):
        part = plain[:, first : first + group]
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        step = (high - low) / 15
        simple = ((part - low) / step).round() * step + low
        allowed = (simple - part).square().sum(1) * 1.001 + 1e-11 * (high - low).square().sum(1)
        assert bool((error[:, first : first + group].sum(1) <= allowed).all())


def test_on_noise_the_search_takes_a_tenth_off_the_error():
    plain = draw(64, 4096, dtype=torch.float32)
    groups = plain.view(64, -1, 128)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    simple = ((groups - low) / (high - low) * 15).round() * (high - low) / 15 + low
    before, after = (simple - groups).square().sum(), (quantize_int4(plain, 128).dequantize() - plain).square().sum()
    assert after < 0.9 * before


@settings(max_examples=20, deadline=None)
@given(outputs=st.integers(1, 20), inputs=st.integers(1, 200), group=st.sampled_from(GROUP_SIZES[4]), seed=seeds)
def test_weights_of_sixteen_levels_come_back(outputs, inputs, group, seed):
    """Where the sixteen levels are known, they are found: every group has both ends of its range."""
    weight = draw_weight(outputs, inputs - inputs % group + group, group, seed)
    weight.q[:, ::group], weight.q[:, 1::group] = 0, 15
    plain = weight.dequantize()
    torch.testing.assert_close(quantize_int4(plain, group).dequantize(), plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_a_quantised_weight_are_the_quantised_shards(dim, ranks):
    plain = draw(96, 1024, dtype=torch.bfloat16)
    whole_weight = quantize_int4(plain)
    shards = [quantize_int4(part) for part in plain.chunk(ranks, dim)]
    for name in ("q", "scales", "zeros"):
        assert torch.equal(torch.cat([getattr(part, name) for part in shards], dim), getattr(whole_weight, name))
    x = draw(5, 1024, dtype=torch.float32, seed=1)
    expected = GroupedLinear(whole_weight, None, torch.float32)(x)
    if dim == 0:
        result = torch.cat([GroupedLinear(part, None, torch.float32)(x) for part in shards], 1)
        assert torch.equal(result, expected)
    else:
        parts = zip(shards, x.chunk(ranks, 1), strict=True)
        result = torch.stack([GroupedLinear(part, None, torch.float32)(some) for part, some in parts]).sum(0)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("q", "scales", "group_size"),
    [
        pytest.param(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 4), 16, id="small groups"),
        pytest.param(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 3), 32, id="scales"),
        pytest.param(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), 32, id="dtype"),
    ],
)
def test_what_is_no_weight_in_four_bits_is_refused(q, scales, group_size):
    with pytest.raises(ValueError, match="int4"):
        GroupedWeight(q, scales, scales, group_size)


@settings(max_examples=30, deadline=None)
@given(outputs=st.integers(1, 40), groups=st.integers(1, 5), group=st.sampled_from(GROUP_SIZES[4]), seed=seeds)
def test_kernel_and_torch_find_equally_good_scales(outputs, groups, group, seed):
    """Sums of other orders may choose another range of nearly the same error."""
    if bindings.library() is None:
        pytest.skip("the kernels cannot be compiled here")
    plain = draw(outputs, groups, group, dtype=torch.float32, seed=seed)
    errors = []
    for search in (int4._search, int4._torch_search):
        q, scales, zeros = search(plain)
        assert q.dtype is torch.uint8
        assert int(q.max()) <= 15
        errors.append(((q.float() - zeros[..., None]) * scales[..., None] - plain).square().sum(2))
    torch.testing.assert_close(errors[0], errors[1], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("search", [int4._search, int4._torch_search])
def test_a_group_that_is_not_finite_has_a_scale_that_is_not(search, strange):
    plain = draw(3, 2, 32, dtype=torch.float32)
    plain[1, 1, 7] = strange
    _, scales, _ = search(plain)
    assert (~scales.isfinite()).nonzero().tolist() == [[1, 1]]


# The layer.


def test_options_choose_the_layer():
    assert isinstance(make_linear(draw(8, 4, dtype=torch.float32), None, INT4), GroupedLinear)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_layer_takes_a_third_of_bfloat16s_memory_and_frees_the_weight(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(packed_groups, "library", lambda: None)
    elif bindings.library() is None:
        pytest.skip("the kernels cannot be compiled here")
    plain = draw(576, 1536, dtype=torch.bfloat16)
    gone = weakref.ref(plain.untyped_storage())
    layer = GroupedLinear(quantize_int4(plain), None, torch.bfloat16)
    assert isinstance(layer._product, PackedGroups if kernel else PlainGroups)
    assert 5 / 16 <= layer.nbytes / plain.nbytes < 0.32
    del plain
    assert gone() is None


def test_columns_may_lie_apart():
    layer, x = make_linear(draw(12, 30, dtype=torch.float32), None, INT4), draw(30, 3, dtype=torch.float32, seed=1)
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
    layer = make_linear(draw(6, 4, dtype=torch.float32), None, INT4)
    for call in (layer, layer.forward_silu_mul):
        with pytest.raises(ValueError, match="int4"):
            call(x)


def test_an_odd_number_of_outputs_has_no_gate():
    with pytest.raises(ValueError, match="7 outputs"):
        make_linear(draw(7, 4, dtype=torch.float32), None, INT4).forward_silu_mul(torch.zeros(1, 4))
