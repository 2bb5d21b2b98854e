"""The KV memory itself: the device's blocks, the host's blocks, and copies between them.

Both pools are ``[blocks, elements]``: a block has what its ``BlockLayout`` says, one layer behind the other, so that a
block of all layers is one contiguous copy, and so are neighbouring blocks that move to neighbouring places.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import BlockCopies, BlockCopy, KVCacheConfig, KVCacheGroup
from quire_engine.core.executor import CopyError
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.device.accelerator import pin_pages
from quire_engine.errors import ModelError
from quire_engine.worker.block_file import BlockFile, DiskTransfers, disk_contents, measure_block_seconds
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.sleep import give_back, take_again


class CudaSwapStream:
    """Orders block copies among the work that computes with blocks: they have a stream of their own, beside the current
    one that computes. Used by one thread. The CPU needs none: everything has happened when its call returns.

    Copies run after all work that was launched before the last ``record_compute``, and before all work that is launched
    after ``swap_region``. Among each other they keep their order. So copies in both directions wait for the last
    forward pass, as it reads what is copied out and may still write what is copied over; and they run beside what
    computes without blocks, which is the sampling of tokens, and beside the upload of the next batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._compute_done = torch.cuda.Event()

    def record_copies(self) -> torch.cuda.Event:
        """An event behind all copies that were launched until now."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def record_compute(self) -> None:
        """Records that everything launched until now may have read or written blocks, and makes what is launched from
        now on wait for what was copied beside it. To be called after each forward pass, one that failed too.
        """
        compute = torch.cuda.current_stream(self._device)
        self._compute_done.record(compute)
        self._make_compute_wait(compute)

    @contextmanager
    def swap_region(self) -> Iterator[None]:
        """The copies that are launched inside are ordered as above."""
        compute = torch.cuda.current_stream(self._device)
        self._wait_for_compute()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after a failure too: what was launched before it still reads and writes blocks
            self._make_compute_wait(compute)

    @contextmanager
    def ahead_region(self) -> Iterator[None]:
        """The copies that are launched inside follow those of the last ``swap_region`` and run beside all work that is
        launched before the next ``record_compute``.
        """
        with torch.cuda.stream(self._stream):
            yield

    def _wait_for_compute(self) -> None:
        self._stream.wait_event(self._compute_done)

    def _make_compute_wait(self, compute: torch.cuda.Stream) -> None:
        compute.wait_stream(self._stream)


class StepEvent:
    """Everything that was launched on the current stream of a GPU before this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Returns once all of it is done."""
        self._event.synchronize()


def _nothing() -> None:
    """On the CPU copies are made when they are launched."""


class KVCache:
    """Device and host pool of one model, of the sizes that were decided in bytes. ``layers`` are the views of its
    layers on the device's pool, ``blocks``.

    ``swap_stream`` orders block copies among the work of a GPU; None on the CPU. On CUDA the host pool is pinned.
    ``transfers`` are those to and from the disk, where there is one.
    """

    def __init__(
        self,
        layout: BlockLayout,
        sizes: CacheSizes,
        device: torch.device,
        *,
        swap_stream: CudaSwapStream | None = None,
    ) -> None:
        block_size, block_bytes, dtype = layout.block_size, layout.block_bytes, layout.dtype
        blocks, host_blocks = sizes.kv_cache_bytes // block_bytes, max(0, sizes.swap_bytes) // block_bytes
        if blocks < _min_blocks(layout):
            raise ModelError(
                f"The KV cache of {sizes.kv_cache_bytes} bytes holds fewer than {_min_blocks(layout)} blocks "
                f"of {block_size} tokens, which take {block_bytes} bytes each for this model."
            )
        groups = tuple(KVCacheGroup(window) for window in layout.windows)
        self.capacity = KVCacheConfig(block_size, blocks, host_blocks, block_bytes, groups)
        self.blocks = _lazy_zeros((blocks, layout.elements), dtype, device)
        self.layers = layout.views(self.blocks)
        self._host_blocks = _lazy_zeros((host_blocks, layout.elements), dtype, torch.device("cpu"))
        self._unpin_host: Callable[[], object] | None = None
        if device.type == "cuda" and host_blocks:
            self._unpin_host = pin_pages(self._host_blocks, device, "--swap-space")
        self.swap_stream = CudaSwapStream(device) if swap_stream is None and device.type != "cpu" else swap_stream
        if self.swap_stream is not None:
            self.swap_stream.record_compute()
        self.transfers: DiskTransfers | None = None
        self._sleeping_bytes = 0

    def copy(self, copies: BlockCopies) -> None:
        """Copies blocks in the order of ``BlockCopies``. On the CPU all is copied when this returns. Raises
        ``CopyError``; the contents of all blocks are undefined then.
        """
        moves = (
            (self.blocks, self._host_blocks, copies.blocks_to_swap_out),
            (self.blocks, self.blocks, copies.blocks_to_copy),
            (self._host_blocks, self.blocks, copies.blocks_to_swap_in),
        )
        with nullcontext() if self.swap_stream is None else self.swap_stream.swap_region():
            for sources, targets, each in moves:
                _copy_blocks(sources, targets, each)
        if copies.blocks_to_swap_ahead:
            with nullcontext() if self.swap_stream is None else self.swap_stream.ahead_region():
                _copy_blocks(self.blocks, self._host_blocks, copies.blocks_to_swap_ahead)
        if copies.blocks_to_store or copies.blocks_to_load:
            assert self.transfers is not None, "there is no disk"
            # The host block of a load may be part of earlier copies that a GPU has not made yet, as one of a store is.
            is_ready = _nothing if self.swap_stream is None else self.swap_stream.record_copies().synchronize
            self.transfers.submit(copies, is_ready)

    def open_disk(
        self, folder: Path, fingerprint: str, num_slots: int, report: Callable[[TransferResult], object]
    ) -> DiskContents:
        """Opens the blocks on disk in ``folder``, of which nobody else may use the files. ``report`` is called with the
        result of each transfer, on other threads. What was open before is closed. Raises ``OSError``.
        """
        if self.transfers is not None:
            self.transfers.close()
        seconds = measure_block_seconds(folder, self.capacity.block_bytes)
        file = BlockFile(folder, fingerprint, num_slots, self.capacity.block_bytes)
        contents = disk_contents(file, seconds)
        pool = self._host_blocks.view(torch.uint8).numpy()
        self.transfers = DiskTransfers(file, lambda block_id: memoryview(pool[block_id]).cast("B"), report)
        return contents

    def sleep(self) -> None:
        """Gives back the memory of the device's blocks, whose contents are lost. Those of the host stay."""
        self._sleeping_bytes = self.blocks.untyped_storage().nbytes()
        give_back(self.blocks.untyped_storage())

    def wake_up(self) -> None:
        """Takes it again, as zeros. Raises ``SleepError`` where there is none."""
        take_again(self.blocks.untyped_storage(), self._sleeping_bytes)

    def close(self) -> None:
        """Frees the memory; nothing can be computed after that."""
        if self.transfers is not None:
            self.transfers.close()
        if self._unpin_host is not None:
            self._unpin_host()
        self.layers = []
        self.blocks = self.blocks.new_empty(0)
        self._host_blocks = self._host_blocks.new_empty(0)


def min_cache_sizes(layout: BlockLayout) -> CacheSizes:
    """The least that an executor can be made with."""
    return CacheSizes(_min_blocks(layout) * layout.block_bytes, 0)


def _min_blocks(layout: BlockLayout) -> int:
    """The null block, and one for each group of layers."""
    return 1 + len(layout.windows)


def _copy_blocks(sources: torch.Tensor, targets: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Launches the copies; the host does not wait for those between it and another device."""
    for copy in copies:
        if not (0 <= copy.source < len(sources) and 0 <= copy.target < len(targets)):
            raise CopyError(f"No such block: {copy}, of {len(sources)} and {len(targets)} blocks.")
    for first, count in _contiguous_runs(copies, within=sources is targets):
        source, target = (slice(start, start + count) for start in (first.source, first.target))
        try:
            targets[target].copy_(sources[source], non_blocking=True)
        except RuntimeError as error:
            raise CopyError(f"{count} blocks from {first} on failed: {error}") from error


def _contiguous_runs(copies: Sequence[BlockCopy], *, within: bool) -> Iterator[tuple[BlockCopy, int]]:
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


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU they are pages that the system gives when they are first written, so an idle pool
    costs nothing.

    ``torch.zeros`` writes every byte, which would make the whole pool resident at the start.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        if device.type != "cpu":
            return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype).view(shape)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
    except (OSError, OverflowError, MemoryError, RuntimeError):
        raise ModelError(f"There is no memory for a KV pool of {size} bytes on the {device.type}.") from None
