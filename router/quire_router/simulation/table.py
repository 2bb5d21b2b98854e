"""Reports as tables for people: one row a policy, one column a figure."""

from collections.abc import Callable, Mapping, Sequence

from quire_router.simulation.flood import TenantReport, Waits
from quire_router.simulation.report import Report

_COLUMNS: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("hits", lambda r: f"{100 * r.hit_rate:.1f} %"),
    ("TTFT mean, s", lambda r: f"{r.ttft.mean:.3f}"),
    ("p50", lambda r: f"{r.ttft.p50:.3f}"),
    ("p90", lambda r: f"{r.ttft.p90:.3f}"),
    ("p99", lambda r: f"{r.ttft.p99:.3f}"),
    ("ITL, ms", lambda r: f"{1000 * r.itl.mean:.1f}"),
    ("end to end p50, s", lambda r: f"{r.end_to_end.p50:.2f}"),
    ("rejects", lambda r: str(r.requests - r.completed)),
    ("imbalance", lambda r: f"{r.imbalance:.3f}"),
    ("busy", lambda r: f"{100 * r.busy:.0f} %"),
    ("preempted", lambda r: str(r.preemptions)),
)


def make_table(reports: Mapping[str, Report]) -> str:
    """The reports below each other, under the names of their figures."""
    rows = [["policy", *(name for name, _ in _COLUMNS)]]
    rows += [[name, *(cell(report) for _, cell in _COLUMNS)] for name, report in reports.items()]
    return _format(rows)


def make_tenant_table(reports: Mapping[str, TenantReport]) -> str:
    """What a flood did, below each other."""
    rows = [["policy", "", "turn p95, s", "", "TTFT p95, s", "", "rejects"]]
    for name, report in reports.items():
        calm = report.calm
        rows.append([name, "without", *_wait_cells(calm, calm)])
        rows.append(["", "with the flood", *_wait_cells(report.flooded, calm)])
        rows.append(["", "the flood itself", *_wait_cells(report.flood, calm)])
    return _format(rows)


def _wait_cells(waits: Waits, calm: Waits) -> list[str]:
    turn, ttft = _change(waits.turn_p95, calm.turn_p95), _change(waits.ttft_p95, calm.ttft_p95)
    return [f"{waits.turn_p95:.3f}", turn, f"{waits.ttft_p95:.3f}", ttft, str(waits.rejects)]


def _change(seconds: float, before: float) -> str:
    return f"{seconds / before - 1:+.0%}" if before and seconds != before else ""


def _format(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_format_row(row, widths) for row in rows)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
    return "  ".join(cells).rstrip()
