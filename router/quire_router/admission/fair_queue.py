"""Whose turn it is: one queue, fair between tenants and bounded. Pure: has no clock and waits for nothing.

The order is start-time fair queueing: P. Goyal, H. M. Vin, H. Cheng, "Start-Time Fair Queueing: A Scheduling Algorithm
for Integrated Services Packet Switching Networks", SIGCOMM 1996. It is fair whatever the speed of the server, which
suits a fleet whose speed nobody knows. A tenant that waits has a start tag, the virtual time at which its next request
may begin; the smallest goes first, and pays for it with its tokens divided by its weight.

Beyond that, a tenant that comes back begins a little before the virtual time, by a bounded credit, as sleepers do in
K. J. Duda, D. R. Cheriton, "Borrowed-virtual-time (BVT) scheduling", SOSP 1999: without it, the burst of a tenant that
stays below its share in the long run would queue behind another one's flood, request by request.

The same tags tell who is ahead of the others by more than that credit. What such a tenant sends to the engines lies in
the way of the others' next requests, and no order here can change that any more.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.tenants import Tenant, Tenants
from quire_router.core.errors import RefusalReason

# A heap whose entries can be moved and taken out by name: what is out of date stays in it until it comes to the top, or
# until there is more of it than of the rest.


Name = TypeVar("Name", bound=Hashable)
_SPARE = 16  # entries out of date that are not worth a sweep


class LazyHeap(Generic[Name]):
    """Names by their keys, smallest first and the earliest of equals; every change costs O(log n), amortised."""

    def __init__(self) -> None:
        self._keys: dict[Name, tuple[Any, int]] = {}
        self._heap: list[tuple[Any, int, Name]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: Name) -> bool:
        return name in self._keys

    def put(self, name: Name, key: Any) -> None:
        """Adds ``name``, or gives it another key. Keys are numbers or tuples of them."""
        number = next(self._numbers)
        self._keys[name] = (key, number)
        heappush(self._heap, (key, number, name))
        self._sweep()

    def discard(self, name: Name) -> None:
        """Takes ``name`` out if it is there."""
        if self._keys.pop(name, None) is not None:
            self._sweep()

    def key(self, name: Name) -> Any:
        """The key of a name that is there."""
        return self._keys[name][0]

    def first(self) -> Name:
        """The name with the smallest key; there must be one."""
        while True:
            key, number, name = self._heap[0]
            if self._keys.get(name) == (key, number):
                return name
            heappop(self._heap)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _SPARE:
            self._heap = [(key, number, name) for name, (key, number) in self._keys.items()]
            heapify(self._heap)


# A request that waits for capacity.


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request that wants to run.

    ``tokens`` is what it may cost an engine: its prompt and the maximum output of all choices. ``bytes`` is the memory
    that it takes in this process. Within one tenant, a smaller ``priority`` goes first. ``deadline`` is in seconds of
    the monotonic clock.
    """

    request_id: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    priority: int = 0
    deadline: float | None = None


RETRY_FULL = 1.0  # seconds
CREDIT = 32_768
"""Tokens, at weight 1, that a tenant which left its share to others may have before them when it comes back."""
MEMORY = 30.0
"""Seconds after its last turn in which a tenant is not forgotten."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most that may wait in one queue: requests, and bytes that holding them takes."""

    max_requests: int = 512
    max_bytes: int = 256 * 2**20


@dataclass(slots=True)
class _Backlog:
    """What waits of one tenant: ``requests`` as they came, ``order`` as they go."""

    tenant: Tenant
    requests: dict[str, QueuedRequest] = field(default_factory=dict)
    order: LazyHeap[str] = field(default_factory=LazyHeap)
    bytes: int = 0


class FairQueue:
    """Requests that wait for one model, and whose turn it was lately. Every change costs O(log n). Times are in seconds
    of any clock, and never go back.

    While two tenants wait, the tokens that each was given, divided by its weight, differ by at most the largest request
    of each divided by its weight, and ``credit``. Within a tenant the smaller priority goes first, then who came first.
    """

    def __init__(self, tenants: Tenants, bounds: QueueBounds, *, credit: float = CREDIT) -> None:
        self._tenants = tenants
        self._bounds = bounds
        self._credit = credit
        self._waiting: dict[str, QueuedRequest] = {}
        self._backlogs: dict[str, _Backlog] = {}
        self._starts: LazyHeap[str] = LazyHeap()
        self._last_turns: dict[str, float] = {}  # the oldest first
        self._finishes: LazyHeap[str] = LazyHeap()  # of the same tenants
        self._most_requests: LazyHeap[str] = LazyHeap()
        self._most_bytes: LazyHeap[str] = LazyHeap()
        self._time = 0.0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def bytes(self) -> int:
        """What holding all that waits takes."""
        return self._bytes

    def add(self, waiting: QueuedRequest) -> list[QueuedRequest]:
        """Lets a request wait, whose id is not in use. Returns those that had to give way: where the queue is full,
        the newest of the tenant with the most for its weight, as long as that is more than the newcomer's has. Raises
        ``QuireError`` OVERLOADED when the newcomer is refused; then nothing has changed.
        """
        assert waiting.request_id not in self._waiting
        self._check(waiting)
        self._insert(waiting)
        gone: list[QueuedRequest] = []
        while (reason := self._excess()) is not None:
            largest = self._largest(reason, waiting.tenant)
            if largest is None:
                self.remove(waiting.request_id)
                for each in reversed(gone):
                    self._insert(each)
                raise queue_full_error(reason)
            gone.append(self._drop_newest(largest))
        return gone

    def peek(self) -> QueuedRequest:
        """The request whose turn it is; there must be one that waits."""
        backlog = self._backlogs[self._starts.first()]
        return backlog.requests[backlog.order.first()]

    def pop(self, now: float) -> QueuedRequest:
        """Takes out the request whose turn it is, and gives it that; there must be one."""
        waiting = self.peek()
        self.charge(waiting, now)
        self.remove(waiting.request_id)
        return waiting

    def charge(self, waiting: QueuedRequest, now: float) -> None:
        """It is the turn of a request, which need not have waited: its tenant pays for it."""
        name, start = waiting.tenant, self._start(waiting.tenant)
        self._time = max(self._time, start)
        finish = start + waiting.tokens / self._tenants.get(name).weight
        if name in self._backlogs:
            self._starts.put(name, finish)
        self._finishes.put(name, finish)
        self._last_turns.pop(name, None)
        self._last_turns[name] = now

    def refund(self, waiting: QueuedRequest) -> None:
        """The request that was given its turn did not take it: its tenant does not pay for it."""
        name = waiting.tenant
        if name in self._finishes:
            finish = self._finishes.key(name) - waiting.tokens / self._tenants.get(name).weight
            self._finishes.put(name, finish)
            if name in self._starts:
                self._starts.put(name, finish)

    def is_ahead(self, tenant_id: str, now: float) -> bool:
        """Whether a tenant has had more for its weight than another one that had a turn lately, by more than the credit
        that this one has when it comes back.
        """
        self._forget_before(now - MEMORY)
        start = self._start(tenant_id)
        if start <= self._time or not self._finishes:
            return False
        return bool(self._finishes.key(self._finishes.first()) < start - self._credit)

    def remove(self, request_id: str) -> bool:
        """Takes out one request, wherever it stands; False when it does not wait."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        backlog = self._backlogs[waiting.tenant]
        del backlog.requests[request_id]
        self._forget(backlog, waiting)
        return True

    def _check(self, waiting: QueuedRequest) -> None:
        tenant = self._tenants.get(waiting.tenant)
        backlog = self._backlogs.get(waiting.tenant)
        if tenant.max_queued is not None and backlog is not None and len(backlog.requests) >= tenant.max_queued:
            raise max_queued_error(tenant.max_queued)
        if waiting.bytes > self._bounds.max_bytes:
            raise queue_full_error(RefusalReason.QUEUE_BYTES)

    def _insert(self, waiting: QueuedRequest) -> None:
        backlog = self._backlogs.get(waiting.tenant)
        if backlog is None:
            backlog = self._backlogs[waiting.tenant] = _Backlog(self._tenants.get(waiting.tenant))
            self._starts.put(waiting.tenant, self._start(waiting.tenant))
        self._waiting[waiting.request_id] = waiting
        backlog.requests[waiting.request_id] = waiting
        backlog.order.put(waiting.request_id, waiting.priority)
        self._count(backlog, waiting.bytes)

    def _start(self, tenant_id: str) -> float:
        """The tag of a tenant: when its next request may begin."""
        if tenant_id in self._starts:
            return float(self._starts.key(tenant_id))
        earliest = self._time - self._credit
        return max(earliest, self._finishes.key(tenant_id)) if tenant_id in self._finishes else earliest

    def _forget_before(self, then: float) -> None:
        while self._last_turns and self._last_turns[oldest := next(iter(self._last_turns))] < then:
            del self._last_turns[oldest]
            self._finishes.discard(oldest)

    def _forget(self, backlog: _Backlog, waiting: QueuedRequest) -> None:
        del self._waiting[waiting.request_id]
        backlog.order.discard(waiting.request_id)
        self._count(backlog, -waiting.bytes)

    def _count(self, backlog: _Backlog, more: int) -> None:
        """Notes that the backlog changed, by ``more`` bytes, and drops it when it is empty."""
        tenant, name = backlog.tenant, backlog.tenant.id
        backlog.bytes += more
        self._bytes += more
        if backlog.requests:
            self._most_requests.put(name, -len(backlog.requests) / tenant.weight)
            self._most_bytes.put(name, -backlog.bytes / tenant.weight)
            return
        del self._backlogs[name]
        for heap in (self._starts, self._most_requests, self._most_bytes):
            heap.discard(name)

    def _excess(self) -> RefusalReason | None:
        """Which bound is exceeded."""
        if len(self._waiting) > self._bounds.max_requests:
            return RefusalReason.QUEUE_FULL
        return RefusalReason.QUEUE_BYTES if self._bytes > self._bounds.max_bytes else None

    def _largest(self, reason: RefusalReason, newcomer: str) -> _Backlog | None:
        """Who has to give way to the tenant of a newcomer, which waits already; None when nobody has more than it."""
        heap = self._most_requests if reason is RefusalReason.QUEUE_FULL else self._most_bytes
        largest = heap.first()
        return self._backlogs[largest] if heap.key(largest) < heap.key(newcomer) else None

    def _drop_newest(self, backlog: _Backlog) -> QueuedRequest:
        _, waiting = backlog.requests.popitem()
        self._forget(backlog, waiting)
        return waiting


def queue_full_error(reason: RefusalReason) -> QuireError:
    """The refusal of a request for which the queue has no place."""
    message = "Too many requests wait for this model."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_FULL, reason=reason)


def max_queued_error(most: int) -> QuireError:
    """The refusal of a request of a tenant that may not let more of them wait."""
    message = f"{most} requests of yours wait for this model, which is the most you may have."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_FULL, reason=RefusalReason.MAX_QUEUED)
