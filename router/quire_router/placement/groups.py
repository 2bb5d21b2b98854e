"""``Groups``: rows by the names that their engines have for blocks. Of a fleet's rows there is usually one group."""

from collections.abc import Callable

from quire_router.placement.namespace import Namespace
from quire_router.placement.remembered import ArrayCache
from quire_router.placement.table import Rows

Grouped = list[tuple[Namespace, Rows]]


class Groups:
    """Remembers the groups of arrays that cannot be written to: a fleet hands out the same one until it changes, and
    asking each of a thousand engines takes longer than choosing one.
    """

    def __init__(self, namespace_of: Callable[[int], Namespace]) -> None:
        self._namespace_of = namespace_of
        self._known: ArrayCache[Grouped] = ArrayCache()

    def of(self, rows: Rows) -> Grouped:
        """Each namespace with its rows."""
        return self._known.of(rows) or self._known.keep(rows, self._group(rows))

    def _group(self, rows: Rows) -> Grouped:
        each = list(map(self._namespace_of, rows.tolist()))
        if each.count(each[0]) == len(each):
            return [(each[0], rows)]
        return [(one, rows[[namespace == one for namespace in each]]) for one in dict.fromkeys(each)]
