"""What follows from how fast engines are, whatever their load; computed again when that changes."""

from dataclasses import dataclass

import numpy as np

from quire_router.placement.likeness import Flags, StepTimeColumns, cluster_step_times, stepped_recently
from quire_router.placement.remembered import ArrayCache
from quire_router.placement.table import Column, EngineColumns, EngineTable, Rows

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
