"""The queue in front of all engines: which requests wait, for how long, and how each is admitted.

There are two classes, each fair between tenants. What is best effort, as lines of batches are, has its turn only when
nothing else waits and an engine has room beside its own work; it waits as long as it takes, and displaces nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Final, Protocol

from quire_proto.errors import QuireError

from quire_router.admission.fair_queue import FairQueue, QueueBounds, QueuedRequest
from quire_router.admission.limits import counting_refusals
from quire_router.admission.tenants import Tenants
from quire_router.core import metrics
from quire_router.core.errors import (
    RefusalReason,
    deadline_in_queue,
    no_capacity,
    none_ready_in_queue,
    queue_full,
    shutting_down,
)


class Capacity(Protocol):
    """Whether the engines can take more requests. The queue asks before each admission."""

    def has_capacity(self, model: str) -> bool:
        """Returns True if an engine would take one more request of this model now."""
        ...

    def has_spare_capacity(self, model: str) -> bool:
        """Returns True if engines have so little to do that one more request delays no other."""
        ...

    def has_best_effort_capacity(self, model: str) -> bool:
        """Returns True if an engine has room for one more request that is best effort."""
        ...

    def ready(self, model: str) -> int:
        """Returns the number of engines that can run the model now, full ones included."""
        ...

    def num_sleeping(self, model: str) -> int:
        """Returns the number of engines of the model that sleep and could be woken up."""
        ...


_MAX_BEST_EFFORT: Final = 4_096  # requests: a batch has some at a time, which come again when they are refused


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """``hold_timeout`` is for how many seconds a request waits while no engine is ready or sleeps, ``max_seconds`` the
    longest wait for capacity in all; neither counts for what is best effort. Each model's queue has ``bounds``.
    """

    hold_timeout: float = 10.0
    max_seconds: float = 60.0
    bounds: QueueBounds = field(default_factory=QueueBounds)


@dataclass(slots=True)
class _Waiter:
    """One request in the queue, since ``since`` seconds of the clock. ``admitted`` is done once the request may be
    dispatched, or has the error that ended its wait.
    """

    request: QueuedRequest
    since: float
    admitted: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = None


class AdmissionQueue:
    """The queue in front of all engines, fair between tenants: one ``FairQueue`` for each of ``models``, from which
    requests are admitted while the engines have capacity. ``on_queued`` is called with the id of each request that
    comes, whether it has to wait or not, and ``on_waiting`` when one has to wait.
    """

    def __init__(
        self,
        models: Iterable[str],
        capacity: Capacity,
        tenants: Tenants | None = None,
        settings: QueueSettings | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        settings, tenants = settings or QueueSettings(), Tenants() if tenants is None else tenants
        self._queues = {model: _ModelQueue(model, capacity, tenants, settings, clock) for model in models}
        self._closed = self._notified = False
        self.on_queued: Callable[[str], None] = lambda _: None
        self.on_waiting: Callable[[], None] = lambda: None

    async def acquire(self, request: QueuedRequest) -> None:
        """Returns when the request may be placed: at once if none waits and an engine has capacity.

        The caller must dispatch before it waits for anything else, because the capacity is not kept. Await this in the
        task that dispatches: an admission that is handed from task to task comes too late to be counted before the
        next one is given. May be cancelled. Raises ``QuireError``: OVERLOADED when the queue is full or no engine
        had capacity in time, UNAVAILABLE when no engine became ready in time or the router shuts down, DEADLINE when
        the request's deadline has passed.
        """
        with counting_refusals():
            if self._closed:
                raise shutting_down()
            self.on_queued(request.request_id)  # in the same step of the loop it is counted in the queue
            await self._queues[request.model].acquire(request, self.on_waiting)

    def notify_capacity(self) -> None:
        """There may be capacity now: a stream has ended, or an engine is ready. Never waits, and admits nothing before
        the event loop runs again: the caller may be in the middle of a choice, of this queue or of an engine.
        """
        if not self._notified:
            self._notified = True
            asyncio.get_running_loop().call_soon(self._admit_next)

    def _admit_next(self) -> None:
        self._notified = False
        for queue in self._queues.values():
            queue.admit_next()

    def waiting(self, model: str) -> int:
        """Returns how many requests of the model wait, without those that are best effort."""
        return len(self._queues[model])

    def waiting_of_all_classes(self, model: str) -> int:
        """Returns how many requests of the model wait, with those that are best effort."""
        return self._queues[model].num_waiting

    def abandon(self, request_id: str) -> bool:
        """Ends the wait of a request: its ``acquire`` returns at once, although there may be no capacity. For requests
        that are interrupted, and look for the reason themselves. Returns False if the request does not wait.
        """
        return any(queue.abandon(request_id) for queue in self._queues.values())

    def close(self) -> None:
        """Ends every wait: all requests that wait, and all that come later, get UNAVAILABLE."""
        self._closed = True
        for queue in self._queues.values():
            queue.close()


class _ModelQueue:
    """The queue of one model.

    One request is admitted at a time. It is ``_admitting`` until its task has run on to its next wait: only then has it
    dispatched, and only then does ``has_capacity`` count it.
    """

    def __init__(
        self, model: str, capacity: Capacity, tenants: Tenants, settings: QueueSettings, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._capacity = capacity
        self._settings = settings
        self._clock = clock
        self._queue = FairQueue(tenants, settings.bounds)
        self._best_effort = FairQueue(tenants, QueueBounds(_MAX_BEST_EFFORT, settings.bounds.max_bytes))
        self._waiters: dict[str, _Waiter] = {}
        self._admitting: _Waiter | None = None
        self._unready_since: float | None = None

    def __len__(self) -> int:
        return len(self._waiters) - len(self._best_effort)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, request: QueuedRequest, on_waiting: Callable[[], None]) -> None:
        queue = self._queue_of(request)
        ahead = self._queue if queue is self._queue else self._waiters
        if not ahead and self._admitting is None and self._has_capacity_for(request):
            queue.charge(request, self._clock())
            return
        with self._enqueued(request) as waiter:
            self.admit_next()  # there may be capacity, with only one admission in progress before this one
            if not waiter.admitted.done():
                on_waiting()
            try:
                await waiter.admitted
            except asyncio.CancelledError:
                if self._admitting is waiter:
                    queue.refund(request)
                raise

    def admit_next(self) -> None:
        """Admits the next request if there is capacity for it."""
        while self._admitting is None and (queue := self._queue or self._best_effort):
            if not self._has_capacity_for(queue.peek()):
                self._update_readiness()
                return
            request = queue.pop(self._clock())
            waiter = self._waiters[request.request_id]
            if waiter.admitted.done():  # its task was cancelled and has not run since
                queue.refund(request)
            else:
                self._admitting = waiter
                waiter.admitted.set_result(None)

    def _queue_of(self, request: QueuedRequest) -> FairQueue:
        return self._best_effort if request.best_effort else self._queue

    def _has_capacity_for(self, request: QueuedRequest) -> bool:
        """A tenant that is ahead of the others gets spare capacity only, so that they need not wait for its work."""
        if request.best_effort:
            return self._capacity.has_best_effort_capacity(self._model)
        is_ahead = self._queue.is_ahead(request.tenant, self._clock())
        return self._capacity.has_spare_capacity(self._model) if is_ahead else self._capacity.has_capacity(self._model)

    def abandon(self, request_id: str) -> bool:
        waiter = self._waiters.get(request_id)
        if waiter is None or not self._queue_of(waiter.request).remove(request_id) or waiter.admitted.done():
            return False
        waiter.admitted.set_result(None)
        return True

    def close(self) -> None:
        for waiter in list(self._waiters.values()):
            self._refuse(waiter, shutting_down())

    @contextmanager
    def _enqueued(self, request: QueuedRequest) -> Iterator[_Waiter]:
        """The request is in the queue inside this context; on every way out it is removed, and the next is admitted."""
        refused = self._queue_of(request).add(request)
        waiter = _Waiter(request, self._clock(), asyncio.get_running_loop().create_future())
        self._waiters[request.request_id] = waiter
        for each in refused:
            _fail(self._waiters[each.request_id], queue_full(RefusalReason.QUEUE_FULL))
        self._check_timeout(waiter)
        counted = 0 if request.best_effort else 1
        metrics.PARKED.labels(self._model).inc(counted)
        try:
            yield waiter
        finally:
            metrics.PARKED.labels(self._model).dec(counted)
            if counted:
                metrics.QUEUE_SECONDS.labels(self._model).observe(self._clock() - waiter.since)
            self._dequeue(waiter)

    def _dequeue(self, waiter: _Waiter) -> None:
        del self._waiters[waiter.request.request_id]
        self._queue_of(waiter.request).remove(waiter.request.request_id)
        if waiter.timer is not None:
            waiter.timer.cancel()
        if self._admitting is waiter:
            # This task runs on, and dispatches, before the loop runs what is scheduled by call_soon. If it was
            # cancelled instead, the next request is admitted in the same way.
            asyncio.get_running_loop().call_soon(self._admit_after, waiter)

    def _admit_after(self, waiter: _Waiter) -> None:
        if self._admitting is waiter:
            self._admitting = None
        self.admit_next()

    def _update_readiness(self) -> None:
        # A sleeper that shares its device waits for its turn, which may take long: it is there, but has no room.
        if self._capacity.ready(self._model) or self._capacity.num_sleeping(self._model):
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = self._clock()

    def _check_timeout(self, waiter: _Waiter) -> None:
        """Ends the wait if it has lasted long enough; otherwise sets a timer for when it may have."""
        if waiter.admitted.done():
            return
        self._update_readiness()
        error, then = self._check_overdue(waiter, self._clock())
        if error is not None:
            self._refuse(waiter, error)
        elif then < inf:
            delay = max(0.0, then - self._clock())
            waiter.timer = asyncio.get_running_loop().call_later(delay, self._check_timeout, waiter)

    def _check_overdue(self, waiter: _Waiter, now: float) -> tuple[QuireError | None, float]:
        """Returns the error of a request that has waited long enough, or None and the earliest time at which it has."""
        settings, deadline = self._settings, waiter.request.deadline
        last = waiter.since + settings.max_seconds
        unready = self._unready_since
        hold_until = (now if unready is None else max(waiter.since, unready)) + settings.hold_timeout
        if deadline is not None and deadline <= now:
            return deadline_in_queue(), now
        if waiter.request.best_effort:
            return None, inf if deadline is None else deadline
        if min(last, hold_until) <= now:
            name = waiter.request.served_name or self._model
            return (no_capacity(settings.max_seconds) if unready is None else none_ready_in_queue(name)), now
        return None, min(last, hold_until, last if deadline is None else deadline)

    def _refuse(self, waiter: _Waiter, error: QuireError) -> None:
        if self._queue_of(waiter.request).remove(waiter.request.request_id):
            _fail(waiter, error)


def _fail(waiter: _Waiter, error: QuireError) -> None:
    if not waiter.admitted.done():
        waiter.admitted.set_exception(error)
