"""``Groups``: rows by the names that their engines have for blocks. Of a fleet's rows there is usually one group."""

from collections.abc import Callable

from quire_router.placement.namespace import Namespace
from quire_router.placement.table import Rows

MAX_KNOWN = 16

Grouped = list[tuple[Namespace, Rows]]


class Groups:
    """Remembers the groups of arrays that cannot be written to: a fleet hands out the same one until it changes, and
    asking each of a thousand engines takes longer than choosing one.
    """

    def __init__(self, namespace_of: Callable[[int], Namespace]) -> None:
        self._namespace_of = namespace_of
        self._known: dict[int, tuple[Rows, Grouped]] = {}

    def of(self, rows: Rows) -> Grouped:
        """Each namespace with its rows."""
        if rows.flags.writeable:
            return self._group(rows)
        # What is kept holds the array, so that its identity cannot become another's.
        known = self._known.get(id(rows))
        if known is None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            known = self._known[id(rows)] = rows, self._group(rows)
        return known[1]

    def _group(self, rows: Rows) -> Grouped:
        each = list(map(self._namespace_of, rows.tolist()))
        if each.count(each[0]) == len(each):
            return [(each[0], rows)]
        return [(one, rows[[namespace == one for namespace in each]]) for one in dict.fromkeys(each)]
