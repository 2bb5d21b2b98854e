"""What a block of KV memory holds, layer by layer (vLLM's ``KVCacheSpec``).

A block has the keys and values of ``block_size`` tokens in all layers, one layer behind the other, as one run of bytes:
so it is copied, swapped and stored as one, whatever the layers are. Layers may differ in KV heads and in the sizes of
their heads, as the global and the local ones of Gemma 4 do, and a layer that reads the keys and values of another has
none of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_rows import row_size


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


def kv_cache_specs(layers: Sequence[LayerAttention], block_size: int, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
    """The specs of a model's layers, in rows of ``dtype``."""
    specs: list[KVCacheSpec] = []
    end = 0
    for layer in layers:
        if layer.kv_layer is not None:
            specs.append(specs[layer.kv_layer])
            continue
        specs.append(KVCacheSpec(layer.num_kv_heads, layer.head_dim, block_size, dtype, end))
        end = specs[-1].end
    return tuple(specs)


def block_elements(specs: Sequence[KVCacheSpec]) -> int:
    """Elements of a block with all layers."""
    return max(spec.end for spec in specs)
