"""What a block of KV memory holds, layer by layer (vLLM's ``KVCacheSpec``).

A block has the keys and values of ``block_size`` tokens in all layers of a group, one layer behind the other, as one
run of bytes: so it is copied, swapped and stored as one, whatever the layers are. Layers may differ in KV heads and in
the sizes of their heads, as the global and the local ones of Gemma 4 do, and a layer that reads the keys and values of
another has none of its own. Layers that keep a state instead of keys and values have theirs in the block as well.

Most models have one group, of all layers. Where some have a window, those that see as far back as each other are
together, so that their blocks can be given up once the window has left them; and there are so many groups of either
kind that the blocks of all take about the same bytes, as all are taken from one pool (vLLM's hybrid KV cache groups).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire_engine.attention.base import LayerAttention, LayerKV
from quire_engine.attention.kv_rows import row_size

STATE_ALIGNMENT = 16
MAX_GROUPS = 16
MAX_PADDING = 1 / 8
"""Of all blocks of a token, the part that may be empty because groups have fewer layers than others, or smaller ones.
"""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The keys and values of one layer in a block of ``dtype``: ``[2, num_kv_heads, block_size, row_size]`` from its
    element ``offset`` on, with rows of ``head_dim`` numbers as ``kv_rows`` has them.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, layer: LayerAttention, block_size: int, dtype: torch.dtype, offset: int) -> "KVCacheSpec":
        """That of ``layer``."""
        return cls(layer.num_kv_heads, layer.head_dim, block_size, dtype, offset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Planes (keys, values), KV heads, slots, elements of a row."""
        return 2, self.num_kv_heads, self.block_size, row_size(self.head_dim, self.dtype)

    @property
    def end(self) -> int:
        """The element of the block behind this layer's last one."""
        planes, heads, slots, row = self.shape
        return self.offset + planes * heads * slots * row

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """This layer's part of ``blocks`` [blocks, elements], as attention takes it."""
        return blocks[:, self.offset : self.end].unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block of any group of layers: ``state_bytes`` of the layers that keep a state, and then what ``specs`` says of
    the group's layers with attention. ``elements`` of ``dtype`` in all.

    ``specs`` and ``layer_groups``, the number of its group, have an entry for each layer with attention, in order, and
    ``windows`` one for each group: how many tokens its layers see, None for all.
    """

    block_size: int
    specs: tuple[KVCacheSpec, ...]
    state_bytes: int
    elements: int
    dtype: torch.dtype
    layer_groups: tuple[int, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerAttention],
        block_size: int,
        dtype: torch.dtype,
        state_bytes: int = 0,
        *,
        max_model_len: int | None = None,
    ) -> "BlockLayout":
        """The layout for blocks of ``block_size`` tokens and rows of ``dtype``. With a state, blocks have whole
        multiples of ``STATE_ALIGNMENT`` bytes.

        With ``max_model_len``, layers whose windows are shorter have groups of their own, as ``group_layers`` makes
        them. Where it makes none, or with a state, there is one group that sees all tokens.
        """
        start = -(-state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT // dtype.itemsize
        owners = [index for index, layer in enumerate(layers) if layer.kv_layer is None]
        groups: list[LayerGroup] = []
        if max_model_len is not None and not state_bytes:
            sizes = {index: KVCacheSpec.of(layers[index], block_size, dtype, 0).end for index in owners}
            groups = group_layers(_windows(layers, max_model_len), sizes)
        specs: dict[int, KVCacheSpec] = {}
        numbers: dict[int, int] = {}
        end = start
        for number, group in enumerate(groups or [LayerGroup(None, owners)]):
            offset = start
            for index in group.layers:
                specs[index], numbers[index] = KVCacheSpec.of(layers[index], block_size, dtype, offset), number
                offset = specs[index].end
            end = max(end, offset)
        if state_bytes:
            end = -(-end * dtype.itemsize // STATE_ALIGNMENT) * STATE_ALIGNMENT // dtype.itemsize
        read = [index if layer.kv_layer is None else layer.kv_layer for index, layer in enumerate(layers)]
        return cls(
            block_size,
            specs=tuple(specs[index] for index in read),
            state_bytes=state_bytes,
            elements=end,
            dtype=dtype,
            layer_groups=tuple(numbers[index] for index in read),
            windows=tuple(group.window for group in groups) or (None,),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        size: int = self.dtype.itemsize
        return self.elements * size

    def views(self, blocks: torch.Tensor) -> list[LayerKV]:
        """The parts of ``blocks`` [blocks, elements], as ``Model.forward`` takes them: that of each layer with
        attention, and last, where there are any, the states [blocks, state_bytes] in bytes.
        """
        pairs = zip(self.specs, self.layer_groups, strict=True)
        views = [LayerKV(spec.view(blocks), group) for spec, group in pairs]
        return [*views, LayerKV(blocks.view(torch.uint8)[:, : self.state_bytes])] if self.state_bytes else views


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """``layers`` by their indices, which share the blocks of a sequence, and how many tokens they see; None for all."""

    window: int | None
    layers: list[int]


def group_layers(windows: Mapping[int, int | None], sizes: Mapping[int, int]) -> list[LayerGroup]:
    """The groups of layers with these ``windows``, None for layers that see all tokens, by their indices; a block has
    ``sizes`` elements of each. Those that see all tokens are in the first groups.

    Of all ways with at most ``MAX_GROUPS`` and no more than ``MAX_PADDING`` of all blocks empty, those are looked at in
    which long sequences take about the least, which is what those that see all tokens do. The one with the fewest
    groups is taken, as each costs some time in every step. There are no groups if there is no way.
    """
    kinds: dict[int | None, list[int]] = {}
    for index in sorted(windows, key=lambda index: windows[index] is not None):
        kinds.setdefault(windows[index], []).append(index)
    largest = {window: max(sizes[index] for index in layers) for window, layers in kinds.items()}
    ways: list[tuple[int, list[LayerGroup]]] = []  # elements that a token takes for good, and the groups
    for elements in sorted({count * largest[window] for window in kinds for count in range(1, len(kinds[window]) + 1)}):
        if elements < max(largest.values()):
            continue
        groups = [
            LayerGroup(window, layers[first : first + elements // largest[window]])
            for window, layers in kinds.items()
            for first in range(0, len(layers), elements // largest[window])
        ]
        if len(groups) <= MAX_GROUPS and sum(sizes.values()) >= (1 - MAX_PADDING) * elements * len(groups):
            ways.append((elements * sum(group.window is None for group in groups), groups))
    least = min((kept for kept, _ in ways), default=0)
    return min((groups for kept, groups in ways if kept * (1 - MAX_PADDING) <= least), key=len, default=[])


def _windows(layers: Sequence[LayerAttention], max_model_len: int) -> dict[int, int | None]:
    """How many tokens the layers with keys and values of their own have to be kept for, as others may read them too;
    None for all.
    """
    readers: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        owner = index if layer.kv_layer is None else layer.kv_layer
        readers.setdefault(owner, []).append(layer.window or max_model_len)
    return {owner: max(seen) if max(seen) < max_model_len else None for owner, seen in readers.items()}
