"""Layers that differ in heads lie in one block, one behind the other, and attend through one plan."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.attention.mixed import MixedAttention, attention_of
from quire_engine.attention.reference import ReferenceAttention

from tests.support.ragged_steps import make_step

BLOCK_SIZE = 4
LOCAL = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=5)
GLOBAL = LayerAttention(num_heads=4, num_kv_heads=1, head_dim=16, scale=0.3, soft_cap=2.0)
LAYERS = st.lists(
    st.builds(
        LayerAttention,
        num_heads=st.just(4),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([4, 8]),
        scale=st.just(1.0),
    ),
    min_size=1,
    max_size=6,
)


@given(LAYERS, st.sampled_from([torch.float32, torch.int8]))
def test_each_layer_has_a_part_of_every_block_and_no_element_belongs_to_two(
    layers: list[LayerAttention], dtype: torch.dtype
) -> None:
    layout = BlockLayout.of(layers, BLOCK_SIZE, dtype)
    blocks = torch.zeros(3, layout.elements, dtype=dtype)
    for number, (view, layer) in enumerate(zip(layout.views(blocks), layers, strict=True), start=1):
        row = layer.head_dim + (4 if dtype == torch.int8 else 0)
        assert view.shape == (3, 2, layer.num_kv_heads, BLOCK_SIZE, row)
        assert (view == 0).all()
        view.fill_(number)
    assert (blocks != 0).all()
    assert sum(math.prod(spec.shape) for spec in layout.specs) == layout.elements


def test_layers_that_are_equal_lie_as_one_tensor_of_them_would() -> None:
    layout = BlockLayout.of([LOCAL] * 3, BLOCK_SIZE, torch.float32)
    blocks = torch.arange(2 * layout.elements).view(2, -1)
    whole = blocks.view(2, 3, 2, LOCAL.num_kv_heads, BLOCK_SIZE, LOCAL.head_dim)
    for layer, view in enumerate(layout.views(blocks)):
        assert torch.equal(view, whole[:, layer])
        assert view.stride() == whole[:, layer].stride()


def test_a_layer_that_reads_the_keys_of_another_has_no_room_of_its_own() -> None:
    shared = LayerAttention(num_heads=8, num_kv_heads=2, head_dim=8, scale=0.3, kv_layer=0)
    layout = BlockLayout.of([LOCAL, GLOBAL, shared], BLOCK_SIZE, torch.float32)
    assert layout.specs[2] is layout.specs[0]
    assert layout.elements == layout.specs[1].end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_states_lie_where_numbers_of_any_size_can_be_read_and_in_no_layer(dtype: torch.dtype) -> None:
    layout = BlockLayout.of([LOCAL, GLOBAL], 1, dtype, state_bytes=40)
    blocks = torch.zeros(3, layout.elements, dtype=dtype)
    *layers, states = layout.views(blocks)
    assert states.shape == (3, 40)
    states.view(torch.int64).fill_(-1)
    assert all((layer == 0).all() for layer in layers)
    assert layout.block_bytes % 16 == 0


@pytest.mark.parametrize("make", [ReferenceAttention, CpuAttention])
def test_layers_of_two_shapes_share_a_plan(make: type) -> None:
    attention = attention_of([LOCAL, GLOBAL], BLOCK_SIZE, make)
    assert isinstance(attention, MixedAttention)
    lengths = [(1, 9), (6, 3)]
    steps = [make_step(layer.shape(BLOCK_SIZE), lengths, torch.float32, seed=1) for layer in (LOCAL, GLOBAL)]
    attention.prepare(steps[0].batch)
    for step, layer in zip(steps, (LOCAL, GLOBAL), strict=True):
        alone = step.run(ReferenceAttention(step.shape), layer.window)
        mixed = step.forward(attention, layer.window)
        for mine, expected in zip(mixed, alone, strict=True):
            torch.testing.assert_close(mine, expected, equal_nan=True)


def test_layers_of_one_shape_need_one_backend_whatever_their_windows() -> None:
    other = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
    assert isinstance(attention_of([LOCAL, other], BLOCK_SIZE, ReferenceAttention), ReferenceAttention)


def test_layers_that_only_scales_tell_apart_are_refused() -> None:
    other = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
    with pytest.raises(ValueError, match="differ in scale or soft cap"):
        attention_of([LOCAL, other], BLOCK_SIZE, ReferenceAttention)
