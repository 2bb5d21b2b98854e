"""Reports as a table for people: one row a figure, one column a policy."""

from collections.abc import Callable, Mapping, Sequence

from quire_engine.simulation.report import Percentiles, SimulationReport, TimeAverage

Cells = Callable[[SimulationReport], str]


def make_table(reports: Mapping[str, SimulationReport]) -> str:
    """The reports side by side, under their names."""
    rows = [["", *reports]]
    for name, cell in _ROWS:
        rows.append([name, *(cell(report) for report in reports.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_format_row(row, widths) for row in rows)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join((first, *others)).rstrip()


def _format_percentiles(spread: Percentiles, unit: float = 1.0, digits: int = 2) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return " / ".join(f"{value * unit:.{digits}f}" for value in values)


def _format_time_average(level: TimeAverage, digits: int = 1) -> str:
    return f"{level.mean:.{digits}f}, at most {level.max:.{digits}f}"


def _format_percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in counts.items()) or "none"


_ROWS: Sequence[tuple[str, Cells]] = (
    ("requests", lambda r: f"{r.completed} of {r.requests} completed"),
    ("errors", lambda r: _format_counts(r.errors)),
    ("virtual time", lambda r: f"{r.seconds:.1f} s in {r.steps} steps"),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_second:.0f}"),
    ("computed tokens/s", lambda r: f"{r.computed_tokens_per_second:.0f}"),
    ("requests/s", lambda r: f"{r.requests_per_second:.2f}"),
    ("", lambda _: "mean / p50 / p90 / p99 / max"),
    ("TTFT, s", lambda r: _format_percentiles(r.ttft)),
    ("ITL, ms", lambda r: _format_percentiles(r.itl, 1e3, 1)),
    ("waiting, s", lambda r: _format_percentiles(r.waiting)),
    ("end to end, s", lambda r: _format_percentiles(r.end_to_end)),
    ("overtakes", lambda r: _format_percentiles(r.overtakes, digits=1)),
    ("", lambda _: "mean over time"),
    ("queue", lambda r: _format_time_average(r.queue)),
    ("running", lambda r: _format_time_average(r.running)),
    ("KV in use", lambda r: f"{_format_percent(r.kv_usage.mean)}, at most {_format_percent(r.kv_usage.max)}"),
    ("KV waste", lambda r: f"{_format_percent(r.waste)}; {r.unreachable_blocks} blocks unreachable"),
    ("prefix hits", lambda r: f"{_format_percent(r.hit_rate_device)} device, {_format_percent(r.hit_rate_host)} host"),
    ("preemptions", lambda r: f"{r.preemptions_by_swap} by swap, {r.preemptions_by_recompute} by recompute"),
    ("for the reason", lambda r: _format_counts(r.preemption_reasons)),
    ("blocks swapped", lambda r: f"{r.blocks_swapped_out} out, {r.blocks_swapped_in} in"),
    ("", lambda _: "the simulator itself, real time"),
    ("pace", lambda r: f"{r.pace.steps_per_second:.0f} steps/s for {r.pace.wall_seconds:.1f} s"),
    ("plan + commit, ms", lambda r: _format_percentiles(r.pace.plan_commit, 1e3, 3)),
)
