"""``Forwarded``: a request that somebody else sends to an engine, where this router has only said to which one. It is
counted in the engine's load for as long as it lasts, and what is seen of its answer says how fast the engine is and
what it has cached. Does no I/O.
"""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from types import TracebackType
from typing import Self

from quire_router.engines.base import EngineClient
from quire_router.engines.load import EngineLoad, LedgerEntry


class Forwarded:
    """A request at the engine behind ``connection``, with the ``load``: counted with ``begin`` from entering to
    leaving, on every path; then ``on_release`` is called. ``uncached_tokens`` of its prompt are not cached there, and
    ``block_hashes`` are those of its blocks. It decodes ``sequences``.

    The prompt counts as computed when the first event of a stream has come. An answer in one piece does not say when
    that was: its prompt counts as computed after the time that placement reckons with.
    """

    def __init__(
        self,
        connection: EngineClient,
        load: EngineLoad,
        begin: Callable[[], LedgerEntry],
        on_release: Callable[[], None],
        *,
        uncached_tokens: int,
        sequences: int,
        block_hashes: Iterable[bytes] = (),
    ) -> None:
        self._connection = connection
        self._load = load
        self._begin = begin
        self._on_release = on_release
        self._uncached_tokens = uncached_tokens
        self._sequences = sequences
        self._block_hashes = block_hashes
        self._entry: LedgerEntry | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_alone = self._is_cached = False
        self._began = 0.0
        self._last: float | None = None

    def __enter__(self) -> Self:
        self._was_alone = not self._load.local[1]
        self._began = monotonic()
        self._entry = self._begin()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._load.seconds_of_prompts, self._entry.on_first_output)
        return self

    def on_events(self, count: int) -> None:
        """So many more events of a stream have come, each of a token of one sequence."""
        now, last = monotonic(), self._last
        if not count or self._entry is None:
            return
        self._last = now
        if last is not None:
            if count == self._sequences == 1:
                self._connection.on_forwarded_gap(now - last, max(1, self._load.local[2]))
            return
        self._entry.on_first_output()
        if self._was_alone and self._sequences == 1:
            self._connection.on_forwarded_prompt(now - self._began, self._uncached_tokens)
        self.on_computed()

    def on_computed(self) -> None:
        """The engine has computed the prompt, so that its blocks are cached there."""
        if not self._is_cached:
            self._is_cached = True
            self._connection.expect_cached(list(self._block_hashes))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._entry is not None:
            self._entry.end()
            self._entry = None
            self._on_release()
