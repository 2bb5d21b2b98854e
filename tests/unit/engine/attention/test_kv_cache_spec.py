"""Layers that differ in heads lie in one block, one behind the other, and attend through one plan."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_cache_spec import MAX_GROUPS, MAX_PADDING, BlockLayout, group_layers
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
    views = [each.pages for each in layout.views(blocks)]
    for number, (view, layer) in enumerate(zip(views, layers, strict=True), start=1):
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
    for layer, (view, _) in enumerate(layout.views(blocks)):
        assert torch.equal(view, whole[:, layer])
        assert view.stride() == whole[:, layer].stride()


# Of layers that see all tokens, and of those with a window: how many there are, and how large one is in a block.
SHAPES = st.tuples(*[st.integers(0, 40), st.integers(0, 60), st.integers(1, 4), st.integers(1, 4)])


@given(SHAPES)
def test_groups_have_every_layer_once_and_take_about_the_same(shape: tuple[int, int, int, int]) -> None:
    full, local, full_size, local_size = shape
    windows = {index: None if index < full else 100 for index in range(full + local)}
    sizes = {index: full_size if index < full else local_size for index in windows}
    groups = group_layers(windows, sizes)
    if not groups:
        return
    assert sorted(index for group in groups for index in group.layers) == list(windows)
    assert all(windows[index] == group.window for group in groups for index in group.layers)
    assert len(groups) <= MAX_GROUPS
    block = max(sum(sizes[index] for index in group.layers) for group in groups)
    assert sum(sizes.values()) >= (1 - MAX_PADDING) * block * len(groups)
    assert full == 0 or groups[0].window is None


@pytest.mark.parametrize(
    ("full", "local", "counts"),
    [
        (5, 29, [5, 5, 5, 5, 5, 5, 4]),  # Gemma 3 4B
        (8, 40, [8, 8, 8, 8, 8, 8]),
        (21, 21, [21, 21]),
        (12, 13, [12, 13]),
        (0, 32, [32]),
        (32, 0, [32]),
        (1, 1, [1, 1]),
    ],
)
def test_groups_are_as_few_as_can_be(full: int, local: int, counts: list[int]) -> None:
    windows = {index: None if index < full else 100 for index in range(full + local)}
    groups = group_layers(windows, dict.fromkeys(windows, 1))
    assert [len(group.layers) for group in groups] == counts


def test_no_groups_where_a_block_of_one_layer_would_be_mostly_empty_in_the_others() -> None:
    assert group_layers({0: None, 1: 8, 2: 8, 3: 8}, {0: 7, 1: 4, 2: 4, 3: 4}) == []


def test_layers_of_several_groups_lie_in_the_same_part_of_a_block() -> None:
    full, local = replace(LOCAL, window=None), replace(LOCAL, window=8)
    reader = replace(local, kv_layer=1)
    layout = BlockLayout.of([local, full, local, full, reader], BLOCK_SIZE, torch.float32, max_model_len=100)
    assert layout.windows == (None, 8)
    assert layout.layer_groups == (1, 0, 1, 0, 0)
    assert layout.elements == BlockLayout.of([full] * 2, BLOCK_SIZE, torch.float32).elements
    blocks = torch.zeros(2, layout.elements)
    views = layout.views(blocks)
    assert [view.group for view in views] == [1, 0, 1, 0, 0]
    assert views[0].pages.data_ptr() == views[1].pages.data_ptr()
    assert views[2].pages.data_ptr() == views[3].pages.data_ptr() > views[0].pages.data_ptr()
    assert BlockLayout.of([local, full], BLOCK_SIZE, torch.float32, max_model_len=8).windows == (None,)


def test_a_layer_is_kept_for_all_that_read_it() -> None:
    """The second reads the keys of the first, and sees further back."""
    far = replace(LOCAL, window=30, kv_layer=0)
    layout = BlockLayout.of([replace(LOCAL, window=8), far], BLOCK_SIZE, torch.float32, max_model_len=100)
    assert layout.windows == (30,)


def test_a_layer_that_reads_the_keys_of_another_has_no_room_of_its_own() -> None:
    shared = LayerAttention(num_heads=8, num_kv_heads=2, head_dim=8, scale=0.3, kv_layer=0)
    layout = BlockLayout.of([LOCAL, GLOBAL, shared], BLOCK_SIZE, torch.float32)
    assert layout.specs[2] is layout.specs[0]
    assert layout.elements == layout.specs[1].end


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
