"""One request's output on its way from an engine to its reader. Knows neither gRPC nor text."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason


class EngineLost(Exception):  # noqa: N818 - it is news about an engine, not an error of the request
    """The engine cannot go on with a request; it can be submitted again elsewhere, with the tokens delivered so far."""

    kind = "engine_lost"


class EngineFull(Exception):  # noqa: N818 - as above
    """The engine takes no more requests now; it has done nothing for this one, and another engine may take it."""

    kind = "engine_full"


@dataclass(frozen=True, slots=True)
class Output:
    """What came since the last one: tokens from ``position`` of the output on, the end, or both.

    ``error`` is set with ``FinishReason.ERROR``. ``cached_tokens`` of the prompt were in the engine's prefix cache.
    """

    token_ids: list[int]
    position: int
    finish_reason: FinishReason | None = None
    error: QuireError | None = None
    cached_tokens: int = 0


class OutputStream:
    """The queue of one request, and the async iterator that empties it.

    Tokens coalesce while nobody reads, so a slow reader costs ``max_tokens`` integers at most, and never holds up the
    other requests of its engine. The iterator ends after the output with a finish reason, and raises ``EngineFull``,
    or ``EngineLost`` after the tokens that were saved. ``on_cancel`` is called once, when the output ends before the
    engine ended it.
    """

    def __init__(
        self,
        request_id: str,
        position: int,
        max_tokens: int,
        *,
        on_cancel: Callable[[str], None],
        slow_client_timeout: float,
    ) -> None:
        self.request_id = request_id
        self.heard_of = False
        self._max_tokens = max_tokens
        self._on_cancel = on_cancel
        self._patience = slow_client_timeout
        self._loop = asyncio.get_running_loop()
        self._position = position
        self._unread: list[int] = []
        self._unread_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cached_tokens = 0
        self._end: Output | EngineLost | EngineFull | None = None
        self._delivered = False
        self._waiter: asyncio.Future[None] | None = None

    # The link's side

    def push(
        self,
        position: int,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason | None = None,
        error: QuireError | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Takes what the engine sent. Tokens that came before are dropped; missing ones lose the request."""
        if self._end is not None:
            return
        if not self.heard_of:
            self.heard_of, self._cached_tokens = True, cached_tokens
        if token_ids and position > self._position + len(self._unread):
            self.fail_over(f"tokens before position {position} are missing")
            return
        self._add(token_ids[max(0, self._position + len(self._unread) - position) :])
        if finish_reason is not None and self._end is None:
            self._finish(self._output(finish_reason, error))

    def lose(self, reason: str) -> None:
        """The engine is gone, so there is nothing to cancel."""
        if self._end is None:
            self._finish(EngineLost(reason))

    def refuse(self, reason: str) -> None:
        """The engine did not take the request."""
        if self._end is None:
            self._finish(EngineFull(reason))

    def fail_over(self, reason: str) -> None:
        """As ``lose``, where the engine may still be at work on it."""
        if self._end is None:
            self._finish(EngineLost(reason))
            self._on_cancel(self.request_id)

    # The reader's side

    def abort(self) -> None:
        """Ends the output after what has come so far, with ``FinishReason.ABORT``."""
        self._cut(FinishReason.ABORT, None)

    def fail(self, error: QuireError) -> None:
        """Ends the output with ``error``; what was not read is dropped."""
        if self._end is None:
            self._unread = []
        self._cut(FinishReason.ERROR, error)

    def close(self) -> None:
        """The reader leaves. Cancels the request on the engine, unless it has ended."""
        self.abort()
        self._delivered = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._unread and self._end is None:
            await self._news()
        if self._delivered:
            raise StopAsyncIteration
        if isinstance(self._end, Output):
            return self._last(self._end)
        if self._unread:
            return self._take()
        self._delivered = True
        raise self._end or StopAsyncIteration

    # Inside

    def _add(self, token_ids: Sequence[int]) -> None:
        if self._position + len(self._unread) + len(token_ids) > self._max_tokens:
            self.fail(internal())
            return
        if token_ids and not self._unread:
            self._unread_since = self._loop.time()
            self._timer = self._timer or self._loop.call_later(self._patience, self._check_reader)
        self._unread.extend(token_ids)
        self._wake()

    def _take(self) -> Output:
        token_ids, self._unread = self._unread, []
        output = Output(token_ids, self._position, cached_tokens=self._cached_tokens)
        self._position += len(token_ids)
        return output

    def _last(self, end: Output) -> Output:
        self._delivered = True
        taken = self._take()
        return Output(taken.token_ids, taken.position, end.finish_reason, end.error, end.cached_tokens)

    def _output(self, reason: FinishReason, error: QuireError | None) -> Output:
        return Output([], self._position, reason, error, self._cached_tokens)

    def _cut(self, reason: FinishReason, error: QuireError | None) -> None:
        if self._end is None:
            self._finish(self._output(reason, error))
            self._on_cancel(self.request_id)

    def _finish(self, end: Output | EngineLost | EngineFull) -> None:
        self._end = end
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _check_reader(self) -> None:
        # One timer a period, not one a token: it is set again for what remains when the reader has been here.
        self._timer = None
        if not self._unread:
            return
        remaining = self._unread_since + self._patience - self._loop.time()
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check_reader)
        else:
            self.fail(QuireError(ErrorCode.OVERLOADED, "The client did not read its tokens in time."))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
