"""What a block of KV memory holds, layer by layer (vLLM's ``KVCacheSpec``).

A block has the keys and values of ``block_size`` tokens in all layers, one layer behind the other, as one run of bytes:
so it is copied, swapped and stored as one, whatever the layers are. Layers may differ in KV heads and in the sizes of
their heads, as the global and the local ones of Gemma 4 do, and a layer that reads the keys and values of another has
none of its own. Layers that keep a state instead of keys and values have theirs in the block as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_rows import row_size

STATE_ALIGNMENT = 16


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
    """A block of all layers: ``state_bytes`` of the layers that keep a state, and then what ``specs`` says of those
    with attention, in order. ``elements`` of ``dtype`` in all.
    """

    block_size: int
    specs: tuple[KVCacheSpec, ...]
    state_bytes: int
    elements: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, layers: Sequence[LayerAttention], block_size: int, dtype: torch.dtype, state_bytes: int = 0
    ) -> "BlockLayout":
        """The layout for blocks of ``block_size`` tokens and rows of ``dtype``. With a state, blocks have whole
        multiples of ``STATE_ALIGNMENT`` bytes.
        """
        specs: list[KVCacheSpec] = []
        end = -(-state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT // dtype.itemsize
        for layer in layers:
            if layer.kv_layer is not None:
                specs.append(specs[layer.kv_layer])
                continue
            specs.append(KVCacheSpec(layer.num_kv_heads, layer.head_dim, block_size, dtype, end))
            end = specs[-1].end
        if state_bytes:
            end = -(-end * dtype.itemsize // STATE_ALIGNMENT) * STATE_ALIGNMENT // dtype.itemsize
        return cls(block_size, tuple(specs), state_bytes, end, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        size: int = self.dtype.itemsize
        return self.elements * size

    def views(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """The parts of ``blocks`` [blocks, elements], as ``Model.forward`` takes them: that of each layer with
        attention, and last, where there are any, the states [blocks, state_bytes] in bytes.
        """
        views = [spec.view(blocks) for spec in self.specs]
        return [*views, blocks.view(torch.uint8)[:, : self.state_bytes]] if self.state_bytes else views
