"""``ArrayCache``: what was found of arrays of rows. A fleet hands out the same array until its engines change."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

MAX_CACHED_ARRAYS = 16

Found = TypeVar("Found")


class ArrayCache(Generic[Found]):
    """By the array itself, so that looking takes no longer for a thousand rows than for one; arrays that can be written
    to are not remembered.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[npt.NDArray[np.intp], Found]] = {}

    def get(self, rows: npt.NDArray[np.intp]) -> Found | None:
        """What was kept last, if anything was."""
        found = self._found.get(id(rows))
        return None if found is None else found[1]

    def put(self, rows: npt.NDArray[np.intp], found: Found) -> Found:
        """The same, which is remembered from now on."""
        if not rows.flags.writeable:
            if len(self._found) == MAX_CACHED_ARRAYS:
                self._found.clear()
            # Holds the array, so that its identity cannot become another's.
            self._found[id(rows)] = rows, found
        return found
