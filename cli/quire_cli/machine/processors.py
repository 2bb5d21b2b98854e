"""Processor cores that this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from quire_engine.device.host import ROOT, read_cgroup


def usable_cores(root: Path = ROOT) -> int:
    """Cores of the affinity mask, or of the cgroups' quota where that is less; at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for texts in read_cgroup(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, period = [*(texts if len(texts) > 1 else texts[0].split()), "", ""][:2]
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            yield math.ceil(int(quota) / int(period))
