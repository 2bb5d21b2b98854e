"""Each row of a layer gets what its own adapter adds, wherever it stands in the batch and whatever lay in its slot."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.kernels.bindings import library
from quire_engine.kernels.lora_kernel import LoRAKernel
from quire_engine.lora.adapter import LoRAWeights
from quire_engine.lora.layers import LoRALayers, LoRALinear
from quire_engine.quantization.base import LayerSpec
from quire_engine.quantization.unquantized import PackedLinear
from torch.nn import functional as F

SLOTS, MAX_RANK = 3, 9
INPUTS = 70  # no multiple of a vector
NAMES, OUTPUTS = ("gate", "up"), (40, 40)
CPU = torch.device("cpu")


@st.composite
def adapters(draw: st.DrawFn) -> dict[str, LoRAWeights]:
    """One that changes some of the parts of the layer."""
    rank, seed = draw(st.integers(1, MAX_RANK)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        name: LoRAWeights(torch.randn(rank, INPUTS, generator=seed), torch.randn(rank, size, generator=seed))
        for name, size in zip(NAMES, OUTPUTS, strict=True)
        if draw(st.booleans())
    }


def added(x: torch.Tensor, adapter: dict[str, LoRAWeights]) -> torch.Tensor:
    """What an adapter adds to the layer's output."""
    parts = [
        x @ adapter[name].a.T @ adapter[name].b if name in adapter else torch.zeros(len(x), size)
        for name, size in zip(NAMES, OUTPUTS, strict=True)
    ]
    return torch.cat(parts, -1)


def make_layers(
    weight: torch.Tensor, bias: torch.Tensor, *, compiled: bool = True, deterministic: bool = False
) -> tuple[LoRALayers, LoRALinear]:
    """One layer with slots beside it, without the kernel unless ``compiled``."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(LoRAKernel, "suits", lambda _dtype, _device: False)
        layers = LoRALayers(SLOTS, MAX_RANK, weight.dtype, CPU)
        return layers, layers.wrap(
            PackedLinear(weight, bias, deterministic=deterministic), LayerSpec(NAMES, OUTPUTS, INPUTS)
        )


@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), adapters()), min_size=1, max_size=6),
    st.lists(st.integers(-1, SLOTS - 1), max_size=19),
    st.booleans(),
)
def test_rows_get_what_is_in_their_slots(
    placed: Sequence[tuple[int, dict[str, LoRAWeights]]], slots: list[int], compiled: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(sum(OUTPUTS), INPUTS), torch.randn(sum(OUTPUTS))
    layers, layer = make_layers(weight, bias, compiled=compiled)
    in_slots: dict[int, dict[str, LoRAWeights]] = {}
    for slot, adapter in placed:
        in_slots[slot] = adapter
        layers.set_slot(slot, layers.shard(adapter))
    x = torch.randn(len(slots), INPUTS)
    expected = F.linear(x, weight, bias)
    for row, slot in enumerate(slots):
        if slot in in_slots:
            expected[row] += added(x[row : row + 1], in_slots[slot])[0]
    layers.set_batch(torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-5)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(layer.forward_silu_mul(x), F.silu(gate) * up, atol=1e-3, rtol=1e-5)


@pytest.mark.skipif(library() is None, reason="this is about the compiled kernel, which needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=19), seed=st.integers(0, 9))
def test_a_rows_bits_do_not_depend_on_what_else_is_in_the_batch(
    dtype: torch.dtype, slots: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    layers, layer = make_layers(
        torch.randn(sum(OUTPUTS), INPUTS, dtype=dtype), torch.randn(sum(OUTPUTS), dtype=dtype), deterministic=True
    )
    for slot in range(SLOTS):
        parts = {
            name: LoRAWeights(torch.randn(9, INPUTS), torch.randn(9, size))
            for name, size in zip(NAMES, OUTPUTS, strict=True)
        }
        layers.set_slot(slot, layers.shard(parts))
    x = torch.randn(len(slots), 2 * INPUTS, dtype=dtype)[:, :INPUTS]
    layers.set_batch(torch.tensor(slots))
    together = layer(x)
    for row, slot in enumerate(slots):
        layers.set_batch(torch.tensor([slot]))
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
        if dtype is torch.bfloat16 and slot >= 0:
            a, b = (getattr(layer, name)[slot].double() for name in ("_a", "_b"))
            low = (x[row].double() @ a.T).view(2, -1)
            exact = [half @ part for half, part in zip(low, b.chunk(2, -1), strict=True)]
            layers.set_batch(torch.tensor([-1]))
            base = layer(x[row : row + 1])[0].double()
            torch.testing.assert_close(together[row].double(), base + torch.cat(exact), atol=0.05, rtol=0.01)


def test_the_kernel_refuses_what_it_may_not_touch() -> None:
    _, layer = make_layers(torch.randn(sum(OUTPUTS), INPUTS), torch.zeros(sum(OUTPUTS)))
    if layer._kernel is None:
        pytest.skip("this is about the compiled kernel, which needs a C++ compiler")
    x, out = torch.randn(3, INPUTS), torch.zeros(3, sum(OUTPUTS))
    for wrong in ((x[:2], out), (x[:, 1:], out), (x, out[:, 1:]), (x.double(), out), (x.T.contiguous().T, out)):
        with pytest.raises(ValueError, match=r"do not suit|without gaps"):
            layer._kernel.add(*wrong)


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_a_batch_without_adapters_runs_the_base_layer_alone(slots: list[int]) -> None:
    class Base:
        in_features, out_features = INPUTS, sum(OUTPUTS)

        def __call__(self, x: torch.Tensor) -> str:
            return "base"

        def forward_silu_mul(self, x: torch.Tensor) -> str:
            return "fused"

    layers = LoRALayers(SLOTS, MAX_RANK, torch.float32, CPU)
    layer = layers.wrap(Base(), LayerSpec(NAMES, OUTPUTS, INPUTS))
    layers.set_batch(torch.tensor(slots, dtype=torch.int64))
    x = torch.randn(len(slots), INPUTS)
    assert (layer(x), layer.forward_silu_mul(x)) == ("base", "fused")
