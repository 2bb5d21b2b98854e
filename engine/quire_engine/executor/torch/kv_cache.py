"""The KV memory itself: the device's blocks, the host's blocks, and copies between them. Knows no sequences.

Both pools are ``[blocks, layers, 2, kv_heads, block_size, head_dim]``, so that a block of all layers is one
contiguous copy, and so are neighbouring blocks that move to neighbouring places.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from quire_engine.executor.base import CopyError
from quire_engine.executor.torch.sizing import Pools
from quire_engine.executor.torch.streams import CopyOrder, copy_order
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.copy import BlockCopy
from quire_engine.models.base import AttentionLayout
from quire_engine.models.errors import ModelError

MIN_BLOCKS = 2


class KvCache:
    """Device and host pool of one model, of the sizes that were decided in bytes.

    ``order`` says when copies happen on a device that works beside the host. On CUDA the host pool is pinned.
    """

    def __init__(
        self,
        layout: AttentionLayout,
        block_size: int,
        pools: Pools,
        dtype: torch.dtype,
        device: torch.device,
        *,
        order: CopyOrder | None = None,
    ) -> None:
        shape = _block_shape(layout, block_size)
        block_bytes = math.prod(shape) * dtype.itemsize
        blocks, host_blocks = pools.kv_cache_bytes // block_bytes, max(0, pools.swap_bytes) // block_bytes
        if blocks < MIN_BLOCKS:
            raise ModelError(
                f"The KV cache of {pools.kv_cache_bytes} bytes holds fewer than {MIN_BLOCKS} blocks "
                f"of {block_size} tokens, which take {block_bytes} bytes each for this model."
            )
        self.capacity = KVCacheConfig(block_size, blocks, host_blocks, block_bytes)
        self.device = _untouched((blocks, *shape), dtype, device)
        self._host = _untouched((host_blocks, *shape), dtype, torch.device("cpu"))
        self._release = _pin(self._host, device) if device.type == "cuda" and host_blocks else None
        self._order = order or copy_order(device)
        self.computed()

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Copies blocks to the host, within the device, and from the host, in this order. Raises ``CopyError``; then
        nothing is known of the blocks any more.
        """
        if not (out or within or into):
            return
        moves = ((self.device, self._host, out), (self.device, self.device, within), (self._host, self.device, into))
        with self._order.copying():
            for sources, targets, copies in moves:
                _copy(sources, targets, copies)

    def computed(self) -> None:
        """Says that everything launched until now may have used blocks: copies come after it."""
        self._order.computed()

    def close(self) -> None:
        """Gives the memory back; nothing can be computed any more."""
        if self._release is not None:
            self._release()
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
    """Launches the copies; the host does not wait for those between it and another device."""
    for copy in copies:
        if not (0 <= copy.source < len(sources) and 0 <= copy.target < len(targets)):
            raise CopyError(f"No such block: {copy}, of {len(sources)} and {len(targets)} blocks.")
    for first, count in _runs(copies, within=sources is targets):
        source, target = (slice(start, start + count) for start in (first.source, first.target))
        try:
            targets[target].copy_(sources[source], non_blocking=True)
        except RuntimeError as error:
            raise CopyError(f"{count} blocks from {first} on failed: {error}") from error


def _runs(copies: Sequence[BlockCopy], *, within: bool) -> Iterator[tuple[BlockCopy, int]]:
    """The same copies as runs of neighbouring blocks: the first of each, and how many there are.

    ``within`` one pool a run must not reach into its own targets, as one large copy reads and writes at the same time.
    """
    start = 0
    while start < len(copies):
        first, count = copies[start], 1
        most = max(1, abs(first.target - first.source)) if within else len(copies)
        while count < most and start + count < len(copies):
            if copies[start + count] != BlockCopy(first.source + count, first.target + count):
                break
            count += 1
        yield first, count
        start += count


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


def _pin(pool: torch.Tensor, device: torch.device) -> Callable[[], object]:
    """Keeps the pages of ``pool`` in memory, so that ``device`` copies them itself; this makes all of them resident.
    Returns what ends that, which also happens when the pool's memory goes.

    ``pin_memory`` would take the next power of two, which can be twice as much.
    """
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0))
    except RuntimeError as error:
        raise ModelError(
            f"The host pool of {pool.nbytes} bytes cannot be pinned ({str(error).strip()}); lower --swap-space."
        ) from None
    release = weakref.finalize(pool, _unpin, pool.data_ptr(), device)
    release.atexit = False
    return release


def _unpin(address: int, device: torch.device) -> None:
    # A device that has failed refuses this too, and its memory goes with the process.
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
