"""Frees memory while an engine sleeps: ``put_away`` keeps the contents, for weights, and ``give_back`` drops them, for
KV memory.

Tensors and their views stay valid objects. On the CPU they also keep their addresses: their pages are freed and are
mapped again when they are next written. Packed weights and CPU graphs hold addresses for the compiled kernels, and so
stay valid. On a GPU a storage is resized to 0 and later gets memory at another address, as in PyTorch's FSDP, so CUDA
graphs must be captured again.
"""

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import IO, Protocol

import torch

from quire_engine.core.executor import SleepError
from quire_engine.device.accelerator import pin_pages
from quire_engine.errors import ModelError

MIN_BYTES = 64 << 10
"""Smaller storages are not worth a system call each."""
NUM_THREADS = 8
_PART_BYTES = 16 << 20
_OPAQUE = (type, ModuleType, BuiltinFunctionType, str, bytes, int, float)


def device_storages(root: object, device: torch.device) -> list[torch.UntypedStorage]:
    """Returns the storages on ``device`` of at least ``MIN_BYTES`` that are reachable from ``root``, each once. A
    storage that it misses keeps its memory, without other harm.
    """
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    pending: list[object] = [root]
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, _OPAQUE):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor) and each.device.type == device.type:
            storage = _storage_of(each)
            if storage is not None and storage.nbytes() >= MIN_BYTES:
                found[storage.data_ptr()] = storage
        # A function refers to its whole module; only its closure can hold a model.
        pending += (each.__closure__ or ()) if isinstance(each, FunctionType) else gc.get_referents(each)
    return [*found.values()]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of a tensor. A weight packed by oneDNN hides its storage, so this makes another one over the
    same memory, valid while the tensor lives. Returns None if the private torch operator for that is missing.
    """
    if not tensor.is_mkldnn:
        return tensor.untyped_storage()
    try:
        address, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    except (AttributeError, RuntimeError):
        return None
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).untyped_storage()


class PutAway(Protocol):
    """The contents of storages whose memory was freed."""

    def restore(self) -> None:
        """Gives the storages memory and their contents again. Call it once. Raises ``SleepError`` if there is no
        memory; then nothing has changed and it may be called again.
        """
        ...


def put_away(storages: Sequence[torch.UntypedStorage], device: torch.device) -> PutAway:
    """Saves the contents of ``storages`` and frees their memory. Contents on a GPU go to pinned host memory. Contents
    on the CPU go to an unnamed file, which the system caches in memory while it has some to spare. Raises
    ``SleepError``; then nothing has changed.
    """
    return _OnHost(storages, device) if device.type == "cuda" else _InFile(storages)


def give_back(storage: torch.UntypedStorage) -> None:
    """Frees the memory of a storage. Its contents are lost."""
    if storage.device.type == "cuda":
        storage.resize_(0)
    else:
        _discard_pages(storage)


def take_again(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Gives a storage memory again after ``give_back``: ``nbytes`` zeros. Raises ``SleepError`` if there is no
    memory.
    """
    if storage.device.type != "cuda":
        return  # its pages are mapped when they are written
    try:
        storage.resize_(nbytes)
    except RuntimeError as error:
        raise SleepError("the GPU does not have the memory that it had") from error
    _bytes_of(storage).zero_()


class _OnHost:
    def __init__(self, storages: Sequence[torch.UntypedStorage], device: torch.device) -> None:
        self._storages, sizes = storages, [each.nbytes() for each in storages]
        try:
            pages = mmap.mmap(-1, max(1, sum(sizes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory = torch.frombuffer(pages, dtype=torch.uint8)
            self._unpin = pin_pages(self._memory, device, "what the engine holds")
        except (ModelError, OSError) as error:
            raise SleepError("the host does not have the memory for the weights") from error
        self._copies = self._memory[: sum(sizes)].split(sizes)
        for storage, copy in zip(storages, self._copies, strict=True):
            copy.copy_(_bytes_of(storage), non_blocking=True)
        torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        try:
            for storage, copy in zip(self._storages, self._copies, strict=True):
                storage.resize_(len(copy))
        except RuntimeError as error:
            for storage in self._storages:
                storage.resize_(0)
            raise SleepError("the GPU does not have the memory for the weights") from error
        for storage, copy in zip(self._storages, self._copies, strict=True):
            _bytes_of(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        self._unpin()
        del self._memory, self._copies


class _InFile:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        # Memory that is mapped from a file is not saved: the system can reclaim it at any time.
        anonymous = _anonymous_mappings()
        self._storages = [each for each in storages if _is_within(each, anonymous)]
        self._file = _unnamed_file()
        try:
            self._move(_write)
        except OSError as error:
            self._file.close()
            raise SleepError(f"the weights cannot be written to a file: {error.strerror}") from error
        for storage in self._storages:
            _discard_pages(storage)

    def restore(self) -> None:
        self._move(_read)
        self._file.close()

    def _move(self, move_part: Callable[[int, memoryview, int], None]) -> None:
        """Moves all parts of all storages to or from their places in the file. Uses several threads, because mapping
        fresh pages takes longer than the copies.
        """
        places, parts = [0], [part for storage in self._storages for part in _parts(storage)]
        for part in parts:
            places.append(places[-1] + len(part))
        move = partial(move_part, self._file.fileno())
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for done in [threads.submit(move, part, place) for part, place in zip(parts, places[:-1], strict=True)]:
                done.result()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parts(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """Yields the memory of a CPU storage in parts."""
    whole = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    for start in range(0, len(whole), _PART_BYTES):
        yield whole[start : start + _PART_BYTES]


def _write(file: int, part: memoryview, place: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(file, part[done:], place + done)


def _read(file: int, part: memoryview, place: int) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(file, [part[done:]], place + done)
        assert count > 0, "no one else can have shortened the file"
        done += count


def _discard_pages(storage: torch.UntypedStorage) -> None:
    """Frees the pages that lie entirely in the storage. They read as zeros afterwards."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if madvise(first, end - first, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "pages cannot be given back")


def _anonymous_mappings(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Returns the start and end addresses of this process's writable memory that no file backs."""
    found: list[tuple[int, int]] = []
    for line in (root / "proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *_ = line.split()
        if permissions.startswith("rw") and permissions.endswith("p") and inode == "0":
            first, _, end = addresses.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found


def _is_within(storage: torch.UntypedStorage, mappings: Sequence[tuple[int, int]]) -> bool:
    """Whether both ends of a storage are in ``mappings``. An allocation never mixes kinds of memory."""
    ends = storage.data_ptr(), storage.data_ptr() + storage.nbytes() - 1
    return all(any(first <= address < end for first, end in mappings) for address in ends)


def _unnamed_file() -> IO[bytes]:
    """Opens a file that disappears with the process: in ``TMPDIR``, or else where files survive a reboot and are not
    kept in memory.
    """
    folder = None if os.environ.get("TMPDIR") else "/var/tmp"  # noqa: S108 - a file without a name cannot be replaced
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError:  # a container with a read-only root
        return tempfile.TemporaryFile(buffering=0)
