"""Blocks that engines will have soon, because some router sent a prompt there: told to the other routers, and heard.

An engine's own word comes when the prompt is computed. Until then the next prompt that begins alike may come to any
router, and one that does not know would send it elsewhere, where the same would be computed again. Does no I/O.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from quire_router.placement.index import PrefixIndex
from quire_router.placement.table import EngineTable

MAX_PROMPT_HASHES = 64
"""Blocks of one prompt that are told. Most of what prompts share is at their beginning."""

MAX_HASHES = 4096
"""Blocks of all prompts that are told at once: 64 KiB of names."""


@dataclass(frozen=True, slots=True)
class SpeculativePrefix:
    """An engine will soon have the blocks of these names, which follow each other in one prompt."""

    engine_id: str
    hashes: tuple[bytes, ...]


class SpeculativeBlocks:
    """Of one router, whose ``index`` learns what the others expect. ``clock`` is the index's, in seconds."""

    def __init__(self, table: EngineTable, index: PrefixIndex, clock: Callable[[], float] = monotonic) -> None:
        self._table = table
        self._index = index
        self._clock = clock
        self._unpublished: deque[SpeculativePrefix] = deque()
        self._num_hashes = 0

    def add(self, engine_id: str, names: Iterable[bytes]) -> None:
        """This router sent a prompt there of which these blocks are new to the engine. Of one prompt the first
        ``MAX_PROMPT_HASHES`` are kept, and of all the newest, ``MAX_HASHES`` together.
        """
        expectation = SpeculativePrefix(engine_id, tuple(islice(names, MAX_PROMPT_HASHES)))
        if expectation.hashes:
            self._unpublished.appendleft(expectation)
            self._num_hashes += len(expectation.hashes)
        while self._num_hashes > MAX_HASHES:
            self._num_hashes -= len(self._unpublished.pop().hashes)

    def pop_all(self) -> tuple[SpeculativePrefix, ...]:
        """What was noted since it was last taken, newest first."""
        taken = tuple(self._unpublished)
        self._unpublished.clear()
        self._num_hashes = 0
        return taken

    def apply_remote(self, expectations: Iterable[SpeculativePrefix]) -> None:
        """Another router sent prompts. Engines that are not known here are passed over."""
        for expectation in expectations:
            row = self._table.row_of(expectation.engine_id)
            if row >= 0:
                self._index.add_speculative(row, expectation.hashes, self._clock())
