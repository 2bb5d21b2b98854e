"""How many cores this process may use, and telling torch so. Knows cgroups, no models."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")


def configure_threads() -> int:
    """Lets torch compute with as many threads as there are cores to run them; returns the number.

    More threads than cores of quota is the classic slow pod: each waits for others that are throttled.
    ``OMP_NUM_THREADS`` is someone's decision and counts first. Call it before the first torch operation.
    """
    decided = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(decided) if decided.isdecimal() and int(decided) > 0 else usable_cores()
    torch.set_num_threads(threads)
    return threads


def usable_cores(root: Path = ROOT) -> int:
    """Cores of this process's affinity mask, or of its cgroups' CPU quota where that is less; at least 1."""
    quotas = [quota for quota in _quotas(root) if quota > 0]
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas), 1 << 16))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores, of the process's cgroup and of all above it, version 2 and version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _upwards(root / "sys/fs/cgroup", group):
                yield _quota(*_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root / "sys/fs/cgroup" / controllers, group):
                yield _quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a cgroup and its parents. The path may be one of the host's: then only the mount is there."""
    folder = mount / group.strip("/")
    yield folder
    yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _quota(quota: str = "max", period: str = "100000") -> float:
    """Cores that ``quota`` of every ``period`` microseconds is; 0 for no limit."""
    try:
        return max(0.0, int(quota) / int(period))
    except (ValueError, ZeroDivisionError):
        return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
