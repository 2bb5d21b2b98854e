"""The KV memory itself: the device's blocks, the host's blocks, and copies between them. Knows no sequences.

Both pools are ``[blocks, layers, 2, kv_heads, block_size, head_dim]``, so that a block of all layers is one
contiguous copy.
"""

import math
import mmap
from collections.abc import Sequence

import torch

from quire_engine.executor.base import CopyError
from quire_engine.executor.torch.sizing import Pools
from quire_engine.kv.capacity import KvCapacity
from quire_engine.models.base import AttentionLayout
from quire_engine.models.errors import ModelError
from quire_engine.scheduling.plan import BlockCopy

MIN_BLOCKS = 2


class KvCache:
    """Device and host pool of one model, of the sizes that were decided in bytes."""

    def __init__(
        self, layout: AttentionLayout, block_size: int, pools: Pools, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = _block_shape(layout, block_size)
        block_bytes = math.prod(shape) * dtype.itemsize
        blocks, host_blocks = pools.kv_cache_bytes // block_bytes, max(0, pools.swap_bytes) // block_bytes
        if blocks < MIN_BLOCKS:
            raise ModelError(
                f"The KV cache of {pools.kv_cache_bytes} bytes holds fewer than {MIN_BLOCKS} blocks "
                f"of {block_size} tokens, which take {block_bytes} bytes each for this model."
            )
        self.capacity = KvCapacity(block_size, blocks, host_blocks, block_bytes)
        self.device = _untouched((blocks, *shape), dtype, device)
        self._host = _untouched((host_blocks, *shape), dtype, torch.device("cpu"))

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks from the device to the host. Raises ``CopyError``."""
        _copy(self.device, self._host, copies)

    def copy_within(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks from the device to the device. Raises ``CopyError``."""
        _copy(self.device, self.device, copies)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks from the host to the device. Raises ``CopyError``."""
        _copy(self._host, self.device, copies)

    def close(self) -> None:
        """Gives the memory back; nothing can be computed any more."""
        self.device = self.device.new_empty(0)
        self._host = self._host.new_empty(0)


def smallest_pools(layout: AttentionLayout, block_size: int, dtype: torch.dtype) -> Pools:
    """The least that an executor can be made with. Raises ``ModelError`` for an impossible block size."""
    return Pools(MIN_BLOCKS * math.prod(_block_shape(layout, block_size)) * dtype.itemsize, 0)


def _block_shape(layout: AttentionLayout, block_size: int) -> tuple[int, ...]:
    if block_size < 1:
        raise ModelError(f"The block size is {block_size} tokens, and it must be at least 1.")
    return layout.num_layers, 2, layout.num_kv_heads, block_size, layout.head_dim


def _copy(sources: torch.Tensor, targets: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    for copy in copies:
        if not (0 <= copy.source < len(sources) and 0 <= copy.target < len(targets)):
            raise CopyError(f"No such block: {copy}, of {len(sources)} and {len(targets)} blocks.")
        try:
            targets[copy.target].copy_(sources[copy.source])
        except RuntimeError as error:
            raise CopyError(f"{copy} failed: {error}") from error


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU they are pages that the system gives when they are first written, so an idle pool
    costs nothing.

    ``torch.zeros`` writes every byte, which would make the whole pool resident at the start.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype).view(shape)
    except (OSError, OverflowError, MemoryError, RuntimeError):
        raise ModelError(f"There is no memory for a KV pool of {size} bytes on the {device.type}.") from None
