"""How fast engines are, whatever their load: the step times that placement assumes for each.

Engines of one kind are taken to be equally fast, although what each has measured of itself differs a little. All times
are in seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_router.placement.engine_table import ArrayCache, Column, EngineColumns, EngineTable, Rows

Flags = npt.NDArray[np.bool_]

OUTLIER_THRESHOLD = 0.25
"""Relative difference from the median step time below which an engine counts as one of the usual kind."""

SHORT_PROMPT = 256
"""Tokens of the short prompt by which kinds of engines are told apart."""

STEP_TIMES_TTL = 60.0
"""Seconds after its last step for which an engine's step times are believed."""

SPEED_TTL = 0.05
"""Seconds for which speeds are reused after an engine reported new step times. In a large fleet some engine has new
ones at every choice, and none moves far within so few."""


@dataclass(frozen=True, slots=True)
class StepTimeColumns:
    """``StepTimes`` of several engines: each a column, or an array of no axes if one number holds for all."""

    step_seconds: Column
    token_seconds: Column
    sequence_seconds: Column
    host_block_seconds: Column


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """What follows from step times. ``step_times`` are those of ``cluster_step_times``. ``steps_per_token`` is the part
    of a full step that one prompt token is, and ``token_seconds`` the time of a prompt token in a full step, with that
    part of the step's own time. ``block_size`` is in tokens, at least one.
    """

    step_times: StepTimeColumns
    steps_per_token: Column
    token_seconds: Column
    block_size: Column


@dataclass(frozen=True, slots=True)
class _CachedSpeeds:
    computed_at: float
    version: int
    stepped: Flags
    speeds: EngineSpeeds


class SpeedCache:
    """The speeds of one table's rows. They are computed again ``SPEED_TTL`` seconds after an engine reported new step
    times or sizes, and at once when an engine's ``stepped_recently`` changes.
    """

    def __init__(self) -> None:
        self._cache: ArrayCache[_CachedSpeeds] = ArrayCache()

    def get(self, table: EngineTable, rows: Rows, engines: EngineColumns, now: float) -> EngineSpeeds:
        """Returns the speeds of ``engines``, which are the table's ``rows``."""
        stepped = stepped_recently(engines, now)
        cached = self._cache.get(rows)
        if cached is None or self._is_stale(cached, table, now) or not np.array_equal(stepped, cached.stepped):
            cached = self._cache.put(rows, _CachedSpeeds(now, table.version, stepped, compute_speeds(engines, stepped)))
        return cached.speeds

    def _is_stale(self, cached: _CachedSpeeds, table: EngineTable, now: float) -> bool:
        return cached.version != table.version and not cached.computed_at <= now < cached.computed_at + SPEED_TTL


def compute_speeds(engines: EngineColumns, stepped: Flags) -> EngineSpeeds:
    """Returns the speeds of ``engines``, of which those in ``stepped`` made a step lately."""
    step_times = cluster_step_times(engines, stepped)
    steps_per_token = 1 / np.maximum(engines.step_tokens, 1.0)
    return EngineSpeeds(
        step_times,
        steps_per_token,
        step_times.token_seconds + step_times.step_seconds * steps_per_token,
        np.maximum(engines.block_size, 1.0),
    )


def stepped_recently(engines: EngineColumns, now: float) -> Flags:
    """Returns which engines made a step so lately that their step times are believed."""
    return engines.stepped > now - STEP_TIMES_TTL


def cluster_step_times(engines: EngineColumns, stepped: Flags) -> StepTimeColumns:
    """Returns the mean step times of the usual kind of engine; outliers keep their own. ``stepped`` are the engines
    that ``stepped_recently``.

    Step times are fitted to an engine's last steps and move with what these were. Believed to the last percent, one
    engine after the other would look like the fastest and draw all requests. How long a step takes that is full of
    prompts, and one with a short prompt, is known well and tells of which kind an engine is. How much of that is the
    step's own is known less well, and what a sequence adds depends on how long those are that it runs.

    An engine that has not reported step times, or has not made a step for long, would with slow ones get no request and
    so never report others: it is taken to be of the usual kind. That is the kind of the median, which one engine that
    is far off does not move.
    """
    measured = engines.measured > 0
    recent = measured & stepped
    known = recent if np.count_nonzero(recent) else measured
    if not np.count_nonzero(known):
        return _own_step_times(engines)
    outliers = recent & _find_outliers(engines, known)
    if not np.count_nonzero(outliers):
        return _mean_step_times(engines, known)
    usual = known & ~outliers
    mean, own = _mean_step_times(engines, usual if np.count_nonzero(usual) else known), _own_step_times(engines)
    return StepTimeColumns(
        np.where(outliers, own.step_seconds, mean.step_seconds),
        np.where(outliers, own.token_seconds, mean.token_seconds),
        np.where(outliers, own.sequence_seconds, mean.sequence_seconds),
        np.where(outliers, own.host_block_seconds, mean.host_block_seconds),
    )


def _own_step_times(engines: EngineColumns) -> StepTimeColumns:
    return StepTimeColumns(
        engines.step_seconds, engines.token_seconds, engines.sequence_seconds, engines.host_block_seconds
    )


def _mean_step_times(engines: EngineColumns, members: Flags) -> StepTimeColumns:
    """Returns the mean over the ``members``, at least one."""
    weights = members / np.count_nonzero(members)
    return StepTimeColumns(
        np.asarray(engines.step_seconds @ weights),
        np.asarray(engines.token_seconds @ weights),
        np.asarray(engines.sequence_seconds @ weights),
        np.asarray(engines.host_block_seconds @ weights),
    )


def _find_outliers(engines: EngineColumns, known: Flags) -> Flags:
    """Returns the engines whose steps, full or with a short prompt, take another time than the median of ``known``."""
    full = engines.step_seconds + engines.step_tokens * engines.token_seconds
    short = engines.step_seconds + SHORT_PROMPT * engines.token_seconds
    return _far_from_median(full, known) | _far_from_median(short, known)


def _far_from_median(seconds: Column, known: Flags) -> Flags:
    median = _upper_median(seconds if np.count_nonzero(known) == len(known) else seconds[known])
    return np.abs(seconds - median) > OUTLIER_THRESHOLD * median


def _upper_median(numbers: Column) -> float:
    half = len(numbers) // 2
    return float(np.partition(numbers, half)[half])
