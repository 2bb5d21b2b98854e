"""Engines of one kind are taken to be equally fast, although what each has learned of itself differs a little."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire_router.placement.table import Column, Columns

Flags = npt.NDArray[np.bool_]

NOISE = 0.25
"""By how much of the usual a step may be off and mean nothing."""

SHORT_PROMPT = 256

PACE_SECONDS = 60.0
"""How long an engine that has nothing to do is believed what it last said of its pace."""


def alike(engines: Columns, now: float) -> Columns:
    """The engines with the mean pace of their kind; those that are of another kind keep their own.

    A pace is fitted to an engine's last steps and moves with what these were. Believed to the last percent, one engine
    after the other would look like the fastest and draw all requests. How long a step takes that is full of prompts,
    and one with a short prompt, is known well and tells of which kind an engine is. How much of that is the step's own
    is known less well, and what a sequence adds depends on how long those are that it runs.

    An engine that has not told its pace, or has not made a step for long, would with a slow one get no request and so
    never tell: it is taken to be of the usual kind. That is the kind in the middle, which one engine that is far off
    does not move.
    """
    told = engines.paced > 0
    recent = told & (engines.stepped > now - PACE_SECONDS)
    known = recent if np.count_nonzero(recent) else told
    if not np.count_nonzero(known):
        return engines
    full = engines.step_seconds + engines.step_tokens * engines.token_seconds
    short = engines.step_seconds + SHORT_PROMPT * engines.token_seconds
    other = recent & (_unusual(full, known) | _unusual(short, known))
    exceptions = np.count_nonzero(other) > 0
    usual_ones = known & ~other if exceptions else known
    weights = (usual_ones if np.count_nonzero(usual_ones) else known).astype(np.float64)
    weights /= weights.sum()

    def usual(column: Column) -> Column:
        mean = float(column @ weights)
        return np.where(other, column, mean) if exceptions else np.full(len(column), mean)

    return replace(
        engines,
        step_seconds=usual(engines.step_seconds),
        token_seconds=usual(engines.token_seconds),
        sequence_seconds=usual(engines.sequence_seconds),
        host_block_seconds=usual(engines.host_block_seconds),
    )


def _unusual(seconds: Column, known: Flags) -> Flags:
    middle = _middle(seconds if np.count_nonzero(known) == len(known) else seconds[known])
    return np.abs(seconds - middle) > NOISE * middle


def _middle(numbers: Column) -> float:
    """The upper median."""
    half = len(numbers) // 2
    return float(np.partition(numbers, half)[half])
