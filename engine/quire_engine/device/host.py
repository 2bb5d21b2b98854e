"""The host that an engine runs on: the settings of its cgroups (version 2 and version 1) as text, the cores that it may
use, and what its C library and oneDNN keep in memory.
"""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
# Bytes of the largest block that is kept. glibc before 2.35 refuses more.
MAX_KEPT_BLOCK = 32 << 20


def read_cgroup(root: Path, controller: str, unified: str, *legacy: str) -> Iterator[tuple[str, ...]]:
    """The contents of some files in the process's group of ``controller`` and in all groups above it.

    ``unified`` is the file's name in version 2, ``legacy`` are the names in version 1. The text of a file that does
    not exist is empty.
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
    """The text of a file, stripped; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a group and its parents. In a container ``group`` may be a path of the host: then only the mount
    exists.
    """
    folder = mount / group.strip("/")
    yield folder
    yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def usable_cores(root: Path = ROOT) -> int:
    """Cores of this process's affinity mask, or of its cgroups' CPU quota where that is less; at least 1."""
    quotas = [quota for quota in _quotas(root) if quota > 0]
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas), 1 << 16))


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas in cores, of the process's cgroup and of all above it."""
    for texts in read_cgroup(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        yield _quota(*(texts if len(texts) > 1 else texts[0].split()[:2]))


def _quota(quota: str = "max", period: str = "100000") -> float:
    """Cores that ``quota`` of every ``period`` microseconds is; 0 for no limit."""
    try:
        return max(0.0, int(quota) / int(period))
    except (ValueError, ZeroDivisionError):
        return 0.0


def cgroup_memory_limits(root: Path) -> Iterator[int]:
    """Memory limits in bytes of the process's cgroup and of all above it; version 2 writes ``max`` for no limit."""
    for (text,) in read_cgroup(root, "memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdecimal() and int(text) > 0:
            yield int(text)


def memory_field(path: Path, name: str) -> int:
    """The field ``name`` of ``meminfo`` or ``status``, in bytes; 0 if there is none."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def available_memory(root: Path = ROOT) -> int:
    """Bytes that the machine has left, or the least limit of this process's cgroups where that is less; 0 where the
    system does not say.
    """
    return min(memory_field(root / "proc/meminfo", "MemAvailable"), *cgroup_memory_limits(root), 1 << 62)


def tune_malloc() -> bool:
    """Makes malloc keep blocks of up to ``MAX_KEPT_BLOCK`` bytes when they are freed. Returns whether it does: a C
    library without mallopt does not. Call it once weights are loaded: temporary memory of loading is returned to the
    system first.

    glibc takes every large block from the system and returns it when it is freed, so that a step touches fresh pages
    for all of its large tensors, one fault each: with a small model, half of the time of a long prompt. Kept in the
    heap, the pages of one step serve the next.

    The heap keeps what the largest step took, which memory profiles count, and about as much again in holes, since a
    block fits a hole only with space to spare; where small blocks happen to lie between the large ones it can be three
    times as much again, and then grows no further. Hence blocks above ``MAX_KEPT_BLOCK`` are still returned. Little is
    lost: only large models allocate them, whose products take far longer than the faults.

    Threads that start later share one arena, as any other consists of pieces of 64 MiB, which are returned when they
    are free.
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


def limit_onednn_caches() -> None:
    """Bounds oneDNN's caches, in a process of the engine's own. Call it before torch is imported, which reads both
    limits then.

    oneDNN keeps a compiled product for every shape that it meets, a thousand by default, and steps come in many shapes:
    an engine would grow by hundreds of megabytes.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")
