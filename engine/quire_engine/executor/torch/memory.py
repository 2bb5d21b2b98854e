"""The memory of a device: how much there is for this process, and how much the process holds. Knows no models."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from quire_engine.executor.torch.cgroups import ROOT, read_cgroup, read_text

KIB = 1024
PROC_SELF = Path("/proc/self")


class DeviceMemory(Protocol):
    """``limit`` is all that this process can have, in bytes, and ``source`` says where that is known from. It is
    ``dedicated`` where the whole limit is meant for this process, as a container's or a GPU's is.
    """

    limit: int
    source: str
    dedicated: bool

    def used(self) -> int:
        """Bytes in use now, that do not go away by themselves."""
        ...

    def available(self) -> int:
        """Bytes that can still be had now."""
        ...

    def peak_during(self, work: Callable[[], object]) -> int:
        """The most bytes in use at once while ``work`` runs."""
        ...


class CpuMemory:
    """The host's memory, as far as this process may have it: within its cgroups' limits, else the machine's."""

    def __init__(self, root: Path = ROOT) -> None:
        self._meminfo = root / "proc/meminfo"
        total = self._machine_field("MemTotal")
        limit = min(_cgroup_limits(root), default=total)
        self.dedicated = limit < total
        self.limit = min(limit, total)
        self.source = "the container's limit" if self.dedicated else "the machine's memory"

    def used(self) -> int:
        """What of this process is in memory."""
        return self._process_field("VmRSS")

    def available(self) -> int:
        """The rest of the limit, or what the machine can still give where that is less."""
        return max(0, min(self.limit - self.used(), self._machine_field("MemAvailable")))

    def peak_during(self, work: Callable[[], object]) -> int:
        """The largest resident set while ``work`` runs; where it cannot be reset, the largest ever."""
        self._reset_peak()
        work()
        return self._process_field("VmHWM")

    def _reset_peak(self) -> None:
        with suppress(OSError):
            (PROC_SELF / "clear_refs").write_text("5")

    def _process_field(self, name: str) -> int:
        return _field(PROC_SELF / "status", name)

    def _machine_field(self, name: str) -> int:
        return _field(self._meminfo, name)


class CudaMemory:
    """The memory of one GPU. What other processes hold there counts as used."""

    dedicated = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.limit: int = torch.cuda.mem_get_info(device)[1]
        self.source = "the GPU's memory"

    def used(self) -> int:
        """All but what is free, without what torch only keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return self.limit - free

    def available(self) -> int:
        """What is free."""
        return self.limit - self.used()

    def peak_during(self, work: Callable[[], object]) -> int:
        """What was in use before, the most that torch reserved more while ``work`` ran, and what others took meanwhile:
        the driver for kernels and graphs, libraries for their workspaces.
        """
        before, reserved, others = self.used(), self._reserved(), self._used_outside_torch()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        most: int = torch.cuda.max_memory_reserved(self._device)
        return before + most - reserved + max(0, self._used_outside_torch() - others)

    def _reserved(self) -> int:
        """What torch holds."""
        reserved: int = torch.cuda.memory_reserved(self._device)
        return reserved

    def _used_outside_torch(self) -> int:
        """What is in use and not torch's."""
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return self.limit - free - self._reserved()


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory that tensors on ``device`` take."""
    return CpuMemory() if device.type == "cpu" else CudaMemory(device)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Memory limits in bytes of the process's cgroup and of all above it; version 2 says ``max`` for none."""
    for (text,) in read_cgroup(root, "memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdecimal() and int(text) > 0:
            yield int(text)


def _field(path: Path, name: str) -> int:
    """A line of ``meminfo`` or ``status`` in bytes; 0 where there is none."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * KIB
    return 0
