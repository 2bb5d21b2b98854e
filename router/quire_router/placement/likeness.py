"""Engines of one kind are taken to be equally fast, although what each has learned of itself differs a little."""

import numpy as np

from quire_router.placement.table import Columns

_NOISE = np.array([[0.25], [0.25], [1.0], [0.25]])
"""By how much of the mean a step's, a prompt token's, a sequence's and a copy's seconds may be off and mean nothing."""


def alike(engines: Columns) -> Columns:
    """The engines with the mean pace of all where their own is near it, or where they have not told one.

    A pace is fitted to an engine's last steps and moves with what these were. Believed to the last percent, one engine
    after the other would look like the fastest and draw all requests. One that has not told its pace would, with a
    slower guess, get no request and so never tell.
    """
    paces = np.stack(
        [engines.step_seconds, engines.token_seconds, engines.sequence_seconds, engines.host_block_seconds]
    )
    told = engines.paced > 0
    silent = not told.all()
    if silent and not told.any():
        return engines
    mean = (paces @ told / told.sum())[:, None]
    far = np.abs(paces - mean) > _NOISE * mean
    if silent:
        far &= told
    step, token, sequence, host_block = np.where(far, paces, mean)
    return engines._replace(
        step_seconds=step, token_seconds=token, sequence_seconds=sequence, host_block_seconds=host_block
    )
