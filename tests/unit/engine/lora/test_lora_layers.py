"""Each row of a layer gets what its own adapter adds, wherever it stands in the batch and whatever lay in its slot."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.lora.adapter import LoRAWeights
from quire_engine.lora.layers import LoRABatch, LoRALayers
from quire_engine.quantization.base import LayerSpec
from quire_engine.quantization.unquantized import PackedLinear
from torch.nn import functional as F

INPUTS, SLOTS, MAX_RANK = 6, 3, 4
NAMES, OUTPUTS = ("gate", "up"), (8, 8)
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


@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), adapters()), min_size=1, max_size=6),
    st.lists(st.integers(-1, SLOTS - 1), max_size=9),
)
def test_rows_get_what_is_in_their_slots(
    placed: Sequence[tuple[int, dict[str, LoRAWeights]]], slots: list[int]
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(sum(OUTPUTS), INPUTS), torch.randn(sum(OUTPUTS))
    base, layers = PackedLinear(weight, bias), LoRALayers(SLOTS, MAX_RANK, torch.float32, CPU)
    layer = layers.wrap(base, LayerSpec(NAMES, OUTPUTS, INPUTS))
    in_slots: dict[int, dict[str, LoRAWeights]] = {}
    for slot, adapter in placed:
        in_slots[slot] = adapter
        layers.set_slot(slot, layers.shard(adapter))
    x = torch.randn(len(slots), INPUTS)
    expected = F.linear(x, weight, bias)
    for row, slot in enumerate(slots):
        if slot in in_slots:
            expected[row] += added(x[row : row + 1], in_slots[slot])[0]
    layers.batch = LoRABatch.of(torch.tensor(slots, dtype=torch.int64), CPU)
    torch.testing.assert_close(layer(x), expected)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(layer.forward_silu_mul(x), F.silu(gate) * up)


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
    layers.batch = LoRABatch.of(torch.tensor(slots, dtype=torch.int64), CPU)
    x = torch.randn(len(slots), INPUTS)
    assert (layer(x), layer.forward_silu_mul(x)) == ("base", "fused")
