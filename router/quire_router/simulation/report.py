"""What a simulation measured: the record of a run, the figures computed from it, and plots of its TTFT."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from quire_engine.simulation.report import Percentiles
from quire_engine.simulation.simulator import NANOSECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(slots=True)
class RequestTrace:
    """What happened to one request, at times in nanoseconds since the start: its arrival at ``router``, when it was
    placed on ``engine``, its first and last token, and its end; None if that did not happen. ``cached_tokens`` are
    those of its prompt that the engine had. ``error`` is the code of the error that ended it.
    """

    arrived: int
    tenant: str
    num_prompt: int
    router: int
    engine: int | None = None
    placed: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    ended: int | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: all requests in the order of their arrival; the nanoseconds that each engine was busy; when the last
    request ended; how often sequences were preempted; and how many blocks were leaked, of which there must be none.
    """

    traces: list[RequestTrace]
    busy: list[int]
    end: int
    preemptions: int
    leaked_blocks: int


@dataclass(frozen=True, slots=True)
class Report:
    """One policy at one load. Times are virtual seconds from the arrival, parts between 0 and 1.

    ``hit_rate`` is the part of all prompt tokens that an engine had cached. ``tpot`` is the time per output token
    after the first, one value for each request, ``e2el`` the time to the last token. ``imbalance`` is the longest busy
    time of an engine over the mean of all. ``errors`` counts errors and rejected requests by code. Requests came within
    ``arrival_seconds``, and the last ended after ``seconds``.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    arrival_seconds: float
    seconds: float
    hit_rate: float
    ttft: Percentiles
    tpot: Percentiles
    e2el: Percentiles
    imbalance: float
    busy: float
    preemptions: int


def make_report(record: RunRecord) -> Report:
    """Returns all figures of a finished run."""
    traces = record.traces
    completed = [trace for trace in traces if trace.ended is not None and trace.error is None]
    mean_busy = sum(record.busy) / len(record.busy)
    prompt_tokens = sum(trace.num_prompt for trace in completed)
    return Report(
        requests=len(traces),
        completed=len(completed),
        errors=dict(sorted(Counter(trace.error for trace in traces if trace.error is not None).items())),
        arrival_seconds=max(trace.arrived for trace in traces) / NANOSECONDS,
        seconds=record.end / NANOSECONDS,
        hit_rate=_ratio(sum(trace.cached_tokens for trace in completed), prompt_tokens),
        ttft=Percentiles.of(ttft(trace) for trace in completed),
        tpot=Percentiles.of(_tpot(trace) for trace in completed if trace.num_tokens > 1),
        e2el=Percentiles.of(_seconds(trace.arrived, trace.ended) for trace in completed),
        imbalance=_ratio(max(record.busy), mean_busy),
        busy=_ratio(mean_busy, record.end),
        preemptions=record.preemptions,
    )


def ttft(trace: RequestTrace) -> float:
    """Returns the seconds from the arrival to the first token."""
    return _seconds(trace.arrived, trace.first_token)


def _tpot(trace: RequestTrace) -> float:
    return _seconds(trace.first_token, trace.last_token) / (trace.num_tokens - 1)


def _seconds(begin: int | None, end: int | None) -> float:
    assert begin is not None, "it never began"
    assert end is not None, "it never ended"
    return (end - begin) / NANOSECONDS


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def draw_plots(path: Path, records: Mapping[float, Mapping[str, RunRecord]]) -> None:
    """Draws TTFT over the load. Writes one picture in the format of the file's suffix: the mean TTFT of each policy
    over the utilisation, and below it, for each utilisation, its distribution. Raises ``ImportError`` without
    matplotlib, which is in the extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 * (1 + len(records))), layout="constrained")
    over_load, *distributions = figure.subplots(1 + len(records), 1)
    _draw_means(over_load, records)
    for axes, (load, row) in zip(distributions, records.items(), strict=True):
        for name, record in row.items():
            values = _ttfts(record)
            axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name, linewidth=1)
        _label(axes, f"TTFT at utilisation {load:g}, s", "part of requests")
        axes.set_xscale("log")
    figure.savefig(path)


def _draw_means(axes: "Axes", records: Mapping[float, Mapping[str, RunRecord]]) -> None:
    loads = sorted(records)
    for name in records[loads[0]]:
        means = [float(np.mean(_ttfts(records[load][name]) or [0.0])) for load in loads]
        axes.plot(loads, means, label=name, marker="o", linewidth=1)
    _label(axes, "utilisation", "mean TTFT, s")
    axes.set_yscale("log")


def _ttfts(record: RunRecord) -> list[float]:
    return sorted(ttft(trace) for trace in record.traces if trace.first_token is not None)


def _label(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    axes.legend()
