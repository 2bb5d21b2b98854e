"""What a policy is: it chooses one of the rows that may run a request. And what every policy needs: fair ties."""

from typing import Protocol

import numpy as np

from quire_router.placement.query import Query
from quire_router.placement.table import Column, EngineTable

TIE = 1e-6
"""Differences below this are none; in seconds, a microsecond. It hides the order in which numbers were added up."""


class Policy(Protocol):
    """A way to choose. What it remembers from one choice to the next is its own."""

    def choose(self, query: Query, table: EngineTable) -> int:
        """One of ``query.rows``."""
        ...


def lowest(costs: Column, ticket: int) -> int:
    """The position of the smallest number. Among equals the ``ticket`` decides: the same every time for one request,
    and spread over all of them for many.
    """
    ties = np.flatnonzero(costs <= costs.min() + TIE)
    return int(ties[ticket % len(ties)])
