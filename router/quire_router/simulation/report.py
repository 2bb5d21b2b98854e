"""What a simulation measured, as figures: pure arithmetic over a record."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.simulation.clock import NANOSECONDS
from quire_engine.simulation.report import Spread

from quire_router.simulation.recorder import Life, Record


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
    ttft: Spread
    itl: Spread
    end_to_end: Spread
    imbalance: float
    busy: float
    preemptions: int


def make_report(record: Record) -> Report:
    """All figures of a finished run."""
    lives = record.lives
    completed = [life for life in lives if life.ended is not None and life.error is None]
    mean_busy = sum(record.busy) / len(record.busy)
    prompt_tokens = sum(life.num_prompt for life in completed)
    return Report(
        requests=len(lives),
        completed=len(completed),
        errors=dict(sorted(Counter(life.error for life in lives if life.error is not None).items())),
        arrival_seconds=max(life.arrived for life in lives) / NANOSECONDS,
        seconds=record.end / NANOSECONDS,
        hit_rate=_ratio(sum(life.cached_tokens for life in completed), prompt_tokens),
        ttft=Spread.of(ttft(life) for life in completed),
        itl=Spread.of(_itl(life) for life in completed if life.num_tokens > 1),
        end_to_end=Spread.of(_seconds(life.arrived, life.ended) for life in completed),
        imbalance=_ratio(max(record.busy), mean_busy),
        busy=_ratio(mean_busy, record.end),
        preemptions=record.preemptions,
    )


def ttft(life: Life) -> float:
    """Seconds from the arrival to the first token."""
    return _seconds(life.arrived, life.first_token)


def _itl(life: Life) -> float:
    return _seconds(life.first_token, life.last_token) / (life.num_tokens - 1)


def _seconds(begin: int | None, end: int | None) -> float:
    assert begin is not None, "it never began"
    assert end is not None, "it never ended"
    return (end - begin) / NANOSECONDS


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
