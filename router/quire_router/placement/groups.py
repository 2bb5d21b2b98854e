"""``NamespaceGroups``: rows by the names that their engines have for blocks. Of a fleet's rows there is usually one
group.
"""

from collections.abc import Callable

from quire_router.placement.namespace import BlockNamespace
from quire_router.placement.remembered import ArrayCache
from quire_router.placement.table import Rows

RowGroups = list[tuple[BlockNamespace, Rows]]


class NamespaceGroups:
    """Remembers the groups of arrays that cannot be written to: a fleet hands out the same one until it changes, and
    asking each of a thousand engines takes longer than choosing one.
    """

    def __init__(self, namespace_of: Callable[[int], BlockNamespace]) -> None:
        self._namespace_of = namespace_of
        self._known: ArrayCache[RowGroups] = ArrayCache()

    def get(self, rows: Rows) -> RowGroups:
        """Each namespace with its rows."""
        return self._known.get(rows) or self._known.put(rows, self._group(rows))

    def _group(self, rows: Rows) -> RowGroups:
        each = list(map(self._namespace_of, rows.tolist()))
        if each.count(each[0]) == len(each):
            return [(each[0], rows)]
        return [(one, rows[[namespace == one for namespace in each]]) for one in dict.fromkeys(each)]
