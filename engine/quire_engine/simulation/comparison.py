"""Compares engines that differ in their batching or their memory: a table with a line per run (``make_comparison``),
and a picture of KV slots as stacked bars, with the speed below (``draw_comparison``).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from quire_engine.simulation.report import SimulationReport

COLUMNS: Mapping[str, Callable[[SimulationReport], str]] = {
    "token": lambda r: f"{100 * r.slots.tokens:.1f} %",
    "reserved": lambda r: f"{100 * r.slots.reserved:.1f} %",
    "internal": lambda r: f"{100 * r.slots.internal:.1f} %",
    "external": lambda r: f"{100 * r.slots.external:.1f} %",
    "running": lambda r: f"{r.running.mean:.1f}",
    "tokens/s": lambda r: f"{r.output_tokens_per_second:,.0f}",
    "TTFT mean": lambda r: f"{r.ttft.mean:,.2f} s",
    "TTFT p99": lambda r: f"{r.ttft.p99:,.2f} s",
    "waiting mean": lambda r: f"{r.waiting.mean:,.2f} s",
    "preempted": lambda r: str(r.preemptions_by_swap + r.preemptions_by_recompute),
    "completed": lambda r: f"{r.completed} of {r.requests}",
}
CLASSES = {  # of KV slots, from the bottom of a bar: legend and colour
    "tokens": ("token", "#4477aa"),
    "reserved": ("reserved for a later token", "#66ccee"),
    "internal": ("internal fragmentation", "#ee6677"),
    "external": ("external fragmentation, or free", "#cccccc"),
}


def make_comparison(reports: Mapping[str, SimulationReport]) -> str:
    """Returns the reports as a table with a line per run."""
    lines = [["", *COLUMNS]]
    lines += [[name, *(cell(report) for cell in COLUMNS.values())] for name, report in reports.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_format_line(line, widths) for line in lines)


def _format_line(line: list[str], widths: list[int]) -> str:
    cells = (f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
    return "  ".join((f"{line[0]:<{widths[0]}}", *cells)).rstrip()


def draw_comparison(path: Path, reports: Mapping[str, SimulationReport]) -> None:
    """Writes one picture with two bars per run, in the format of the file's suffix. Raises like ``draw_plots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.1 * len(reports), 6.5), layout="constrained")
    memory, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    places, names = range(len(reports)), [name.replace(" ", "\n") for name in reports]
    bottom = [0.0] * len(reports)
    for field, (label, color) in CLASSES.items():
        parts = [100 * float(getattr(report.slots, field)) for report in reports.values()]
        memory.bar(places, parts, bottom=bottom, label=label, color=color)
        bottom = [low + part for low, part in zip(bottom, parts, strict=True)]
    memory.set_ylabel("KV slots, %")
    memory.set_ylim(0, 100)
    memory.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    speed.bar(places, [report.output_tokens_per_second for report in reports.values()], color="#4477aa")
    speed.set_ylabel("output tokens/s")
    speed.set_xticks(places, names)
    figure.savefig(path)
