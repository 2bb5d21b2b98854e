"""The policy ``cost``: the engine at which a request costs the fewest seconds."""

from collections.abc import Mapping

import numpy as np

from quire_router.placement.outlook import Outlook
from quire_router.placement.policy import lowest
from quire_router.placement.query import Query
from quire_router.placement.scorers import Scorer
from quire_router.placement.table import Column, EngineTable


class Cost:
    """The smallest sum of all ``scorers``."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = tuple(scorers.values())

    def choose(self, query: Query, table: EngineTable) -> int:
        """See ``Policy.choose``."""
        return int(query.rows[lowest(self.total(query, table), query.ticket)])

    def total(self, query: Query, table: EngineTable) -> Column:
        """Seconds at each of the query's rows."""
        outlook = Outlook(query, table)
        total = np.zeros(len(query.rows))
        for scorer in self._scorers:
            total += scorer(outlook)
        return total
