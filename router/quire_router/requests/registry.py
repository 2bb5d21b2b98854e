"""``RequestRegistry``: the requests that this router runs now, by their ids; counted, timed and drained. And
``BackgroundRequests``, those of them that run without a client.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from time import time

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason

from quire_router.core import metrics
from quire_router.core.errors import background_full, lease_lost, request_timed_out, shutting_down
from quire_router.core.generation import Delta, GenerationRequest
from quire_router.requests.state import RequestState

log = logging.getLogger(__name__)


class RequestRegistry:
    """Requests whose record is leased by this router, until it is closed or released; the ``LeaseListener`` of those
    records. ``timeout`` seconds, where given, end a request with
    DEADLINE, as its own deadline does; that of its consumer ends the answer only. ``on_change`` is called when their
    number has changed.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self.on_change: Callable[[], None] = lambda: None
        self._requests: dict[str, RequestState] = {}
        self._of_model: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._drained = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def of_model(self, model: str) -> int:
        """Returns how many are of this model: those that wait for an engine, and those that run on one."""
        return self._of_model[model]

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Whether the time is over that running requests had to end."""
        return self._drained

    def check_accepting(self) -> None:
        """Raises ``QuireError`` UNAVAILABLE once the router is shutting down."""
        if self._draining:
            metrics.REJECTIONS.labels("unavailable").inc()
            raise shutting_down()

    def check_unused(self, request_id: str) -> None:
        """Raises ``QuireError`` INTERNAL for an id that is in use."""
        if request_id in self._requests:
            log.error("request id %s is in use twice", request_id)
            raise internal()

    @contextmanager
    def track(self, state: RequestState) -> Iterator[None]:
        """Counts the request as in flight until the block ends; an answer that is not complete by then is released, or
        aborted.
        """
        model, timers = state.generation.model, self._start_timers(state)
        self._requests[state.id] = state
        self._idle.clear()
        self._count(model, 1)
        metrics.PROMPT_TOKENS.labels(model).inc(len(state.generation.prompt_token_ids))
        try:
            yield
        finally:
            _release_or_abort(state)
            for timer in timers:
                timer.cancel()
            self._count(model, -1)
            if self._requests.get(state.id) is state:  # else the same came twice, and the journal held neither
                del self._requests[state.id]
            if not self._requests:
                self._idle.set()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Closes the door, lets requests end within ``timeout`` seconds, then ends the rest with UNAVAILABLE, for
        others to continue.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for state in list(self._requests.values()):
                state.interrupt(shutting_down())
        self._drained = True

    def on_cancelled(self, request_id: str) -> None:
        """Somebody asked for the request to be ended."""
        state = self._requests.get(request_id)
        if state is not None:
            state.interrupt(None)

    def on_lease_lost(self, request_id: str) -> None:
        """Interrupts a request that another router continues, as the lease of this one had expired."""
        state = self._requests.get(request_id)
        if state is not None:
            state.interrupt(lease_lost())

    def _count(self, model: str, more: int) -> None:
        self._of_model[model] += more
        metrics.IN_FLIGHT.labels(model).inc(more)
        metrics.LOAD.labels(model).inc(more)
        self.on_change()

    def _start_timers(self, state: RequestState) -> list[asyncio.TimerHandle]:
        """Starts the timers that end the request at its deadline, and only its answer at that of its consumer."""
        ends: list[tuple[float | None, Callable[[], None]]] = [
            (self._timeout_for(state.generation), partial(_time_out, state)),
            (state.consumer.seconds_left, state.end_for_consumer),
        ]
        loop = asyncio.get_running_loop()
        return [loop.call_later(seconds, end) for seconds, end in ends if seconds is not None]

    def _timeout_for(self, request: GenerationRequest) -> float | None:
        """How long a request may take from now on."""
        if request.deadline is None:
            return self._timeout
        left = max(0.0, request.deadline - time())
        return left if self._timeout is None else min(left, self._timeout)


def _time_out(state: RequestState) -> None:
    state.interrupt(request_timed_out())


def _release_or_abort(state: RequestState) -> None:
    """Ends a request whose client disconnected before the answer was complete: it is released if it can be resumed and
    was not cancelled.
    """
    if state.resumable and not state.cancelled:
        state.release()
    else:
        state.finish(FinishReason.ABORT)


MAX_ORPHANS = 256  # background requests beyond which no orphans are claimed
MAX_ORPHAN_TOKENS = 16_777_216  # of all that were claimed and run, prompts and answers so far: 64 MiB


class BackgroundRequests:
    """Runs requests without a client, at most ``limit`` at a time: reads their answers to the end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    @property
    def has_orphan_capacity(self) -> bool:
        """Whether orphans are to be claimed: when a router dies, all of its background requests come at once, so their
        number and their tokens are bounded.
        """
        return len(self._tasks) < min(MAX_ORPHANS, self._limit) and self._tokens < MAX_ORPHAN_TOKENS

    def check_capacity(self) -> None:
        """Raises ``QuireError`` OVERLOADED when there are as many as there may be."""
        if len(self._tasks) >= self._limit:
            metrics.REJECTIONS.labels(ErrorCode.OVERLOADED.name.lower()).inc()
            raise background_full(self._limit)

    def run(self, answer: AsyncGenerator[Delta], tokens: int = 0) -> None:
        """Starts to read an answer; ``tokens`` are those of an orphan when it was claimed."""
        task = asyncio.create_task(_read_to_end(answer), name="background request")
        self._tasks.add(task)
        self._tokens += tokens

        def ended(_: object) -> None:
            self._tasks.discard(task)
            self._tokens -= tokens

        task.add_done_callback(ended)

    async def wait(self) -> None:
        """Waits until all of them have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _read_to_end(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)
