"""The settings of this process's control groups, version 2 and version 1, as text. Knows files, not what they mean."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def read_cgroup(root: Path, controller: str, unified: str, *legacy: str) -> Iterator[tuple[str, ...]]:
    """The contents of some files in the process's group of ``controller`` and in all groups above it.

    ``unified`` is the file's name in version 2, ``legacy`` are the names in version 1. Where a file is not, its text is
    empty.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _with_parents(root / "sys/fs/cgroup", group):
                yield (read_text(folder / unified),)
        elif controller in controllers.split(","):
            for folder in _with_parents(root / "sys/fs/cgroup" / controllers, group):
                yield tuple(read_text(folder / name) for name in legacy)


def read_text(path: Path) -> str:
    """The text of a file without white space around it; nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a group and its parents. The path may be one of the host's: then only the mount is there."""
    folder = mount / group.strip("/")
    yield folder
    yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


# What the C library does with memory that is freed.
#
# glibc takes every large block from the system and gives it back when it is freed, so that a step touches fresh pages
# for all of its large tensors, one fault each: with a small model, half of the time of a long prompt. Kept in the heap,
# the pages of one step serve the next.
#
# What is kept is what the largest step took, which memory profiles count, and about as much again in holes, since a
# block fits a hole only with room to spare; where small blocks happen to lie between the large ones it can be three
# times as much again, and then grows no further. Hence larger blocks than ``MAX_KEPT_BLOCK`` are still given back.
# Little is lost: only large models ask for them, whose products take far longer than the faults.


# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
# Bytes of the largest block that is kept. glibc before 2.35 refuses more.
MAX_KEPT_BLOCK = 32 << 20


def tune_malloc() -> bool:
    """Makes malloc keep blocks of up to ``MAX_KEPT_BLOCK`` bytes when they are freed. Returns whether it does.

    Threads that begin later share one arena, as any other is made of pieces of 64 MiB, which are given back when they
    are free. Call it once weights are loaded: what loading took for a moment is given back first. Does
    nothing where the C library has no mallopt.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(ctypes.c_size_t(0))
        mallopt = library.mallopt
        mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
        return all(
            mallopt(*pair) for pair in ((_MMAP_THRESHOLD, MAX_KEPT_BLOCK), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
        )
    return False


# Carries out step plans with torch: tensors of a step, KV memory, swap copies, threads.


def limit_onednn_caches() -> None:
    """Bounds what oneDNN keeps, in a process that is the engine's own. Call it before torch is imported, which reads
    both limits then.

    oneDNN keeps a compiled product for every shape that it meets, a thousand by default, and steps come in many shapes:
    an engine would grow by hundreds of megabytes.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")
