"""A heap whose entries can be moved and taken out by name: what is out of date stays in it until it comes to the top,
or until there is more of it than of the rest.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
_SPARE = 16  # entries out of date that are not worth a sweep


class LazyHeap(Generic[Name]):
    """Names by their keys, smallest first and the earliest of equals; every change costs O(log n), amortised."""

    def __init__(self) -> None:
        self._keys: dict[Name, tuple[Any, int]] = {}
        self._heap: list[tuple[Any, int, Name]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: Name) -> bool:
        return name in self._keys

    def put(self, name: Name, key: Any) -> None:
        """Adds ``name``, or gives it another key. Keys are numbers or tuples of them."""
        number = next(self._numbers)
        self._keys[name] = (key, number)
        heappush(self._heap, (key, number, name))
        self._sweep()

    def discard(self, name: Name) -> None:
        """Takes ``name`` out if it is there."""
        if self._keys.pop(name, None) is not None:
            self._sweep()

    def key(self, name: Name) -> Any:
        """The key of a name that is there."""
        return self._keys[name][0]

    def first(self) -> Name:
        """The name with the smallest key; there must be one."""
        while True:
            key, number, name = self._heap[0]
            if self._keys.get(name) == (key, number):
                return name
            heappop(self._heap)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _SPARE:
            self._heap = [(key, number, name) for name, (key, number) in self._keys.items()]
            heapify(self._heap)
