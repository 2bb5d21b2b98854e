"""Blocks that engines will have soon, because a request that makes them was just sent there.

The engine's own word comes a step later. Until then a second request with the same prompt would be sent elsewhere, and
what is cached would be computed twice. The idea of such entries is llm-d's.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice

SPECULATIVE_TTL = 2.0
MAX_PROMPT_BLOCKS = 256
MAX_SPECULATIVE_ENTRIES = 262_144
_TICKS = 4


class SpeculativeEntries:
    """Keys of blocks, and bits that say where. An entry lives for ``seconds``, and for up to a quarter of that more.

    Entries of one tick live and die together, so that nothing is ever done for one that has expired. Of one prompt the
    first ``MAX_PROMPT_BLOCKS`` are noted, and of all prompts ``max_entries``.
    """

    def __init__(self, seconds: float = SPECULATIVE_TTL, max_entries: int = MAX_SPECULATIVE_ENTRIES) -> None:
        self._tick_seconds = seconds / _TICKS
        self._left = max_entries
        self._ticks: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, bit: int, keys: Iterable[int], now: float) -> int:
        """Notes that ``bit`` will have these blocks; the number of the tick that they live with. ``now`` in seconds on
        a clock that never goes back.
        """
        self.expire(now)
        tick = int(now // self._tick_seconds)
        if not self._ticks or self._ticks[-1][0] < tick:
            self._ticks.append((tick, {}))
        tick, entries = self._ticks[-1]
        for key in islice(keys, min(MAX_PROMPT_BLOCKS, self._left)):
            known = entries.get(key)
            self._left -= known is None
            entries[key] = (known or 0) | bit
        return tick

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        oldest = int(now // self._tick_seconds) - _TICKS
        while self._ticks and self._ticks[0][0] < oldest:
            self._left += len(self._ticks.popleft()[1])

    def entries(self) -> list[Mapping[int, int]]:
        """Of each tick the blocks, each with the bits of those who will have it."""
        return [entries for _, entries in self._ticks]

    def has_tick(self, tick: int) -> bool:
        """Whether entries that live with this tick may be left."""
        return bool(self._ticks) and self._ticks[0][0] <= tick
