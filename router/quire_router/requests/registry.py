"""The requests that this router runs now: by their ids, counted, and ended with it."""

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
from quire_router.core.errors import shutting_down_error
from quire_router.core.generation import Delta, GenerationRequest
from quire_router.requests.state import RETRY_AFTER, RequestState

log = logging.getLogger(__name__)


class RequestRegistry:
    """Requests from the moment in which their record is held here until it is closed or let go of. It hears of what
    becomes of the records (see ``journal.base.LeaseListener``). ``timeout`` seconds, where given, end a request with
    DEADLINE, as its own deadline does; that of its reader ends the answer only. ``on_change`` is called when there are
    more or fewer.
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
        """How many are of this model: those that wait for an engine, and those that one runs."""
        return self._of_model[model]

    @property
    def draining(self) -> bool:
        """Whether the door is closed."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Whether the router's time is over."""
        return self._drained

    def check_accepting(self) -> None:
        """Raises ``QuireError`` UNAVAILABLE once the router is shutting down."""
        if self._draining:
            metrics.REJECTIONS.labels("unavailable").inc()
            raise shutting_down_error()

    def check_unused(self, request_id: str) -> None:
        """Raises ``QuireError`` INTERNAL for an id that is in use."""
        if request_id in self._requests:
            log.error("request id %s is in use twice", request_id)
            raise internal()

    @contextmanager
    def track(self, progress: RequestState) -> Iterator[None]:
        """The request is in flight; all of that is undone here, on every way out, and an answer that is not complete by
        then is left.
        """
        model, timers = progress.generation.model, self._start_timers(progress)
        self._requests[progress.id] = progress
        self._idle.clear()
        self._count(model, 1)
        metrics.PROMPT_TOKENS.labels(model).inc(len(progress.generation.prompt_token_ids))
        try:
            yield
        finally:
            _release_or_abort(progress)
            for timer in timers:
                timer.cancel()
            self._count(model, -1)
            if self._requests.get(progress.id) is progress:  # else the same came twice, and the journal held neither
                del self._requests[progress.id]
            if not self._requests:
                self._idle.set()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Closes the door, lets requests end within ``timeout`` seconds, then ends the rest with UNAVAILABLE, for
        others to go on with.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for progress in list(self._requests.values()):
                progress.interrupt(shutting_down_error())
        self._drained = True

    def on_cancelled(self, request_id: str) -> None:
        """Somebody asked for the request to be ended."""
        progress = self._requests.get(request_id)
        if progress is not None:
            progress.interrupt(None)

    def on_lease_lost(self, request_id: str) -> None:
        """Another router goes on with the request, because this one did not say for long that it does."""
        progress = self._requests.get(request_id)
        if progress is not None:
            progress.interrupt(unavailable("Another router goes on with this request."))

    def _count(self, model: str, more: int) -> None:
        self._of_model[model] += more
        metrics.IN_FLIGHT.labels(model).inc(more)
        metrics.LOAD.labels(model).inc(more)
        self.on_change()

    def _start_timers(self, progress: RequestState) -> list[asyncio.TimerHandle]:
        """What ends the request when its time is over, and only its answer when that of its reader is."""
        ends: list[tuple[float | None, Callable[[], None]]] = [
            (self._timeout_for(progress.generation), partial(_time_out, progress)),
            (progress.consumer.seconds_left, progress.end_for_consumer),
        ]
        loop = asyncio.get_running_loop()
        return [loop.call_later(seconds, end) for seconds, end in ends if seconds is not None]

    def _timeout_for(self, generation: GenerationRequest) -> float | None:
        """How long a request may take from now on."""
        if generation.deadline is None:
            return self._timeout
        left = max(0.0, generation.deadline - time())
        return left if self._timeout is None else min(left, self._timeout)


def _time_out(state: RequestState) -> None:
    message = "The time for this request was over before its answer had ended."
    state.interrupt(QuireError(ErrorCode.DEADLINE, message))


def unavailable(message: str) -> QuireError:
    """An error that will pass, here or elsewhere."""
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_AFTER[ErrorCode.UNAVAILABLE])


def _release_or_abort(progress: RequestState) -> None:
    """The client left before the answer was complete: it may come back for the rest of some requests, unless somebody
    cancelled them.
    """
    if progress.resumable and not progress.cancelled:
        progress.release()
    else:
        progress.finish(FinishReason.ABORT)


# Answers that run on without a listener.


FULL_RETRY_AFTER = 5.0  # seconds
MAX_ORPHANS = 256  # answers beyond which no more are to be taken up that others left
MAX_ORPHAN_TOKENS = 16_777_216  # of all that was taken up and runs, prompts and answers so far: 64 MiB


class BackgroundRequests:
    """Reads answers to their ends, whatever these are: at most ``limit`` of them at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    @property
    def has_orphan_capacity(self) -> bool:
        """Whether there are so few, and so little, that what others left is to be taken up as well: after a router died
        all that it had comes at once.
        """
        return len(self._tasks) < min(MAX_ORPHANS, self._limit) and self._tokens < MAX_ORPHAN_TOKENS

    def check_capacity(self) -> None:
        """Raises ``QuireError`` OVERLOADED when there are as many as there may be."""
        if len(self._tasks) >= self._limit:
            metrics.REJECTIONS.labels(ErrorCode.OVERLOADED.name.lower()).inc()
            message = f"{self._limit} requests run in the background, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=FULL_RETRY_AFTER, reason="background_full")

    def run(self, answer: AsyncGenerator[Delta], tokens: int = 0) -> None:
        """Begins to read an answer, which was taken up with so many ``tokens`` where others left it."""
        task = asyncio.create_task(_read_to_end(answer), name="background request")
        self._tasks.add(task)
        self._tokens += tokens

        def ended(_: object) -> None:
            self._tasks.discard(task)
            self._tokens -= tokens

        task.add_done_callback(ended)

    async def wait(self) -> None:
        """Until all of them have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _read_to_end(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)
