"""A bound on the processor time of processes, as a container's CPU limit is one: what is used up early in a period is
missing for the rest of it. Needs neither cgroups nor rights: the processes are stopped and continued.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD = 0.1  # seconds, as of the kernel's own scheduler of quotas
LOOK = 0.01
MAX_DEBT = 2 * PERIOD
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def cpu_quota(pids: Callable[[], Iterable[int]], cores: float) -> Iterator[None]:
    """The processes that ``pids`` names get so many ``cores`` together for the length of a block."""
    ended = threading.Event()
    thread = threading.Thread(target=_enforce, args=(pids, cores, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _enforce(pids: Callable[[], Iterable[int]], cores: float, ended: threading.Event) -> None:
    used: dict[int, float] = {}
    left, stopped, refilled = cores * PERIOD, False, time.monotonic()
    while not ended.wait(LOOK):
        known = list(pids())
        for pid in known:
            now = _seconds(pid)
            left -= max(0.0, now - used.get(pid, now))
            used[pid] = now
        if (passed := time.monotonic() - refilled) >= PERIOD:
            left = min(cores * PERIOD, max(left, -MAX_DEBT) + cores * passed)
            refilled += passed
        if stopped != (left <= 0):
            stopped = left <= 0
            _signal(known, signal.SIGSTOP if stopped else signal.SIGCONT)
    _signal(used, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _seconds(pid: int) -> float:
    """Of processor time that the process has used; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
