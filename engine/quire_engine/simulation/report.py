"""What a simulation measured, as figures: pure arithmetic over a recording."""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire_engine.core.outputs import SchedulerStats
from quire_engine.simulation.simulator import SimulationRecorder, StepSamples

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and maximum of what was measured often; all 0 if it never was."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Of these values; a percentile between two of them is interpolated."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return cls()
        p50, p90, p99 = np.percentile(array, (50, 90, 99))
        return cls(float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


@dataclass(frozen=True, slots=True)
class TimeAverage:
    """Mean over time, idle time included, and maximum."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """How fast the simulator was, in real time: the only figures in which two equal runs differ. ``plan_commit`` is
    what the scheduler took of each step, in seconds.
    """

    wall_seconds: float
    steps_per_second: float
    plan_commit: Percentiles


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One policy on one trace. Times are virtual seconds, rates per virtual second, parts between 0 and 1.

    ``errors`` counts typed ends and refusals by code. ``waiting`` is the time from arrival to first admission,
    ``end_to_end`` to the end. ``queue`` counts all that wait, swapped out included. ``overtakes`` are the later
    arrivals that were admitted before a request. The hit rates are parts of all prompt tokens, by the tier that they
    came from. ``waste`` is the part of the slots in held blocks that holds no token, over time.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    steps: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    computed_tokens_per_second: float
    requests_per_second: float
    ttft: Percentiles
    itl: Percentiles
    waiting: Percentiles
    end_to_end: Percentiles
    overtakes: Percentiles
    queue: TimeAverage
    running: TimeAverage
    kv_usage: TimeAverage
    hit_rate_device: float
    hit_rate_host: float
    preemptions_by_swap: int
    preemptions_by_recompute: int
    preemption_reasons: Mapping[str, int]
    blocks_swapped_out: int
    blocks_swapped_in: int
    waste: float
    unreachable_blocks: int
    pace: SimulatorSpeed


def make_report(recorder: SimulationRecorder) -> SimulationReport:
    """All figures of a finished run."""
    lives, samples = list(recorder.requests.values()), recorder.samples
    counted, device = recorder.scheduler.stats, recorder.scheduler.kv_cache_manager.device_pool
    seconds = samples.time[-1] if samples.time else 0.0
    output_tokens = sum(life.num_tokens for life in lives)
    ended = [life.ended - life.arrived for life in lives if life.ended is not None]
    return SimulationReport(
        requests=len(lives),
        completed=sum(life.ended is not None and life.error is None for life in lives),
        errors=Counter(life.error for life in lives if life.error is not None),
        steps=len(samples.time),
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_second=_ratio(output_tokens, seconds),
        computed_tokens_per_second=_ratio(counted.computed_tokens, seconds),
        requests_per_second=_ratio(len(ended), seconds),
        ttft=Percentiles.of(life.first_token - life.arrived for life in lives if life.first_token is not None),
        itl=Percentiles.of(recorder.token_gaps),
        waiting=Percentiles.of(life.admitted - life.arrived for life in lives if life.admitted is not None),
        end_to_end=Percentiles.of(ended),
        overtakes=Percentiles.of(overtakes(recorder.admissions)),
        queue=_time_average(samples.waiting, samples),
        running=_time_average(samples.running, samples),
        kv_usage=_time_average(np.array(samples.used_blocks) / device.num_blocks, samples),
        hit_rate_device=_ratio(counted.prefix_hit_tokens - counted.prefix_host_tokens, counted.prefix_query_tokens),
        hit_rate_host=_ratio(counted.prefix_host_tokens, counted.prefix_query_tokens),
        preemptions_by_swap=counted.preemptions_by_swap,
        preemptions_by_recompute=counted.preemptions_by_recompute,
        preemption_reasons=_preemptions_by_reason(counted),
        blocks_swapped_out=counted.blocks_swapped_out,
        blocks_swapped_in=counted.blocks_swapped_in,
        waste=_ratio(_over_time(samples.empty_slots, samples), _over_time(samples.held_slots, samples)),
        unreachable_blocks=recorder.unreachable_blocks,
        pace=_simulator_speed(recorder),
    )


def overtakes(admissions: Sequence[int]) -> list[int]:
    """For each of these ranks of arrival, which are in the order of admission: how many greater ones come before it."""
    counts: list[int] = []
    seen: list[int] = []
    for rank in admissions:
        counts.append(len(seen) - bisect(seen, rank))
        insort(seen, rank)
    return counts


def _preemptions_by_reason(counted: SchedulerStats) -> Mapping[str, int]:
    """Victims by why they gave way as they did."""
    reasons: Counter[str] = Counter()
    for (_, reason), count in counted.preemptions.items():
        reasons[reason.value] += count
    return reasons


def _simulator_speed(recorder: SimulationRecorder) -> SimulatorSpeed:
    samples, wall = recorder.samples, recorder.wall_seconds
    return SimulatorSpeed(wall, _ratio(len(samples.time), wall), Percentiles.of(samples.host_seconds))


def _time_average(values: Sequence[float] | Floats, samples: StepSamples) -> TimeAverage:
    seconds = samples.time[-1] if samples.time else 0.0
    return TimeAverage(_ratio(_over_time(values, samples), seconds), float(max(values, default=0)))


def _over_time(values: Sequence[float] | Floats, samples: StepSamples) -> float:
    """The integral: each value holds for the length of its step."""
    return float(np.dot(np.asarray(values, dtype=np.float64), np.asarray(samples.duration)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# Reports as a table for people: one row a figure, one column a policy.


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


# A simulation as pictures: the queue over time, how TTFT is distributed, and the KV memory over time.


if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 2000


def draw_plots(path: Path, recorders: Mapping[str, SimulationRecorder]) -> None:
    """Writes one picture with a line for each policy, in the format that the file's name says. Raises ``ImportError``
    without matplotlib, which is in the extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be
    written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    queue, ttft, usage = figure.subplots(3, 1)
    for name, recorder in recorders.items():
        _draw_queue(queue, name, recorder)
        _draw_ttft(ttft, name, recorder)
        _draw_usage(usage, name, recorder)
    _label(queue, "virtual time, s", "requests waiting")
    _label(ttft, "TTFT, s", "part of requests")
    _label(usage, "virtual time, s", "KV blocks in use")
    figure.savefig(path)


def _draw_queue(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    axes.plot(_downsample(recorder.samples.time), _downsample(recorder.samples.waiting), label=name, linewidth=1)


def _draw_ttft(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    lives = recorder.requests.values()
    values = np.sort([life.first_token - life.arrived for life in lives if life.first_token is not None])
    axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name, linewidth=1)


def _draw_usage(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    part = np.asarray(recorder.samples.used_blocks) / recorder.scheduler.kv_cache_manager.device_pool.num_blocks
    axes.plot(_downsample(recorder.samples.time), _downsample(part), label=name, linewidth=1)
    axes.set_ylim(0, 1)


def _label(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    axes.legend()


def _downsample(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Evenly chosen values, no more than a picture can show."""
    array = np.asarray(values, dtype=np.float64)
    return array[:: max(1, len(array) // POINTS)]
