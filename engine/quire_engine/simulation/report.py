"""The figures of a simulation (``make_report``), as a table with a column per policy (``make_table``), and as plots of
the queue, the TTFT and the KV memory (``draw_plots``).
"""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire_engine.core.outputs import SchedulerStats
from quire_engine.simulation.reservation import KVSlots
from quire_engine.simulation.simulator import RequestRecord, SimulationRecorder, StepSamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Floats = npt.NDArray[np.float64]
Cells = Callable[["SimulationReport"], str]
POINTS = 2000  # of a line in a plot


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and maximum of a quantity; all 0 if it was never measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Computes them from ``values``. Percentiles are interpolated."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return cls()
        p50, p90, p99 = np.percentile(array, (50, 90, 99))
        return cls(float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


@dataclass(frozen=True, slots=True)
class TimeAverage:
    """Mean over time, including idle time, and maximum."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """The simulator's speed in real time, the only figures in which two equal runs differ. ``plan_commit`` is the
    scheduler's time per step, in seconds.
    """

    wall_seconds: float
    steps_per_second: float
    plan_commit: Percentiles


@dataclass(frozen=True, slots=True)
class LatencyOfSome:
    """Latencies of some of the requests, in seconds: ``away`` is the total time away after preemptions, ``e2el`` the
    time from the arrival to the last token, and ``longest_gap`` the longest time between two tokens.
    """

    requests: int
    away: Percentiles
    e2el: Percentiles
    longest_gap: Percentiles

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "LatencyOfSome":
        """Computes them from the records of completed requests."""
        some = list(records)
        return cls(
            len(some),
            Percentiles.of(each.timings.away_seconds for each in some if each.timings is not None),
            Percentiles.of(each.ended - each.arrived for each in some if each.ended is not None),
            Percentiles.of(each.longest_gap for each in some),
        )


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One policy on one trace. Times are virtual seconds, rates are per virtual second, fractions are between 0 and 1.

    ``errors`` counts failed and refused requests by code. ``waiting`` is the time from arrival to first admission,
    ``ttft`` and ``e2el`` from arrival to first and last token of completed requests. ``queue`` counts waiting requests,
    including swapped ones. ``overtakes`` counts the later arrivals that were admitted before a request. The hit rates
    are fractions of all prompt tokens, by the tier of the hit.

    ``preempted`` are the completed requests that were preempted at least once, and ``untouched`` the others. ``slots``
    are the fractions of the device's KV slots in each class, over time; all slots of an idle engine are free. ``waste``
    is the fraction of the slots of used blocks without a token.
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
    e2el: Percentiles
    overtakes: Percentiles
    queue: TimeAverage
    running: TimeAverage
    kv_usage: TimeAverage
    hit_rate_device: float
    hit_rate_host: float
    hit_rate_disk: float
    preemptions_by_swap: int
    preemptions_by_recompute: int
    preemption_reasons: Mapping[str, int]
    preempted: LatencyOfSome
    untouched: LatencyOfSome
    blocks_swapped_out: int
    blocks_swapped_in: int
    blocks_copied_ahead: int
    blocks_used_ahead: int
    disk_blocks_stored: int
    disk_blocks_loaded: int
    slots: KVSlots
    waste: float
    unreachable_blocks: int
    pace: SimulatorSpeed


def make_report(recorder: SimulationRecorder) -> SimulationReport:
    """Computes the figures of a finished run."""
    records, samples = list(recorder.requests.values()), recorder.samples
    stats, device = recorder.scheduler.stats, recorder.scheduler.kv_cache_manager.device_pool
    seconds = samples.time[-1] if samples.time else 0.0
    output_tokens = sum(record.num_tokens for record in records)
    completed = [record for record in records if record.ended is not None and record.error is None]
    return SimulationReport(
        requests=len(records),
        completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        steps=len(samples.time),
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_second=_ratio(output_tokens, seconds),
        computed_tokens_per_second=_ratio(stats.computed_tokens, seconds),
        requests_per_second=_ratio(len(completed), seconds),
        ttft=Percentiles.of(each.first_token - each.arrived for each in completed if each.first_token is not None),
        itl=Percentiles.of(recorder.token_gaps),
        waiting=Percentiles.of(each.admitted - each.arrived for each in records if each.admitted is not None),
        e2el=Percentiles.of(each.ended - each.arrived for each in completed if each.ended is not None),
        overtakes=Percentiles.of(overtakes(recorder.admissions)),
        queue=_time_average(samples.waiting, samples),
        running=_time_average(samples.running, samples),
        kv_usage=_time_average(np.array(samples.used_blocks) / device.num_blocks, samples),
        hit_rate_device=_ratio(stats.prefix_device_tokens, stats.prefix_query_tokens),
        hit_rate_host=_ratio(stats.prefix_host_tokens, stats.prefix_query_tokens),
        hit_rate_disk=_ratio(stats.prefix_disk_tokens, stats.prefix_query_tokens),
        preemptions_by_swap=stats.preemptions_by_swap,
        preemptions_by_recompute=stats.preemptions_by_recompute,
        preemption_reasons=_preemptions_by_reason(stats),
        preempted=LatencyOfSome.of(each for each in completed if each.was_preempted),
        untouched=LatencyOfSome.of(each for each in completed if not each.was_preempted),
        blocks_swapped_out=stats.blocks_swapped_out,
        blocks_swapped_in=stats.blocks_swapped_in,
        blocks_copied_ahead=stats.blocks_copied_ahead,
        blocks_used_ahead=stats.blocks_used_ahead,
        disk_blocks_stored=stats.disk_blocks_stored,
        disk_blocks_loaded=stats.disk_blocks_loaded,
        slots=_slots(recorder, seconds),
        waste=recorder.slot_seconds.waste,
        unreachable_blocks=recorder.leaked_blocks,
        pace=_simulator_speed(recorder),
    )


def overtakes(admissions: Sequence[int]) -> list[int]:
    """Returns, for each rank of arrival in ``admissions`` (in order of admission), how many greater ranks precede
    it.
    """
    counts: list[int] = []
    seen: list[int] = []
    for rank in admissions:
        counts.append(len(seen) - bisect(seen, rank))
        insort(seen, rank)
    return counts


def _slots(recorder: SimulationRecorder, seconds: float) -> KVSlots:
    """Returns the fraction of all slots in each class, over ``seconds``."""
    memory, used = recorder.scheduler.kv_cache_manager, recorder.slot_seconds
    total = memory.device_pool.num_blocks * memory.block_size * seconds
    tokens, reserved, internal = (_ratio(part, total) for part in (used.tokens, used.reserved, used.internal))
    return KVSlots(tokens, reserved, internal, 1.0 - tokens - reserved - internal)


def _preemptions_by_reason(stats: SchedulerStats) -> Mapping[str, int]:
    """Returns preemptions by reason, over all modes."""
    reasons: Counter[str] = Counter()
    for (_, reason), count in stats.preemptions.items():
        reasons[reason.value] += count
    return dict(reasons)  # asdict would count the entries of a Counter


def _simulator_speed(recorder: SimulationRecorder) -> SimulatorSpeed:
    samples, wall = recorder.samples, recorder.wall_seconds
    return SimulatorSpeed(wall, _ratio(len(samples.time), wall), Percentiles.of(samples.host_seconds))


def _time_average(values: Sequence[float] | Floats, samples: StepSamples) -> TimeAverage:
    seconds = samples.time[-1] if samples.time else 0.0
    return TimeAverage(_ratio(_over_time(values, samples), seconds), float(max(values, default=0)))


def _over_time(values: Sequence[float] | Floats, samples: StepSamples) -> float:
    """Returns the integral over time; each value lasts for its step."""
    return float(np.dot(np.asarray(values, dtype=np.float64), np.asarray(samples.duration)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def make_table(reports: Mapping[str, SimulationReport]) -> str:
    """Returns the reports as a table: one row per figure, one column per name."""
    rows = [["", *reports]]
    for name, cell in _ROWS:
        rows.append([name, *(cell(report) for report in reports.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_format_row(row, widths) for row in rows)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join((first, *others)).rstrip()


def _format_percentiles(percentiles: Percentiles, unit: float = 1.0, digits: int = 2) -> str:
    values = (percentiles.mean, percentiles.p50, percentiles.p90, percentiles.p99, percentiles.max)
    return " / ".join(f"{value * unit:.{digits}f}" for value in values)


def _format_time_average(average: TimeAverage, digits: int = 1) -> str:
    return f"{average.mean:.{digits}f}, at most {average.max:.{digits}f}"


def _format_percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _format_hit_rates(report: SimulationReport) -> str:
    rates = {"device": report.hit_rate_device, "host": report.hit_rate_host, "disk": report.hit_rate_disk}
    return ", ".join(f"{_format_percent(rate)} {tier}" for tier, rate in rates.items())


def _format_slots(slots: KVSlots) -> str:
    parts = (slots.tokens, slots.reserved, slots.internal, slots.external)
    return " / ".join(f"{100 * part:.1f}" for part in parts)


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
    ("E2EL, s", lambda r: _format_percentiles(r.e2el)),
    ("overtakes", lambda r: _format_percentiles(r.overtakes, digits=1)),
    ("", lambda _: "mean over time"),
    ("queue", lambda r: _format_time_average(r.queue)),
    ("running", lambda r: _format_time_average(r.running)),
    ("KV in use", lambda r: f"{_format_percent(r.kv_usage.mean)}, at most {_format_percent(r.kv_usage.max)}"),
    ("KV slots, %", lambda r: f"{_format_slots(r.slots)} token, reserved, internal, external"),
    ("KV waste", lambda r: f"{_format_percent(r.waste)}; {r.unreachable_blocks} blocks unreachable"),
    ("prefix hits", _format_hit_rates),
    ("preemptions", lambda r: f"{r.preemptions_by_swap} by swap, {r.preemptions_by_recompute} by recompute"),
    ("for the reason", lambda r: _format_counts(r.preemption_reasons)),
    ("preempted requests", lambda r: f"{r.preempted.requests}"),
    ("  away, s", lambda r: _format_percentiles(r.preempted.away)),
    ("  E2EL, s", lambda r: _format_percentiles(r.preempted.e2el)),
    ("  longest ITL, ms", lambda r: _format_percentiles(r.preempted.longest_gap, 1e3, 1)),
    ("untouched requests", lambda r: f"{r.untouched.requests}"),
    ("  E2EL, s", lambda r: _format_percentiles(r.untouched.e2el)),
    ("  longest ITL, ms", lambda r: _format_percentiles(r.untouched.longest_gap, 1e3, 1)),
    ("blocks swapped", lambda r: f"{r.blocks_swapped_out} out, {r.blocks_swapped_in} in"),
    ("blocks swapped ahead", lambda r: f"{r.blocks_copied_ahead}, {r.blocks_used_ahead} of them used"),
    ("blocks on disk", lambda r: f"{r.disk_blocks_stored} stored, {r.disk_blocks_loaded} loaded"),
    ("", lambda _: "the simulator itself, real time"),
    ("pace", lambda r: f"{r.pace.steps_per_second:.0f} steps/s for {r.pace.wall_seconds:.1f} s"),
    ("plan + commit, ms", lambda r: _format_percentiles(r.pace.plan_commit, 1e3, 3)),
)


def check_can_plot() -> None:
    """Raises ``ImportError`` without matplotlib, which is in the extra ``plot``."""
    from matplotlib.figure import Figure  # noqa: F401 - whether it can be imported


def draw_plots(path: Path, recorders: Mapping[str, SimulationRecorder]) -> None:
    """Writes one picture with a line per policy, in the format of the file's suffix. Raises ``ImportError`` without
    matplotlib, which is in the extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be written.
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
    records = recorder.requests.values()
    values = np.sort([record.first_token - record.arrived for record in records if record.first_token is not None])
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
    """Returns evenly spaced values, about ``POINTS`` at most."""
    array = np.asarray(values, dtype=np.float64)
    return array[:: max(1, len(array) // POINTS)]
