"""How long each phase of an engine's start takes, from the start of its process until a router has found it, and the
progress of the start for programs that watch it.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, process_time, time

PROGRESS_VARIABLE = "QUIRE_PROGRESS"
"""Set by a program that reads the start's progress from the engine's standard output."""
PROGRESS_MARK = "\x1e"
"""Prefix of a progress line (ASCII's record separator), which no log line has."""
FACTS = "facts"
"""First word of the line that describes the engine as a JSON object; other lines begin with a phase."""
progress = logging.getLogger("quire_engine.progress")
"""Its records have the phase, and the part of it that is done (0 to 1), as arguments."""


def report_progress(phase: "StartupPhase", part: float = 0.0) -> None:
    """Reports the progress of the start. Costs almost nothing if no program watches."""
    progress.info("%s %.3f", phase, part)


def report_facts(**facts: str | int) -> None:
    """Reports facts of the starting engine: ``dtype``, ``device``, ``max_model_len`` and ``kv_tokens``."""
    progress.info("%s %s", FACTS, json.dumps(facts))


def print_progress() -> None:
    """Writes the progress to standard output, each time in a line that begins with ``PROGRESS_MARK``, if a program
    watches.
    """
    if not os.environ.get(PROGRESS_VARIABLE):
        return
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(logging.Formatter(f"{PROGRESS_MARK}%(message)s"))
    progress.addHandler(lines)
    progress.setLevel(logging.INFO)
    progress.propagate = False


class StartupPhase(StrEnum):
    """What an engine does until it serves, in this order. Phases that do not occur are left out.

    ``imports``: from the start of the process, includes the interpreter and all modules. ``kernels``: CPU kernels are
    found or compiled. ``weights``: weights are read, packed and on the device, on all ranks. ``memory``: the largest
    step is run to see how much memory is left for the KV cache. ``graphs``: KV memory is allocated and decode steps are
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
    """A phase that has ended. ``started`` is in seconds since 1970. ``cpu_seconds`` is the sum over all threads of the
    process that loads the model.
    """

    phase: StartupPhase
    started: float
    seconds: float
    cpu_seconds: float


class StartupTimer:
    """Times one phase after another. ``IMPORTS`` begins with the process. ``phases`` are those that have ended."""

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
        """Ends the previous phase and starts this one."""
        self.end()
        self._phase = phase
        report_progress(phase)

    def continue_after(self, phases: Sequence[PhaseTime]) -> None:
        """Replaces the phases so far by the phases of the process that loaded the model."""
        self.phases[:], self._phase = phases, None

    def end(self) -> None:
        """Ends the last phase; does nothing if it has ended."""
        now, cpu_now = self._clock(), self._cpu_clock()
        if self._phase is not None:
            cpu_seconds = cpu_now - self._cpu_started
            self.phases.append(PhaseTime(self._phase, self._started, max(0.0, now - self._started), cpu_seconds))
        self._phase, self._started, self._cpu_started = None, now, cpu_now


def process_start(root: Path = Path("/")) -> float:
    """Returns when this process started, in seconds since 1970, to 10 ms; the current time if the system does not
    tell.
    """
    try:
        # The second field is the command in parentheses, which may have any characters; the 22nd are ticks since boot.
        fields = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
        ticks, per_second = int(fields[19]), os.sysconf("SC_CLK_TCK")
        return time() - (clock_gettime(CLOCK_BOOTTIME) - ticks / per_second)
    except (OSError, ValueError, IndexError):
        return time()
