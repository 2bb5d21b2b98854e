"""Linear layers with a packed weight: the same product, one copy of the weight, and a way out."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.models import linear
from quire_engine.models.linear import PackedLinear
from torch.nn import functional as F

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}


def draw(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCES)),
    rows=st.integers(0, 80),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 200),
    has_bias=st.booleans(),
)
def test_the_product_is_that_of_the_plain_layer(dtype, rows, inputs, outputs, has_bias):
    gap = inputs % 4
    weight, bias = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype) if has_bias else None
    x = draw(rows, inputs + gap, dtype=dtype, seed=1)[:, gap:]
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    layer = PackedLinear(weight, bias)
    result = layer(x)
    assert (layer.in_features, layer.out_features) == (inputs, outputs)
    assert result.dtype == dtype
    assert result.shape == (rows, outputs)
    limit = TOLERANCES[dtype] * max(1.0, expected.abs().max().item() if rows else 1.0)
    torch.testing.assert_close(result.float(), expected, atol=limit, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_weight_is_let_go_once_it_is_packed(dtype):
    weight = draw(64, 32, dtype=dtype)
    storage = weakref.ref(weight.untyped_storage())
    layer = PackedLinear(weight)
    if not layer.packed:
        pytest.skip("this torch cannot pack weights")
    expected = layer(torch.ones(1, 32, dtype=dtype))
    gone = weakref.ref(weight)
    del weight
    assert gone() is None
    assert storage() is None
    assert torch.equal(layer(torch.ones(1, 32, dtype=dtype)), expected)


def test_a_packed_layer_no_longer_follows_the_weight_it_was_made_from():
    weight = draw(8, 8, dtype=torch.float32)
    layer = PackedLinear(weight)
    before = layer(torch.ones(1, 8))
    weight.zero_()
    assert torch.equal(layer(torch.ones(1, 8)), before) == layer.packed


class _Operators:
    """Stands where torch's operators are, with packing that goes wrong in one way."""

    def __init__(self, reorder, product):
        self.mkldnn = self
        self._reorder_linear_weight, self._linear_pointwise = reorder, product


def _refuse(*_):
    raise RuntimeError("not on this processor")


@pytest.mark.parametrize(
    "operators",
    [
        pytest.param(object(), id="missing"),
        pytest.param(_Operators(_refuse, _refuse), id="failing at packing"),
        pytest.param(_Operators(lambda w, _: w, _refuse), id="failing at the product"),
        pytest.param(_Operators(lambda w, _: w, lambda x, w, b, *_: F.linear(x, w, b) * 1.01), id="wrong"),
        pytest.param(_Operators(lambda w, _: w, lambda x, w, b, *_: F.linear(x, w, b) * torch.nan), id="NaN"),
        pytest.param(_Operators(lambda w, _: w, F.relu), id="of another signature"),
    ],
)
def test_packing_that_cannot_be_trusted_is_done_without(monkeypatch, operators):
    monkeypatch.setattr(linear.torch, "ops", operators)
    weight, bias, x = draw(16, 24, dtype=torch.float32), draw(16, dtype=torch.float32), draw(3, 24, dtype=torch.float32)
    layer = PackedLinear(weight, bias)
    assert not layer.packed
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_a_weight_off_the_cpu_is_left_plain():
    weight = torch.empty(4, 8, device="meta")
    layer = PackedLinear(weight)
    assert not layer.packed
    assert layer(torch.empty(3, 8, device="meta")).shape == (3, 4)
