"""What a policy is: it chooses one of the rows that may run a request. And what policies need: fair choices among those
that are equally good, or nearly.
"""

from typing import Protocol

import numpy as np

from quire_router.placement.query import PlacementQuery
from quire_router.placement.table import Column, EngineTable, column_min

TIE_TOLERANCE = 1e-6
"""Differences below this are none; in seconds, a microsecond. It hides the order in which numbers were added up."""


class PlacementPolicy(Protocol):
    """A way to choose. What it remembers from one choice to the next is its own."""

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """One of ``query.rows``."""
        ...


def argmin_breaking_ties(costs: Column, ticket: int) -> int:
    """The position of the smallest number. Among equals the ``ticket`` decides: the same every time for one request,
    and spread over all of them for many.
    """
    ties = np.flatnonzero(costs <= column_min(costs) + TIE_TOLERANCE)
    return int(ties[ticket % len(ties)])


def spread(costs: Column, width: float, part: float) -> int:
    """The position of one of the small numbers, the smaller the likelier: where ``width`` of water would stand if it
    were poured over them, each is chosen by as large a part of all ``part`` from 0 to 1 as there is water above it.
    """
    near = np.flatnonzero(costs <= column_min(costs) + max(width, TIE_TOLERANCE))
    if len(near) == 1:
        return int(near[0])
    heights = costs[near]
    order = np.argsort(heights)
    near, heights = near[order], heights[order]
    levels = (width + np.cumsum(heights)) / np.arange(1, len(near) + 1)
    wet = np.count_nonzero(heights < levels)
    depths = np.cumsum(levels[wet - 1] - heights[:wet])
    drawn = np.searchsorted(depths, depths[-1] * part, side="right")
    return int(near[min(drawn, wet - 1)])
