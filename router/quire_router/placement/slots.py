"""Who holds blocks in the prefix index, and which bits stand for whom."""

from collections import deque
from collections.abc import Callable

import numpy as np

from quire_router.placement.table import Rows
from quire_router.placement.tier import Tier

_FIRST_SLOTS = 16
_NEVER = -1


class IndexSlot:
    """What one engine holds from one snapshot to the next. ``bits`` has a bit for each tier, ``both`` the two together.

    ``held`` are the keys of its blocks, in whichever tier, at most ``bound`` of them.
    """

    __slots__ = ("bits", "both", "bound", "expected_tick", "held", "number", "row")

    def __init__(self, number: int, row: int, bound: int) -> None:
        self.number = number
        self.row = row
        self.bound = bound
        self.bits = (1 << 2 * number, 2 << 2 * number)
        self.both = self.bits[0] | self.bits[1]
        self.held: set[int] = set()
        self.expected_tick = _NEVER


class IndexSlots:
    """Gives a slot to each row of the table, and a new one when a row begins anew.

    What was held under the old slot is dead at once: ``live`` has the device bits of those that count. It is taken out
    of the index little by little, and only then is the slot used again, maybe for another row. So rows may be given to
    other engines at any time. ``hosting`` has the host bits of those of the live that ever had a block in their host
    pools. All rows that ever had a slot are below ``num_rows``.
    """

    def __init__(self, in_use: Callable[[int], bool]) -> None:
        """``in_use`` tells whether something that was expected in a tick may still be remembered."""
        self.live = 0
        self.hosting = 0
        self.num_rows = 0
        self.dead: deque[IndexSlot] = deque()
        self._in_use = in_use
        self._rows: dict[int, IndexSlot] = {}
        self._free: deque[IndexSlot] = deque()
        self._row_of: Rows = np.zeros(_FIRST_SLOTS, dtype=np.intp)
        self._made = 0

    @property
    def num_bytes(self) -> int:
        """How long the bits of all slots are."""
        return -(-2 * self._made // 8)

    def find(self, row: int) -> IndexSlot | None:
        """The row's slot, if it has one."""
        return self._rows.get(row)

    def take(self, row: int, bound: int) -> IndexSlot:
        """The row's slot; a fresh one where it has none."""
        slot = self._rows.get(row)
        if slot is None:
            slot = self._rows[row] = IndexSlot(self._number(), row, bound)
            self._row_of[slot.number] = row
            self.num_rows = max(self.num_rows, row + 1)
            self.live |= slot.bits[Tier.DEVICE]
        return slot

    def retire(self, row: int) -> None:
        """The row begins anew; the old slot waits until it is emptied."""
        slot = self._rows.pop(row, None)
        if slot is not None:
            self.live ^= slot.bits[Tier.DEVICE]
            self.hosting &= ~slot.bits[Tier.HOST]
            (self.dead if slot.held else self._free).append(slot)

    def emptied(self) -> None:
        """The first of the ``dead`` holds nothing any more."""
        self._free.append(self.dead.popleft())

    def rows(self, bits: Rows) -> Rows:
        """The rows that these numbers of bits stand for."""
        rows: Rows = self._row_of[bits >> 1]
        return rows

    def _number(self) -> int:
        if self._free and not self._in_use(self._free[0].expected_tick):
            return self._free.popleft().number
        self._made += 1
        if self._made > len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.zeros_like(self._row_of)])
        return self._made - 1
