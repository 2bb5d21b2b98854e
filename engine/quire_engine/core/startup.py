"""How long each phase of an engine's start takes, from the start of its process until a router has found it; and how
far the start is, for who watches it.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, process_time, time

PROGRESS_VARIABLE = "QUIRE_PROGRESS"
"""Set by who reads the progress of a start from an engine's standard output."""
PROGRESS_MARK = "\x1e"
"""What such a line begins with (ASCII's record separator), as no line of a log does."""
FACTS = "facts"
"""The first word of the line that says what the engine is, as a JSON object; others begin with a phase."""
progress = logging.getLogger("quire_engine.progress")
"""Records have the phase, and which part of it is done, 0 to 1, as their arguments."""


def report_progress(phase: "StartupPhase", part: float = 0.0) -> None:
    """Says how far the start is. Costs next to nothing where nobody watches."""
    progress.info("%s %.3f", phase, part)


def report_facts(**facts: str | int) -> None:
    """Says what the engine is that starts: ``dtype``, ``device``, ``max_model_len`` and ``kv_tokens``."""
    progress.info("%s %s", FACTS, json.dumps(facts))


class StartupPhase(StrEnum):
    """What an engine does until it serves, in this order; what does not occur is left out.

    ``imports``: from the start of the process, the interpreter's and all modules. ``kernels``: those of the CPU are
    found or compiled. ``weights``: read, packed and on the device; of several ranks, those of all. ``memory``: the
    largest step is run to see what is left for KV memory. ``graphs``: KV memory is allocated and decode steps are
    captured. ``warmup``: the first timed steps, and the disk tier. ``serving``: ports are opened. ``registered``: from
    then until the first router opens a session.
    """

    IMPORTS = "imports"
    KERNELS = "kernels"
    WEIGHTS = "weights"
    MEMORY = "memory"
    GRAPHS = "graphs"
    WARMUP = "warmup"
    SERVING = "serving"
    REGISTERED = "registered"


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """A phase that has ended. ``started`` in seconds since 1970. ``cpu_seconds`` are those of all threads of this
    process together.
    """

    phase: StartupPhase
    started: float
    seconds: float
    cpu_seconds: float


class StartupTimer:
    """Times one phase after the other; ``IMPORTS`` has begun with the process. ``phases`` are those that have ended."""

    def __init__(
        self,
        started: float | None = None,
        clock: Callable[[], float] = time,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self.phases: list[PhaseTime] = []
        self._clock, self._cpu_clock = clock, cpu_clock
        self._phase: StartupPhase | None = StartupPhase.IMPORTS
        self._started = process_start() if started is None else started
        self._cpu_started = 0.0

    def begin(self, phase: StartupPhase) -> None:
        """Ends the phase before this one."""
        self.end()
        self._phase = phase
        report_progress(phase)

    def end(self) -> None:
        """Ends the last phase; does nothing when that has ended."""
        now, cpu_now = self._clock(), self._cpu_clock()
        if self._phase is not None:
            cpu_seconds = cpu_now - self._cpu_started
            self.phases.append(PhaseTime(self._phase, self._started, max(0.0, now - self._started), cpu_seconds))
        self._phase, self._started, self._cpu_started = None, now, cpu_now


def process_start(root: Path = Path("/")) -> float:
    """When this process started, in seconds since 1970, to a hundredth; now where the system does not say."""
    try:
        # The second field is the command in parentheses, which may have any characters; the 22nd are ticks since boot.
        fields = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
        ticks, per_second = int(fields[19]), os.sysconf("SC_CLK_TCK")
        return time() - (clock_gettime(CLOCK_BOOTTIME) - ticks / per_second)
    except (OSError, ValueError, IndexError):
        return time()
