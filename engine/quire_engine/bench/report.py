"""What a benchmark showed, as a table for people and as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire_engine.bench.measure import LOWER_IS_BETTER, UNITS, Figure, Readings, ratio
from quire_engine.bench.quire import DecodeSteps

OURS = "quire"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """``title`` says what ran on what. ``readings`` are those of all systems, ours first. ``best`` is what the roofline
    allows in the units of each figure, where that is known, and ``settings`` how to run it again.
    """

    title: str
    readings: Mapping[str, Readings]
    best: Mapping[Figure, float]
    steps: DecodeSteps | None
    settings: Mapping[str, Any]

    def ratios(self) -> dict[str, dict[Figure, float]]:
        """How many times better our median is than each peer's."""
        ours = self.readings[OURS]
        found: dict[str, dict[Figure, float]] = {}
        for name, readings in self.readings.items():
            for figure in UNITS:
                mine, other = ours.median(figure), readings.median(figure)
                if name != OURS and mine and other:
                    found.setdefault(name, {})[figure] = ratio(mine, other, figure)
        return found

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "units": dict(UNITS),
            "systems": {
                name: {
                    "medians": {figure: readings.median(figure) for figure in readings.values},
                    "rounds": readings.values,
                    "failure": readings.failure,
                }
                for name, readings in self.readings.items()
            },
            "ratios": self.ratios(),
            "roofline": dict(self.best),
            "decode_steps_ms": None if self.steps is None else asdict(self.steps),
        }

    def as_table(self) -> str:
        """A block for each figure, a line for each system."""
        lines = [self.title]
        for figure, unit in UNITS.items():
            if self.readings[OURS].median(figure) is not None:
                lines += ["", f"{figure}, {unit}{' (less is better)' if figure in LOWER_IS_BETTER else ''}"]
                lines += self._lines(figure)
        lines += [f"{name}: {each.failure}" for name, each in self.readings.items() if each.failure]
        if self.steps is not None:
            steps = self.steps
            lines += [
                "",
                f"decode step of the whole batch: {steps.step:.2f} ms, of which forward {steps.forward:.2f}, "
                f"sampling {steps.sample:.2f}, scheduling and bookkeeping {steps.bookkeeping:.2f}",
            ]
        return "\n".join(lines)

    def _lines(self, figure: Figure) -> list[str]:
        ratios, width = self.ratios(), max(map(len, (*self.readings, "roofline")))
        lines = []
        for name, readings in self.readings.items():
            median = readings.median(figure)
            if median is not None:
                times = ratios.get(name, {}).get(figure)
                beside = f"quire: {times:.2f} times as good" if times else ""
                shown = f"({_number(min(readings.values[figure]))} to {_number(max(readings.values[figure]))})"
                lines.append(f"  {name:<{width}}  {_number(median):>10}  {shown:<22}  {beside}".rstrip())
        ours, best = self.readings[OURS].median(figure), self.best.get(figure)
        if ours and best:
            part = ratio(ours, best, figure)
            # Above it, the machine was faster at another time than when its limits were measured.
            beside = f"quire: {part:.0%} of it" if part < 1 else "exceeded, so no limit: the machine is not steady"
            lines.append(f"  {'roofline':<{width}}  {_number(best):>10}  {'':<22}  {beside}")
        return lines


def _number(value: float) -> str:
    """With three digits behind the point below 10, and none above 100."""
    digits = 3 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
