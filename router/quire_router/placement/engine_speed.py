"""Engines of one kind are taken to be equally fast, although what each has learned of itself differs a little."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_router.placement.engine_table import ArrayCache, Column, EngineColumns, EngineTable, Rows

Flags = npt.NDArray[np.bool_]

OUTLIER_THRESHOLD = 0.25
"""By how much of the usual a step may be off and mean nothing."""

SHORT_PROMPT = 256

STEP_TIMES_TTL = 60.0
"""How long an engine that has nothing to do is believed what it last said of its pace."""


@dataclass(frozen=True, slots=True)
class StepTimeColumns:
    """How fast engines are, as ``StepTimes``: each a column, or an array of no axes where one number holds for all."""

    step_seconds: Column
    token_seconds: Column
    sequence_seconds: Column
    host_block_seconds: Column


def stepped_recently(engines: EngineColumns, now: float) -> Flags:
    """Which engines made a step so lately that they are believed what they last said of their pace."""
    return engines.stepped > now - STEP_TIMES_TTL


def cluster_step_times(engines: EngineColumns, stepped: Flags) -> StepTimeColumns:
    """The mean pace of the engines' kind; those that are of another kind keep their own. ``stepped`` are those that
    made a step ``stepped_recently``.

    A pace is fitted to an engine's last steps and moves with what these were. Believed to the last percent, one engine
    after the other would look like the fastest and draw all requests. How long a step takes that is full of prompts,
    and one with a short prompt, is known well and tells of which kind an engine is. How much of that is the step's own
    is known less well, and what a sequence adds depends on how long those are that it runs.

    An engine that has not told its pace, or has not made a step for long, would with a slow one get no request and so
    never tell: it is taken to be of the usual kind. That is the kind in the middle, which one engine that is far off
    does not move.
    """
    told = engines.paced > 0
    recent = told & stepped
    known = recent if np.count_nonzero(recent) else told
    if not np.count_nonzero(known):
        return _own(engines)
    other = recent & _unusual(engines, known)
    if not np.count_nonzero(other):
        return _mean(engines, known)
    usual = known & ~other
    mean, own = _mean(engines, usual if np.count_nonzero(usual) else known), _own(engines)
    return StepTimeColumns(
        np.where(other, own.step_seconds, mean.step_seconds),
        np.where(other, own.token_seconds, mean.token_seconds),
        np.where(other, own.sequence_seconds, mean.sequence_seconds),
        np.where(other, own.host_block_seconds, mean.host_block_seconds),
    )


def _own(engines: EngineColumns) -> StepTimeColumns:
    return StepTimeColumns(
        engines.step_seconds, engines.token_seconds, engines.sequence_seconds, engines.host_block_seconds
    )  # fmt: skip


def _mean(engines: EngineColumns, members: Flags) -> StepTimeColumns:
    """One pace for all: the mean of the ``members``, at least one."""
    weights = members / np.count_nonzero(members)
    return StepTimeColumns(
        np.asarray(engines.step_seconds @ weights),
        np.asarray(engines.token_seconds @ weights),
        np.asarray(engines.sequence_seconds @ weights),
        np.asarray(engines.host_block_seconds @ weights),
    )


def _unusual(engines: EngineColumns, known: Flags) -> Flags:
    """Whose steps take another time than the usual one, be they full of prompts or with a short one."""
    full = engines.step_seconds + engines.step_tokens * engines.token_seconds
    short = engines.step_seconds + SHORT_PROMPT * engines.token_seconds
    return _far_off(full, known) | _far_off(short, known)


def _far_off(seconds: Column, known: Flags) -> Flags:
    middle = _middle(seconds if np.count_nonzero(known) == len(known) else seconds[known])
    return np.abs(seconds - middle) > OUTLIER_THRESHOLD * middle


def _middle(numbers: Column) -> float:
    """The upper median."""
    half = len(numbers) // 2
    return float(np.partition(numbers, half)[half])


# What follows from how fast engines are, whatever their load; computed again when that changes.


SPEED_TTL = 0.05
"""Seconds. In a large fleet some pace is new at every choice, and none moves far within so few."""


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """``paces`` are those of engines, made ``cluster_step_times``. ``token_seconds`` is what a prompt token takes in a
    step that is full of them, and ``steps`` its part of such a step. ``block_size`` is in tokens, at least one.
    """

    paces: StepTimeColumns
    steps: Column
    token_seconds: Column
    block_size: Column


def compute_speeds(engines: EngineColumns, stepped: Flags) -> EngineSpeeds:
    """Of engines of which those in ``stepped`` made a step lately."""
    paces = cluster_step_times(engines, stepped)
    steps = 1 / np.maximum(engines.step_tokens, 1.0)
    return EngineSpeeds(
        paces, steps, paces.token_seconds + paces.step_seconds * steps, np.maximum(engines.block_size, 1.0)
    )


@dataclass(frozen=True, slots=True)
class _Known:
    made: float
    version: int
    stepped: Flags
    speeds: EngineSpeeds


class SpeedCache:
    """Of one table's rows. Computed again ``SPEED_TTL`` seconds after an engine said something new of itself, and at
    once when one has not made a step for so long that it is no longer believed, or makes one then.
    """

    def __init__(self) -> None:
        self._known: ArrayCache[_Known] = ArrayCache()

    def get(self, table: EngineTable, rows: Rows, engines: EngineColumns, now: float) -> EngineSpeeds:
        """The speeds of ``engines``, which are the table's ``rows``."""
        stepped = stepped_recently(engines, now)
        known = self._known.get(rows)
        if known is None or self._is_old(known, table, now) or not np.array_equal(stepped, known.stepped):
            known = self._known.put(rows, _Known(now, table.version, stepped, compute_speeds(engines, stepped)))
        return known.speeds

    def _is_old(self, known: _Known, table: EngineTable, now: float) -> bool:
        return known.version != table.version and not known.made <= now < known.made + SPEED_TTL
