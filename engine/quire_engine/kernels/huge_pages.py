"""Memory on huge pages for what is read from end to end in every step. It knows bytes, and nothing of what they mean.

A product with one row is as fast as the weight can be read, and on pages of 4 KiB a good part of that time goes into
finding them. Huge pages (Linux' transparent ones, where the system's setting allows asking for them) are 2 MiB, larger
than most weights, so weights share a mapping.
"""

import contextlib
import functools
import mmap
import threading

import torch

_LINE = 64
_MAPPING_BYTES = 64 << 20  # address space: memory is taken as it is written


def empty_on_huge_pages(nbytes: int) -> torch.Tensor:
    """Fresh memory, uint8 [nbytes], at least one, that begins at a cache line. It is given back when it and its
    neighbours in the mapping are gone.
    """
    return _allocator().allocate(nbytes)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor without gaps, in such memory."""
    if tensor.nbytes == 0:
        return tensor
    return empty_on_huge_pages(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _HugePageAllocator:
    """Hands out the latest mapping piece by piece; earlier ones belong to their pieces alone."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, mmap.PAGESIZE)
        self._used = mmap.PAGESIZE
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """That many fresh bytes."""
        with self._lock:
            if self._used + nbytes > len(self._mapping):
                self._mapping, self._used = _map(max(nbytes, _MAPPING_BYTES)), 0
            piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=self._used)
            self._used += -(-nbytes // _LINE) * _LINE
        return piece


@functools.cache
def _allocator() -> _HugePageAllocator:
    return _HugePageAllocator()


def _map(nbytes: int) -> mmap.mmap:
    # Private, as Linux gives shared memory no huge pages unless it is told to by another setting.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
