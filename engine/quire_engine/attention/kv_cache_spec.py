"""The layout of a KV block, layer by layer (vLLM's ``KVCacheSpec``).

A block has the keys and values of ``block_size`` tokens in all layers of a group, one layer after the other, as one run
of bytes. So any block is copied, swapped and stored as a unit. Layers may differ in KV heads and head size, like the
global and local layers of Gemma 4. A layer that reads another layer's keys and values has none itself. Layers that
keep a state have blocks of their own (``state_cache``).

Most models have one group with all layers. If some layers have a window, layers with equal windows form groups, so that
blocks can be freed once they leave the window. The number of groups of each kind is chosen so that the blocks of all
groups have about the same size, because all come from one pool (vLLM's hybrid KV cache groups).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire_engine.attention.base import LayerAttention, LayerKV
from quire_engine.attention.kv_rows import row_size

MAX_GROUPS = 16
MAX_PADDING = 1 / 8
"""The largest part of all blocks of a token that may be empty because some groups have fewer or smaller layers."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One layer's keys and values in a block of ``dtype``: ``[2, num_kv_heads, block_size, row_size]`` from element
    ``offset``. A row has ``head_dim`` numbers, in the format of ``kv_rows``.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, layer: LayerAttention, block_size: int, dtype: torch.dtype, offset: int) -> "KVCacheSpec":
        """Returns the spec of ``layer``."""
        return cls(layer.num_kv_heads, layer.head_dim, block_size, dtype, offset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Planes (keys, values), KV heads, slots, elements per row."""
        return 2, self.num_kv_heads, self.block_size, row_size(self.head_dim, self.dtype)

    @property
    def end(self) -> int:
        """The element of the block after this layer's last one."""
        planes, heads, slots, row = self.shape
        return self.offset + planes * heads * slots * row

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns this layer's part of ``blocks`` [blocks, elements], in the shape that attention takes."""
        return blocks[:, self.offset : self.end].unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block of any group of layers: the ``specs`` of the group's attention layers. A block has
    ``elements`` of ``dtype``.

    ``specs`` and ``layer_groups`` (group numbers) have an entry for each attention layer, in order. ``windows`` has an
    entry for each group: how many tokens its layers see, None for all.
    """

    block_size: int
    specs: tuple[KVCacheSpec, ...]
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
        *,
        max_model_len: int | None = None,
    ) -> "BlockLayout":
        """Makes the layout for blocks of ``block_size`` tokens and rows of ``dtype``.

        With ``max_model_len``, layers with shorter windows get groups from ``group_layers``. If that finds none, there
        is one group that sees all tokens. Without ``layers`` a block has one element, which nothing reads, so that
        blocks can be counted by their bytes.
        """
        owners = [index for index, layer in enumerate(layers) if layer.kv_layer is None]
        groups: list[LayerGroup] = []
        if max_model_len is not None:
            sizes = {index: KVCacheSpec.of(layers[index], block_size, dtype, 0).end for index in owners}
            groups = group_layers(_windows(layers, max_model_len), sizes)
        specs: dict[int, KVCacheSpec] = {}
        numbers: dict[int, int] = {}
        end = 0
        for number, group in enumerate(groups or [LayerGroup(None, owners)]):
            offset = 0
            for index in group.layers:
                specs[index], numbers[index] = KVCacheSpec.of(layers[index], block_size, dtype, offset), number
                offset = specs[index].end
            end = max(end, offset)
        read = [index if layer.kv_layer is None else layer.kv_layer for index, layer in enumerate(layers)]
        return cls(
            block_size,
            specs=tuple(specs[index] for index in read),
            elements=max(1, end),
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
        """Returns the parts of ``blocks`` [blocks, elements] in the form that ``Model.forward`` takes: one for each
        attention layer.
        """
        pairs = zip(self.specs, self.layer_groups, strict=True)
        return [LayerKV(spec.view(blocks), group) for spec, group in pairs]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """``layers``, by index, that share the blocks of a sequence, and the number of tokens that they see; None for
    all.
    """

    window: int | None
    layers: list[int]


def group_layers(windows: Mapping[int, int | None], sizes: Mapping[int, int]) -> list[LayerGroup]:
    """Groups layers by their ``windows``, None for layers that see all tokens. Both arguments are keyed by layer index,
    and ``sizes`` are elements per block. Groups that see all tokens come first.

    A valid grouping has at most ``MAX_GROUPS`` groups and leaves at most ``MAX_PADDING`` of all blocks empty. The
    memory of long sequences depends on the groups that see all tokens. Among the groupings in which that memory is
    about the least, it returns the one with the fewest groups, because each costs time in every step. Returns no groups
    if no grouping is valid.
    """
    kinds: dict[int | None, list[int]] = {}
    for index in sorted(windows, key=lambda index: windows[index] is not None):
        kinds.setdefault(windows[index], []).append(index)
    largest = {window: max(sizes[index] for index in layers) for window, layers in kinds.items()}
    ways: list[tuple[int, list[LayerGroup]]] = []  # elements that a token keeps permanently, and the groups
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
    """Returns, for each layer that has its own keys and values, how many tokens must be kept, for itself and for the
    layers that read them; None for all.
    """
    readers: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        owner = index if layer.kv_layer is None else layer.kv_layer
        readers.setdefault(owner, []).append(layer.window or max_model_len)
    return {owner: max(seen) if max(seen) < max_model_len else None for owner, seen in readers.items()}
