"""What a simulation measured, as figures: pure arithmetic over a record."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.simulation.clock import NANOSECONDS
from quire_engine.simulation.report import Percentiles

from quire_router.simulation.recorder import RequestTrace, RunRecord


@dataclass(frozen=True, slots=True)
class Report:
    """One policy at one load. Times are virtual seconds from the arrival, parts between 0 and 1.

    ``hit_rate`` is the part of all prompt tokens that an engine had cached. ``itl`` is the time between two tokens, as
    each request's mean. ``imbalance`` is the longest busy time of an engine over the mean of all. ``errors`` counts
    typed ends and refusals by code. Requests came within ``arrival_seconds``, and the last ended after ``seconds``.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    arrival_seconds: float
    seconds: float
    hit_rate: float
    ttft: Percentiles
    itl: Percentiles
    end_to_end: Percentiles
    imbalance: float
    busy: float
    preemptions: int


def make_report(record: RunRecord) -> Report:
    """All figures of a finished run."""
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
        itl=Percentiles.of(_itl(trace) for trace in completed if trace.num_tokens > 1),
        end_to_end=Percentiles.of(_seconds(trace.arrived, trace.ended) for trace in completed),
        imbalance=_ratio(max(record.busy), mean_busy),
        busy=_ratio(mean_busy, record.end),
        preemptions=record.preemptions,
    )


def ttft(trace: RequestTrace) -> float:
    """Seconds from the arrival to the first token."""
    return _seconds(trace.arrived, trace.first_token)


def _itl(trace: RequestTrace) -> float:
    return _seconds(trace.first_token, trace.last_token) / (trace.num_tokens - 1)


def _seconds(begin: int | None, end: int | None) -> float:
    assert begin is not None, "it never began"
    assert end is not None, "it never ended"
    return (end - begin) / NANOSECONDS


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
