"""The KV memory itself: the device's blocks, the host's blocks, and copies between them.

Both pools are ``[blocks, elements]``. A block has the contents of its ``BlockLayout``, one layer after another. So a
block of all layers is one contiguous copy, and so are adjacent blocks that move to adjacent places. States of recurrent
layers have two more pools (``attention.state_cache``).
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.attention.state_cache import StateCache
from quire_engine.core.block_pool import (
    BlockCopies,
    BlockCopy,
    KVCacheConfig,
    KVCacheGroup,
    PoolCopies,
    StateCacheConfig,
)
from quire_engine.core.executor import CopyError, SleepError
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.device.accelerator import pin_pages
from quire_engine.errors import ModelError
from quire_engine.worker.block_file import BlockFile, DiskTransfers, disk_contents, measure_block_seconds
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.sleep import give_back, take_again
from quire_engine.worker.state_memory import StateLayout


class CudaSwapStream:
    """Orders block copies relative to the work that computes with blocks: copies have their own stream, next to the
    current stream that computes. Use it from one thread. The CPU needs none, because everything has happened when its
    call returns.

    Copies run after all work launched before the last ``record_compute``, and before all work launched after
    ``swap_region``. They keep their order among each other. So copies in both directions wait for the last forward
    pass, which reads what is copied out and may still write what is copied over. They run parallel to work without
    blocks: sampling, and the upload of the next batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._compute_done = torch.cuda.Event()

    def record_copies(self) -> torch.cuda.Event:
        """Returns an event after all copies launched so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def record_compute(self) -> None:
        """Records that everything launched so far may read or write blocks, and makes later work wait for copies that
        run parallel to it. Call it after each forward pass, including a failed one.
        """
        compute = torch.cuda.current_stream(self._device)
        self._compute_done.record(compute)
        self._make_compute_wait(compute)

    @contextmanager
    def swap_region(self) -> Iterator[None]:
        """Within this context, launched copies are ordered as described above."""
        compute = torch.cuda.current_stream(self._device)
        self._wait_for_compute()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after a failure too: work launched before it still reads and writes blocks
            self._make_compute_wait(compute)

    @contextmanager
    def ahead_region(self) -> Iterator[None]:
        """Within this context, launched copies follow the copies of the last ``swap_region``, and run parallel to all
        work launched before the next ``record_compute``.
        """
        with torch.cuda.stream(self._stream):
            yield

    def _wait_for_compute(self) -> None:
        self._stream.wait_event(self._compute_done)

    def _make_compute_wait(self, compute: torch.cuda.Stream) -> None:
        compute.wait_stream(self._stream)


class StepEvent:
    """Everything that was launched on the current stream of a GPU before this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Waits until all of it is done."""
        self._event.synchronize()


def _nothing() -> None:
    """Does nothing: on the CPU copies are done when they are launched."""


class KVCache:
    """Device and host pool of one model, with sizes given in bytes. ``layers`` are the views of its layers on the
    device's pool, ``blocks``. ``states`` are the states of its recurrent layers, which share the memory; None without
    a ``state_layout``.

    ``swap_stream`` orders block copies relative to the work of a GPU; None on the CPU. On CUDA the host pool is pinned.
    ``transfers`` are the transfers to and from the disk, if there is one.
    """

    def __init__(
        self,
        layout: BlockLayout,
        sizes: CacheSizes,
        device: torch.device,
        *,
        state_layout: StateLayout | None = None,
        swap_stream: CudaSwapStream | None = None,
    ) -> None:
        states: StateCacheConfig | None = None
        if state_layout is not None:
            states, sizes = state_layout.divide(sizes, _min_blocks(layout) * layout.block_bytes)
        block_size, block_bytes, dtype = layout.block_size, layout.block_bytes, layout.dtype
        blocks, host_blocks = sizes.kv_cache_bytes // block_bytes, max(0, sizes.swap_bytes) // block_bytes
        if blocks < _min_blocks(layout):
            raise ModelError(
                f"The KV cache of {sizes.kv_cache_bytes} bytes holds fewer than {_min_blocks(layout)} blocks "
                f"of {block_size} tokens, which take {block_bytes} bytes each for this model."
            )
        groups = tuple(KVCacheGroup(window) for window in layout.windows)
        self.capacity = KVCacheConfig(block_size, blocks, host_blocks, block_bytes, groups, states=states)
        self.blocks = _lazy_zeros((blocks, layout.elements), dtype, device)
        self.layers = layout.views(self.blocks)
        self._host_blocks = _lazy_zeros((host_blocks, layout.elements), dtype, torch.device("cpu"))
        self.states = None if states is None else _allocate_states(states, device)
        self._unpin_host: list[Callable[[], object]] = []
        if device.type == "cuda":
            host_pools = [self._host_blocks, *([] if self.states is None else [self.states.host_rows])]
            self._unpin_host = [pin_pages(each, device, "--swap-space") for each in host_pools if len(each)]
        self.swap_stream = CudaSwapStream(device) if swap_stream is None and device.type != "cpu" else swap_stream
        if self.swap_stream is not None:
            self.swap_stream.record_compute()
        self.transfers: DiskTransfers | None = None
        self._sleeping: list[tuple[torch.UntypedStorage, int]] = []

    def copy(self, copies: BlockCopies) -> None:
        """Copies blocks in the order of ``BlockCopies``. On the CPU everything is copied when this returns. Raises
        ``CopyError``; then the contents of all blocks are undefined.
        """
        moves = (
            (self.blocks, self._host_blocks, copies.blocks_to_swap_out),
            (self.blocks, self.blocks, copies.blocks_to_copy),
            (self._host_blocks, self.blocks, copies.blocks_to_swap_in),
        )
        with nullcontext() if self.swap_stream is None else self.swap_stream.swap_region():
            for sources, targets, each in moves:
                _copy_blocks(sources, targets, each)
            if copies.states is not None:
                assert self.states is not None, "there are no states"
                _copy_states(self.states, copies.states)
        if copies.blocks_to_swap_ahead:
            with nullcontext() if self.swap_stream is None else self.swap_stream.ahead_region():
                _copy_blocks(self.blocks, self._host_blocks, copies.blocks_to_swap_ahead)
        if copies.transfers:
            assert self.transfers is not None, "there is no disk"
            # The host block of a load or a store may be part of earlier copies that a GPU has not made yet.
            is_ready = _nothing if self.swap_stream is None else self.swap_stream.record_copies().synchronize
            self.transfers.submit(copies.transfers, is_ready)

    def open_disk(
        self, folder: Path, fingerprint: str, num_slots: int, report: Callable[[TransferResult], object]
    ) -> DiskContents:
        """Opens the blocks on disk in ``folder``, whose files no other process may use. Calls ``report`` with the
        result of each transfer, on other threads. Closes what was open before. Raises ``OSError``.
        """
        if self.transfers is not None:
            self.transfers.close()
        seconds = measure_block_seconds(folder, self.capacity.block_bytes)
        file = BlockFile(folder, fingerprint, num_slots, self.capacity.block_bytes)
        contents = disk_contents(file, seconds)
        pool = self._host_blocks.view(torch.uint8).numpy()
        self.transfers = DiskTransfers(file, lambda block_id: memoryview(pool[block_id]).cast("B"), report)
        return contents

    @property
    def device_storages(self) -> list[torch.UntypedStorage]:
        """The memory of the device's blocks and states."""
        pools = [self.blocks, *([] if self.states is None else [self.states.rows])]
        return [pool.untyped_storage() for pool in pools]

    def sleep(self) -> None:
        """Frees the memory of the device's blocks, whose contents are lost. The host's blocks stay."""
        self._sleeping = [(storage, storage.nbytes()) for storage in self.device_storages]
        for storage, _ in self._sleeping:
            give_back(storage)
        if self.states is not None:
            self.states.forget()

    def wake_up(self) -> None:
        """Allocates the memory again, as zeros. Raises ``SleepError`` if there is not enough; then it is all free."""
        try:
            for storage, nbytes in self._sleeping:
                take_again(storage, nbytes)
        except SleepError:
            for storage in self.device_storages:
                give_back(storage)
            raise

    def close(self) -> None:
        """Frees the memory. Nothing can be computed afterwards."""
        if self.transfers is not None:
            self.transfers.close()
        for unpin in self._unpin_host:
            unpin()
        self.layers, self.states = [], None
        self.blocks = self.blocks.new_empty(0)
        self._host_blocks = self._host_blocks.new_empty(0)


def min_cache_sizes(layout: BlockLayout, state_layout: StateLayout | None = None) -> CacheSizes:
    """Returns the minimum sizes that an executor can be created with."""
    state_bytes = 0 if state_layout is None else state_layout.min_bytes
    return CacheSizes(_min_blocks(layout) * layout.block_bytes + state_bytes, 0)


def _min_blocks(layout: BlockLayout) -> int:
    """Returns the minimum number of blocks: the null block, and one per group of layers."""
    return 1 + len(layout.windows)


def _allocate_states(config: StateCacheConfig, device: torch.device) -> StateCache:
    """Allocates both pools of states, and a spare row for each sequence that may run."""
    rows = _lazy_zeros((config.device_blocks + config.max_num_seqs, config.block_bytes), torch.uint8, device)
    host_rows = _lazy_zeros((config.host_blocks, config.block_bytes), torch.uint8, torch.device("cpu"))
    return StateCache(rows, host_rows, config.device_blocks, config.block_size)


def _copy_states(states: StateCache, copies: PoolCopies) -> None:
    """Launches copies of states, as ``_copy_blocks`` does."""
    moves = (
        (states.rows, states.host_rows, states.copy_to_host, copies.blocks_to_swap_out),
        (states.rows, states.rows, states.copy_within, copies.blocks_to_copy),
        (states.host_rows, states.rows, states.copy_from_host, copies.blocks_to_swap_in),
    )
    for sources, targets, rows_of, each in moves:
        try:
            rows = [BlockCopy(*rows_of(copy.source, copy.target)) for copy in each]
        except IndexError as error:
            raise CopyError(f"No such state: {error}.") from error
        _copy_blocks(sources, targets, rows)


def _copy_blocks(sources: torch.Tensor, targets: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Launches the copies. The host does not wait for copies between it and another device."""
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
    """Yields the same copies as runs of adjacent blocks: the first copy of each run and its length.

    ``within`` one pool, a run must not reach into its own targets, because one large copy reads and writes at the same
    time.
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
    """Returns zeros. On the CPU the system provides a page when it is first written, so an idle pool costs nothing.

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
