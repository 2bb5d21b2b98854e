"""The policy ``cost``: the engine at which a request costs the fewest seconds."""

from collections.abc import Mapping

import numpy as np

from quire_router.placement.outlook import CandidateView, Scorer
from quire_router.placement.policy import TIE_TOLERANCE, argmin_breaking_ties, spread
from quire_router.placement.query import PlacementQuery
from quire_router.placement.speeds import SpeedCache
from quire_router.placement.table import Column, EngineTable

MUTUAL_DELAY = 2.0
"""Of two requests that do not see each other one delays the other: each counts what it meets, and what meets it."""

_TICKETS = 1 << 32


class CostPolicy:
    """The smallest sum of all ``scorers``. Chooses from one table, as it remembers the speeds of its engines.

    Several routers that look for it at one moment would find the same engine. The work that the others have just sent
    and not told yet goes where this choice goes if all choose alike; so engines that are worse by less than that share
    the choice, in the proportions in which none of them could be chosen more often at less cost to all.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = tuple(scorers.values())
        self._speeds = SpeedCache()

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        outlook = CandidateView(query, table, self._speeds)
        total = self._sum(outlook)
        width = MUTUAL_DELAY * table.unseen_tokens * float(outlook.token_seconds.mean()) if table.unseen_tokens else 0.0
        if width <= TIE_TOLERANCE:
            return int(query.rows[argmin_breaking_ties(total, query.tie_break)])
        return int(query.rows[spread(total, width, query.tie_break % _TICKETS / _TICKETS)])

    def total(self, query: PlacementQuery, table: EngineTable) -> Column:
        """Seconds at each of the query's rows."""
        return self._sum(CandidateView(query, table, self._speeds))

    def _sum(self, outlook: CandidateView) -> Column:
        total = np.zeros(len(outlook.query.rows))
        for scorer in self._scorers:
            term = outlook.score(scorer)
            if term is not outlook.zeros:
                total += term
        return total
