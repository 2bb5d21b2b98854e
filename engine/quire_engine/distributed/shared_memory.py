"""``SharedMemorySums``: sums over the ranks of one machine through memory that they share, by ``kernels/sums.cpp``. A
sum through sockets takes two threads to be woken at each end; here a rank looks for the others' numbers where they are.

The memory never has a name: rank 0 makes a file in memory with no right for anybody else (0600), and the other ranks
open it through ``/proc``, as only processes of this user can. Its size is sealed, and nobody keeps it open.
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
"""So much of a tensor is added up at once: the slots of some ranks stay in the processor's caches."""
_FLAG_BYTES = 64
# Looks at another rank's flag before it is waited for asleep: about 0.1 ms, longer than ranks in step are apart.
_SPINS = 2000
_STORE_KEY = "sums"


class SharedMemorySums:
    """The view that ``rank`` of ``size`` has of ``memory``. Threads other than the one that sums may call ``end``."""

    def __init__(self, kernels: ctypes.CDLL, memory: mmap.mmap, rank: int, size: int) -> None:
        self._kernels, self._memory = kernels, memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Ranks that share cores wait for each other's turn, and spinning would take it from them.
        spins = _SPINS if size * torch.get_num_threads() <= usable_cores() else 0
        self._ranks = SumRanks(memory=start, rank=rank, size=size, slot_bytes=SLOT_BYTES, spins=spins)
        self._call = SumCall(ranks=ctypes.addressof(self._ranks))
        self._reference = ctypes.pointer(self._call)

    @classmethod
    def connect(cls, rank: int, size: int, store: Any, all_ready: Any) -> "SharedMemorySums | None":
        """Connects the ranks, which find the memory through ``store``, a torch ``Store``; None on all of them where one
        cannot. ``all_ready`` takes whether this rank could, and says whether all could.
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
        except (OSError, AttributeError) as error:  # no such files on this system, or too little memory
            log.info("sums go through sockets, because memory cannot be shared: %s", error)
            if rank == 0:
                store.set(_STORE_KEY, "")
        is_ready = all_ready(memory is not None)
        if descriptor >= 0:
            os.close(descriptor)
        return cls(kernels, memory, rank, size) if is_ready and kernels is not None and memory is not None else None

    @property
    def num_sums(self) -> int:
        """The sums that this rank has begun, those of CPU graphs too."""
        return int(self._ranks.sums)

    def suits(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` can be added up."""
        return tensor.dtype in DTYPES and tensor.is_contiguous()

    def add(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` with the sum of all ranks'. Raises ``RuntimeError`` as ``raise_if_ended``."""
        call = self._call
        call.x, call.count, call.bf16 = tensor.data_ptr(), tensor.numel(), int(tensor.dtype is torch.bfloat16)
        self._kernels.quire_sum(self._reference)
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises ``RuntimeError`` where a sum has ended without the other ranks."""
        if self._ranks.failed:
            raise RuntimeError("another rank has ended, and its part of a sum is missing")

    def end(self) -> None:
        """Ends the waiting of all ranks, for good. May be called from any thread."""
        self._kernels.quire_end_sums(ctypes.byref(self._ranks))


def _bytes_of(size: int) -> int:
    return (size + 1) * _FLAG_BYTES + 2 * size * SLOT_BYTES


def _make_file(nbytes: int) -> int:
    """A descriptor of a file in memory. Raises ``OSError``."""
    descriptor = os.memfd_create("quire-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)  # else a full memory would be a signal at the first write
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
