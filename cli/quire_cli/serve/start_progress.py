"""How far a start is, as one line that moves: which engine does what, how much of it is done, and for how long."""

import asyncio
import json
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from quire_engine.core.startup import FACTS, StartupPhase
from quire_proto.terminal import DIM, PLAIN

PERIOD = 0.2  # seconds between two lines
WORDS = {
    StartupPhase.IMPORTS: "loading libraries",
    StartupPhase.KERNELS: "compiling kernels",
    StartupPhase.WEIGHTS: "reading weights",
    StartupPhase.MEMORY: "measuring memory",
    StartupPhase.GRAPHS: "allocating KV memory and capturing graphs",
    StartupPhase.WARMUP: "timing first steps",
    StartupPhase.SERVING: "opening ports",
    StartupPhase.REGISTERED: "waiting for the router",
}


class StartProgress:
    """Follows what ``engines`` report, and ``show``s one line for all of them."""

    def __init__(self, engines: Sequence[str], show: Callable[[str], None]) -> None:
        self._show = show
        self._began = monotonic()
        self._reports = dict.fromkeys(engines, (StartupPhase.IMPORTS, 0.0))
        self.facts: dict[str, dict[str, Any]] = {}
        """What each engine is, as it says itself (``report_facts``)."""

    def report(self, engine: str, record: str) -> None:
        """Takes a line of an engine, without its mark: a phase and the part of it that is done, or its facts."""
        phase, _, part = record.partition(" ")
        try:
            if phase == FACTS:
                self.facts[engine] = dict(json.loads(part))
                return
            self._reports[engine] = StartupPhase(phase), float(part)
        except (ValueError, TypeError):  # of another version
            return

    def line(self, ready: set[str]) -> str:
        """Returns what the engine does that is least far; nothing once all are ready."""
        phases = list(StartupPhase)
        waiting = {name: each for name, each in self._reports.items() if name not in ready}
        if not waiting:
            return ""
        name, (phase, part) = min(waiting.items(), key=lambda item: (phases.index(item[1][0]), item[1][1]))
        done = f" {part:.0%}" if part else ""
        return f"{name}: {WORDS[phase]}{done} ({monotonic() - self._began:.0f} s)"

    async def run(self, ready: set[str]) -> None:
        """Shows the line until it is cancelled, and takes it away at the end. ``ready`` are those that are by now."""
        try:
            while True:
                text = self.line(ready)
                self._show(f"{DIM}{text}{PLAIN}" if text else "")
                await asyncio.sleep(PERIOD)
        finally:
            self._show("")
