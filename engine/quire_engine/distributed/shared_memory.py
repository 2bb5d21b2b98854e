"""``SharedMemorySums``: sums over the ranks of one machine through shared memory, computed by ``kernels/sums.cpp``. A
sum through sockets wakes two threads at each end. Here a rank reads the other ranks' numbers in place.

The memory never has a name. Rank 0 makes a file in memory with mode 0600, and the other ranks open it through
``/proc``, as only processes of the same user can. Its size is sealed, and no rank keeps it open.
"""

import ctypes
import fcntl
import logging
import mmap
import os
from typing import Any

import torch

from quire_engine.device.host import usable_cores
from quire_engine.kernels.bindings import DTYPES, SumCall, SumRanks, library

log = logging.getLogger(__name__)
SLOT_BYTES = 1 << 18
"""How much of a tensor is added at a time, so that the slots of a few ranks stay in the processor's caches."""
_FLAG_BYTES = 64
# How often to check another rank's flag before sleeping: about 0.1 ms, longer than ranks in step are apart.
_SPINS = 2000
_STORE_KEY = "sums"


class SharedMemorySums:
    """The view of ``memory`` that rank ``rank`` of ``size`` has. ``end`` may be called from any thread, all else from
    the thread that sums.
    """

    def __init__(self, kernels: ctypes.CDLL, memory: mmap.mmap, rank: int, size: int) -> None:
        self._kernels, self._memory = kernels, memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Ranks that share cores wait for each other's turn; spinning would take that turn away.
        spins = _SPINS if size * torch.get_num_threads() <= usable_cores() else 0
        self._ranks = SumRanks(memory=start, rank=rank, size=size, slot_bytes=SLOT_BYTES, spins=spins)
        self._call = SumCall(ranks=ctypes.addressof(self._ranks))
        self._reference = ctypes.pointer(self._call)

    @classmethod
    def connect(cls, rank: int, size: int, store: Any, all_ready: Any) -> "SharedMemorySums | None":
        """Connects the ranks, which find the memory through ``store``, a torch ``Store``. Returns None on all ranks if
        one cannot share memory. ``all_ready`` takes whether this rank succeeded and returns whether all did.
        """
        kernels, descriptor, memory = library(), -1, None
        try:
            if rank == 0:
                if kernels is not None:
                    descriptor = _make_file(_bytes_of(size))
                store.set(_STORE_KEY, "" if kernels is None else f"/proc/{os.getpid()}/fd/{descriptor}")
            elif path := store.get(_STORE_KEY).decode():
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if descriptor >= 0 and kernels is not None:
                memory = mmap.mmap(descriptor, _bytes_of(size))
        except (OSError, AttributeError) as error:  # the system has no such files, or too little memory
            log.info("sums go through sockets, because memory cannot be shared: %s", error)
            if rank == 0:
                store.set(_STORE_KEY, "")
        is_ready = all_ready(memory is not None)
        if descriptor >= 0:
            os.close(descriptor)
        return cls(kernels, memory, rank, size) if is_ready and kernels is not None and memory is not None else None

    @property
    def num_sums(self) -> int:
        """The number of sums that this rank has started, in CPU graphs too."""
        return int(self._ranks.sums)

    def suits(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` can be summed this way."""
        return tensor.dtype in DTYPES and tensor.is_contiguous()

    def add(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` with the sum of all ranks' tensors. Raises ``RuntimeError`` like ``raise_if_ended``."""
        call = self._call
        call.x, call.count, call.bf16 = tensor.data_ptr(), tensor.numel(), int(tensor.dtype is torch.bfloat16)
        self._kernels.quire_sum(self._reference)
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises ``RuntimeError`` if a sum ended without the other ranks."""
        if self._ranks.failed:
            raise RuntimeError("another rank has ended, and its part of a sum is missing")

    def end(self) -> None:
        """Ends all waits of all ranks for good. Thread-safe."""
        self._kernels.quire_end_sums(ctypes.byref(self._ranks))


def _bytes_of(size: int) -> int:
    return (size + 1) * _FLAG_BYTES + 2 * size * SLOT_BYTES


def _make_file(nbytes: int) -> int:
    """Makes a file in memory. Returns its descriptor. Raises ``OSError``."""
    descriptor = os.memfd_create("quire-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)  # otherwise full memory would raise a signal at the first write
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
