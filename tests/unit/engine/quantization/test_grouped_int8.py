"""Linear layers with weights in int8 that have a scale for each group of inputs: sums of integers are exact, a row has
the same bits in any company, and the numbers are those of the dequantised weight.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.kernels import bindings
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_groups import GROUP_SIZES, GroupedWeight, PackedGroups, PlainGroups
from quire_engine.kernels.packed_linear import GROUP
from quire_engine.quantization.quantized_linear import GroupedLinear
from torch.nn import functional as F

from tests.support.processors import FORMS, compile_for, on_threads

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


def draw_weight(outputs: int, inputs: int, group: int, seed: int = 0, power_of_two: bool = False) -> GroupedWeight:
    """Any number of eight bits, and scales of any size or powers of two."""
    random = torch.Generator().manual_seed(seed)
    size = outputs, -(-inputs // group)
    scales = torch.rand(size, generator=random).half().float() + 0.01
    if power_of_two:
        scales = 2.0 ** torch.randint(-2, 4, size, generator=random)
    q = torch.randint(-128, 128, (outputs, inputs), generator=random).to(torch.int8)
    return GroupedWeight(q, scales, None, group)


shapes = {
    "rows": st.integers(0, 40),
    "inputs": st.integers(1, 300),
    "outputs": st.integers(1, 100),
    "group": st.sampled_from(GROUP_SIZES[8]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}
TALL = {"rows": 500, "inputs": 131, "outputs": 33, "group": 16, "dtype": torch.bfloat16, "seed": 1}


@settings(max_examples=25, deadline=None)
@given(**shapes, seed=st.integers(0, 1 << 16))
@example(**TALL)
def test_activations_that_int8_holds_are_multiplied_exactly(make, rows, inputs, outputs, group, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    weight = draw_weight(outputs, inputs, group, seed, power_of_two=True)
    # Rows with gaps between them, in which nothing may be read.
    wide = torch.full((rows, inputs + 3), torch.nan)
    wide[:, 1:-2] = torch.randint(-127, 128, (rows, inputs), generator=random)
    for first in range(0, inputs, GROUP):
        wide[:, 1 + first] = -127
    x = wide[:, 1:-2].to(dtype)
    result = make(weight, None, dtype).matmul(x, gated=False)
    expected = F.linear(x.double(), weight.dequantize().double())
    # All terms have few digits, so fp32 holds their sums: nothing but the result is rounded.
    assert torch.equal(result, expected.to(dtype))


@settings(max_examples=25, deadline=None)
@given(**shapes, threads=st.integers(1, 3), seed=st.integers(0, 1 << 16))
@example(**{**TALL, "rows": 300, "inputs": 1000}, threads=3)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    make, rows, inputs, outputs, group, dtype, threads, seed
):
    outputs += outputs % 2
    product = make(draw_weight(outputs, inputs, group), draw(outputs, dtype=dtype, seed=2), dtype).matmul
    x = draw(rows, inputs, dtype=dtype, seed=1)
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 30].tolist()
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
    weight, x = draw_weight(outputs, inputs, group), draw(rows, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if has_bias else None
    result = make(weight, bias, dtype).matmul(x, gated=False).double()
    plain = weight.dequantize().double()
    expected = F.linear(x.double(), plain, None if bias is None else bias.double())
    # Half a step of each number that is rounded, at most; fp16's digits of scales; the result's rounding.
    steps = x.double().abs().amax(1, keepdim=True) if rows else x.double()[:, :1]
    limit = F.linear(steps.expand(x.shape) / 253, plain.abs()) + expected.abs() / 200 + 1e-6
    limit += F.linear(x.double().abs(), plain.abs()) / 2000
    assert bool(((result - expected).abs() <= limit).all())


def test_kernels_and_torch_agree(make):
    weight, x = draw_weight(66, 520, 32), draw(30, 520, dtype=torch.float32, seed=3)
    expected = PlainGroups(weight, None).matmul(x, gated=False)
    torch.testing.assert_close(make(weight, None, torch.float32).matmul(x, gated=False), expected, rtol=1e-5, atol=1e-2)


def test_gate_and_up_meet_as_they_would_apart(make):
    product = make(draw_weight(90, 200, 16), None, torch.float32).matmul
    x = draw(30, 200, dtype=torch.float32) / 1000
    torch.testing.assert_close(product(x, gated=True), silu_mul(product(x, gated=False)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows_it_in_every_output_and_spoils_no_other(make, strange):
    product = make(draw_weight(50, 300, 32), None, torch.bfloat16).matmul
    x = draw(14, 300, dtype=torch.bfloat16, seed=1)
    expected = product(x, gated=False)
    x[3, 200] = strange
    result = product(x, gated=False)
    assert not result[3].isfinite().any()
    others = [row for row in range(14) if row != 3]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize(("group", "share"), [(16, 9 / 16), (32, 8.5 / 16)])
def test_a_layer_takes_half_of_bfloat16s_memory_and_its_scales(group, share):
    layer = GroupedLinear(draw_weight(576, 1536, group), None, torch.bfloat16)
    assert share <= layer.nbytes / (2 * 576 * 1536) < share + 0.01


@pytest.mark.parametrize(
    ("q", "group_size"), [(torch.zeros(4, 64, dtype=torch.uint8), 32), (torch.zeros(4, 64, dtype=torch.int8), 8)]
)
def test_what_is_no_weight_in_groups_is_refused(q, group_size):
    with pytest.raises(ValueError, match="int8"):
        GroupedWeight(q, torch.ones(4, 64 // group_size), None, group_size)
