"""How many cores this process may use, and telling torch so. Knows cgroups, no models."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from quire_engine.executor.torch.cgroups import ROOT, read_cgroup


def configure_threads(processes: int = 1) -> int:
    """Lets torch compute with ``usable_threads`` in this process; returns the number. Call it before the first torch
    operation.
    """
    threads = usable_threads(processes)
    torch.set_num_threads(threads)
    return threads


def usable_threads(processes: int = 1) -> int:
    """As many threads as there are cores to run them, or as one's part of them where so many ``processes`` compute.

    More threads than cores of quota is the classic slow pod: each waits for others that are throttled.
    ``OMP_NUM_THREADS`` is the user's decision and counts first.
    """
    decided = os.environ.get("OMP_NUM_THREADS", "")
    return int(decided) if decided.isdecimal() and int(decided) > 0 else max(1, usable_cores() // processes)


def usable_cores(root: Path = ROOT) -> int:
    """Cores of this process's affinity mask, or of its cgroups' CPU quota where that is less; at least 1."""
    quotas = [quota for quota in _quotas(root) if quota > 0]
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas), 1 << 16))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores, of the process's cgroup and of all above it."""
    for texts in read_cgroup(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        yield _quota(*(texts if len(texts) > 1 else texts[0].split()[:2]))


def _quota(quota: str = "max", period: str = "100000") -> float:
    """Cores that ``quota`` of every ``period`` microseconds is; 0 for no limit."""
    try:
        return max(0.0, int(quota) / int(period))
    except (ValueError, ZeroDivisionError):
        return 0.0
