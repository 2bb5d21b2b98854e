"""The queue before all engines: who waits, for how long, and the hand-over of each turn. Knows no engine by name."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from quire_proto.errors import ErrorCode, QuireError

from quire_router import metrics
from quire_router.admission.fair import Bounds, FairQueue, queue_full_error
from quire_router.admission.reason import Reason
from quire_router.admission.refusals import counting_refusals
from quire_router.admission.stopping import shutting_down_error
from quire_router.admission.tenant import Tenants
from quire_router.admission.turn import Waiting

RETRY_READY = 2.0  # seconds
RETRY_ROOM = 5.0


class Rooms(Protocol):
    """What the queue asks of the fleet, often."""

    def has_room(self, model: str) -> bool:
        """Whether an engine would take one more request of this model now."""
        ...

    def has_spare_room(self, model: str) -> bool:
        """Whether engines have so little to do that one more request is in nobody's way."""
        ...

    def ready(self, model: str) -> int:
        """Engines that can run the model now, full ones too."""
        ...


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """``hold_timeout`` seconds are waited while no engine is ready, ``max_seconds`` for room in all. ``bounds`` are
    each model's.
    """

    hold_timeout: float = 10.0
    max_seconds: float = 60.0
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(slots=True)
class _Parked:
    """One request in the queue; ``turn`` is done once it is its turn, or has the error that ended its wait."""

    waiting: Waiting
    since: float
    turn: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = None


class Queue:
    """Implements ``Turns``: for each of ``models`` a ``FairQueue``, which moves on when the fleet has room.
    ``on_waiting`` is called with the id of each request that comes, whether it has to wait or not.
    """

    def __init__(
        self,
        models: Iterable[str],
        rooms: Rooms,
        tenants: Tenants | None = None,
        settings: QueueSettings | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        settings, tenants = settings or QueueSettings(), tenants or Tenants()
        self._lines = {model: _Line(model, rooms, tenants, settings, clock) for model in models}
        self._closed = False
        self.on_waiting: Callable[[str], None] = lambda _: None

    async def turn(self, waiting: Waiting) -> None:
        """See ``Turns``. Await it in the task that dispatches: a turn that is handed over a second time, from task to
        task, comes too late to be counted before the next is given.
        """
        with counting_refusals():
            if self._closed:
                raise shutting_down_error()
            self.on_waiting(waiting.request_id)  # in the same step of the loop it is counted in the line
            await self._lines[waiting.model].turn(waiting)

    def stir(self) -> None:
        """See ``Turns``."""
        for line in self._lines.values():
            line.move()

    def leave(self, request_id: str) -> bool:
        """Lets go of a request that waits: its ``turn`` returns at once, though there may be no room. For requests that
        are interrupted and look for the reason themselves. False when it does not wait.
        """
        return any(line.leave(request_id) for line in self._lines.values())

    def close(self) -> None:
        """Nobody waits any more: all that do, and all that come, get UNAVAILABLE."""
        self._closed = True
        for line in self._lines.values():
            line.close()


class _Line:
    """The queue of one model.

    A turn is given to one request at a time. It is ``_given`` until its task has run on to its next wait: only then has
    it dispatched, and only then does ``has_room`` say whether there is room for one more.
    """

    def __init__(
        self, model: str, rooms: Rooms, tenants: Tenants, settings: QueueSettings, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._rooms = rooms
        self._settings = settings
        self._clock = clock
        self._queue = FairQueue(tenants, settings.bounds)
        self._parked: dict[str, _Parked] = {}
        self._given: _Parked | None = None
        self._unready_since: float | None = None

    async def turn(self, waiting: Waiting) -> None:
        if not self._parked and self._given is None and self._has_room_for(waiting.tenant):
            self._queue.give(waiting, self._clock())
            return
        with self._park(waiting) as parked:
            self.move()  # there may be room, and only a turn under way before this one
            try:
                await parked.turn
            except asyncio.CancelledError:
                if self._given is parked:
                    self._queue.take_back(waiting)
                raise

    def move(self) -> None:
        """Gives the next turn if there is room for it."""
        while self._given is None and self._queue:
            if not self._has_room_for(self._queue.first().tenant):
                self._note_readiness()
                return
            waiting = self._queue.next(self._clock())
            parked = self._parked[waiting.request_id]
            if parked.turn.done():  # its task was cancelled and has not run since
                self._queue.take_back(waiting)
            else:
                self._given = parked
                parked.turn.set_result(None)

    def _has_room_for(self, tenant: str) -> bool:
        """A tenant that is ahead leaves room to the others, so that they need not wait for what it has sent."""
        is_ahead = self._queue.is_ahead(tenant, self._clock())
        return self._rooms.has_spare_room(self._model) if is_ahead else self._rooms.has_room(self._model)

    def leave(self, request_id: str) -> bool:
        parked = self._parked.get(request_id)
        if parked is None or not self._queue.remove(request_id) or parked.turn.done():
            return False
        parked.turn.set_result(None)
        return True

    def close(self) -> None:
        for parked in list(self._parked.values()):
            self._refuse(parked, shutting_down_error())

    @contextmanager
    def _park(self, waiting: Waiting) -> Iterator[_Parked]:
        """A place in the queue; on every way out the request is out of it, and the next one's turn may come."""
        refused = self._queue.add(waiting)
        parked = _Parked(waiting, self._clock(), asyncio.get_running_loop().create_future())
        self._parked[waiting.request_id] = parked
        for each in refused:
            _end(self._parked[each.request_id], queue_full_error(Reason.QUEUE_FULL))
        self._watch(parked)
        metrics.PARKED.labels(self._model).inc()
        try:
            yield parked
        finally:
            metrics.PARKED.labels(self._model).dec()
            metrics.QUEUE_SECONDS.labels(self._model).observe(self._clock() - parked.since)
            self._unpark(parked)

    def _unpark(self, parked: _Parked) -> None:
        del self._parked[parked.waiting.request_id]
        self._queue.remove(parked.waiting.request_id)
        if parked.timer is not None:
            parked.timer.cancel()
        if self._given is parked:
            # This task runs on, and dispatches, before the loop comes to what is called soon. If it was cancelled
            # instead, its turn goes to the next one in the same way.
            asyncio.get_running_loop().call_soon(self._pass_on, parked)

    def _pass_on(self, parked: _Parked) -> None:
        if self._given is parked:
            self._given = None
        self.move()

    # How long they wait

    def _note_readiness(self) -> None:
        if self._rooms.ready(self._model):
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = self._clock()

    def _watch(self, parked: _Parked) -> None:
        """Ends the wait when it has lasted long enough, and else looks again when it may have."""
        if parked.turn.done():
            return
        self._note_readiness()
        error, then = self._overdue(parked, self._clock())
        if error is not None:
            self._refuse(parked, error)
        else:
            delay = max(0.0, then - self._clock())
            parked.timer = asyncio.get_running_loop().call_later(delay, self._watch, parked)

    def _overdue(self, parked: _Parked, now: float) -> tuple[QuireError | None, float]:
        """Why a request has waited long enough, or when it has at the earliest."""
        settings, deadline = self._settings, parked.waiting.deadline
        last = parked.since + settings.max_seconds
        unready = self._unready_since
        held = (now if unready is None else max(parked.since, unready)) + settings.hold_timeout
        if deadline is not None and deadline <= now:
            return _too_late(), now
        if min(last, held) <= now:
            return (_no_room(settings.max_seconds) if unready is None else _none_ready(self._model)), now
        return None, min(last, held, last if deadline is None else deadline)

    def _refuse(self, parked: _Parked, error: QuireError) -> None:
        if self._queue.remove(parked.waiting.request_id):
            _end(parked, error)


def _end(parked: _Parked, error: QuireError) -> None:
    if not parked.turn.done():
        parked.turn.set_exception(error)


def _none_ready(model: str) -> QuireError:
    message = f"No engine is ready to run the model {model!r}."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_READY, reason=Reason.NONE_READY)


def _no_room(seconds: float) -> QuireError:
    message = f"No engine had room for the request within {seconds:g} seconds."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_ROOM, reason=Reason.QUEUE_SECONDS)


def _too_late() -> QuireError:
    return QuireError(ErrorCode.DEADLINE, "The request's time was over before its turn came.", reason=Reason.DEADLINE)
