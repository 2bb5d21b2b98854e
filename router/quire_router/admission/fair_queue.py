"""One queue, fair between tenants and bounded. Pure: the caller passes the time, and nothing waits.

The order is start-time fair queueing: P. Goyal, H. M. Vin, H. Cheng, "Start-Time Fair Queueing: A Scheduling Algorithm
for Integrated Services Packet Switching Networks", SIGCOMM 1996. It is fair whatever the speed of the server, which
suits engines whose speed is not known. A tenant that waits has a start tag, the virtual time at which its next request
may begin; the smallest goes first, and pays for it with its tokens divided by its weight.

Beyond that, a tenant that comes back begins a little before the virtual time, by a bounded credit, as sleepers do in
K. J. Duda, D. R. Cheriton, "Borrowed-virtual-time (BVT) scheduling", SOSP 1999: without it, the burst of a tenant that
stays below its share in the long run would queue behind another one's flood, request by request.

The same tags show which tenant is ahead of the others by more than that credit. What such a tenant sends to the engines
delays the others' next requests, and no order here can change that any more.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from quire_proto.priority import BEST_EFFORT

from quire_router.admission.tenants import Tenants
from quire_router.core.errors import RefusalReason, queue_full, tenant_queue_full
from quire_router.core.generation import PROMPT_SEPARATOR

Name = TypeVar("Name", bound=Hashable)

CREDIT = 32_768
"""Tokens, at weight 1, that a tenant which left its share to others may have before them when it comes back."""

TURN_TTL = 30.0
"""Seconds for which a tenant's last turn counts."""
_MAX_STALE = 16  # stale entries that are not worth a sweep


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits for capacity.

    ``tokens`` is what it may cost an engine: its prompt and the maximum output of all choices. ``bytes`` is the memory
    that it takes in this process. Within one tenant, a smaller ``priority`` goes first. ``deadline`` is in seconds of
    the monotonic clock. Errors call the model by its ``served_name``, if it has another one for the client.
    """

    request_id: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    priority: int = 0
    deadline: float | None = None
    served_name: str = ""

    @property
    def best_effort(self) -> bool:
        """Whether it goes behind all that are not."""
        return self.priority == BEST_EFFORT

    @property
    def list_id(self) -> str:
        """The id of the request that it is a prompt of, or its own."""
        return self.request_id.partition(PROMPT_SEPARATOR)[0]


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most that may wait in one queue: requests, and the bytes that they take in memory. A list of prompts that is
    the only request in the queue, or its tenant's only one, may have any number.
    """

    max_requests: int = 512
    max_bytes: int = 256 * 2**20


class FairQueue:
    """Requests that wait for one model, and which tenants had a turn lately. Every change costs O(log n). Times are in
    seconds of any clock, and never go back.

    While two tenants wait, the tokens of each that were served, divided by its weight, differ by at most the largest
    request of each divided by its weight, and ``credit``. Within a tenant the smaller priority goes first, and of equal
    ones the earlier request.
    """

    def __init__(self, tenants: Tenants, bounds: QueueBounds, *, credit: float = CREDIT) -> None:
        self._tenants = tenants
        self._bounds = bounds
        self._credit = credit
        self._waiting: dict[str, QueuedRequest] = {}
        self._backlogs: dict[str, _Backlog] = {}
        self._start_tags: LazyHeap[str] = LazyHeap()
        self._last_turns: dict[str, float] = {}  # the oldest first
        self._finish_tags: LazyHeap[str] = LazyHeap()  # of the same tenants
        self._most_requests: LazyHeap[str] = LazyHeap()
        self._most_bytes: LazyHeap[str] = LazyHeap()
        self._lists: Counter[str] = Counter()
        self._virtual_time = 0.0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def bytes(self) -> int:
        """Bytes of memory that all waiting requests take."""
        return self._bytes

    def add(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Adds a request, whose id is not in use. Returns those that were dropped for it: if the queue is full, the
        newest of the tenant with the most for its weight, as long as that is more than the new request's tenant has.
        Raises ``QuireError`` OVERLOADED when the new request is refused; then nothing has changed.
        """
        assert request.request_id not in self._waiting
        self._check(request)
        self._insert(request)
        dropped: list[QueuedRequest] = []
        while (reason := self._exceeded_bound()) is not None:
            largest = self._find_largest(reason, request.tenant)
            if largest is None:
                self.remove(request.request_id)
                for each in reversed(dropped):
                    self._insert(each)
                raise queue_full(reason)
            dropped.append(self._drop_newest(largest))
        return dropped

    def peek(self) -> QueuedRequest:
        """Returns the next request; there must be one."""
        backlog = self._backlogs[self._start_tags.first()]
        return backlog.requests[backlog.order.first()]

    def pop(self, now: float) -> QueuedRequest:
        """Removes and returns the next request, and charges its tenant for it; there must be one."""
        request = self.peek()
        self.charge(request, now)
        self.remove(request.request_id)
        return request

    def charge(self, request: QueuedRequest, now: float) -> None:
        """Charges a tenant for a request that is admitted, which need not have waited."""
        name, start = request.tenant, self._start_tag(request.tenant)
        self._virtual_time = max(self._virtual_time, start)
        finish = start + request.tokens / self._tenants[name].weight
        if name in self._backlogs:
            self._start_tags.put(name, finish)
        self._finish_tags.put(name, finish)
        self._last_turns.pop(name, None)
        self._last_turns[name] = now

    def refund(self, request: QueuedRequest) -> None:
        """Takes back the charge for a request that was admitted and did not run."""
        name = request.tenant
        if name in self._finish_tags:
            finish = self._finish_tags.key(name) - request.tokens / self._tenants[name].weight
            self._finish_tags.put(name, finish)
            if name in self._start_tags:
                self._start_tags.put(name, finish)

    def is_ahead(self, tenant_id: str, now: float) -> bool:
        """Returns whether a tenant was served more for its weight than another one that had a turn lately, by more than
        the credit that this one has when it comes back.
        """
        self._expire_turns(now - TURN_TTL)
        start = self._start_tag(tenant_id)
        if start <= self._virtual_time or not self._finish_tags:
            return False
        return bool(self._finish_tags.key(self._finish_tags.first()) < start - self._credit)

    def remove(self, request_id: str) -> bool:
        """Removes a request. Returns False if it does not wait."""
        request = self._waiting.get(request_id)
        if request is None:
            return False
        backlog = self._backlogs[request.tenant]
        del backlog.requests[request_id]
        self._unlink(backlog, request)
        return True

    def _check(self, request: QueuedRequest) -> None:
        tenant = self._tenants[request.tenant]
        backlog = self._backlogs.get(request.tenant)
        full = tenant.max_queued is not None and backlog is not None and len(backlog.requests) >= tenant.max_queued
        if full and backlog is not None and backlog.lists.keys() != {request.list_id}:
            raise tenant_queue_full(tenant.max_queued or 0)
        if request.bytes > self._bounds.max_bytes:
            raise queue_full(RefusalReason.QUEUE_BYTES)

    def _insert(self, request: QueuedRequest) -> None:
        backlog = self._backlogs.get(request.tenant)
        if backlog is None:
            backlog = self._backlogs[request.tenant] = _Backlog(request.tenant)
            self._start_tags.put(request.tenant, self._start_tag(request.tenant))
        self._waiting[request.request_id] = request
        self._lists[request.list_id] += 1
        backlog.requests[request.request_id] = request
        backlog.lists[request.list_id] += 1
        backlog.order.put(request.request_id, request.priority)
        self._update_sizes(backlog, request.bytes)

    def _start_tag(self, tenant_id: str) -> float:
        """Returns the start tag of a tenant: the virtual time at which its next request may begin."""
        if tenant_id in self._start_tags:
            return float(self._start_tags.key(tenant_id))
        earliest = self._virtual_time - self._credit
        return max(earliest, self._finish_tags.key(tenant_id)) if tenant_id in self._finish_tags else earliest

    def _expire_turns(self, then: float) -> None:
        while self._last_turns and self._last_turns[oldest := next(iter(self._last_turns))] < then:
            del self._last_turns[oldest]
            self._finish_tags.discard(oldest)

    def _unlink(self, backlog: "_Backlog", request: QueuedRequest) -> None:
        del self._waiting[request.request_id]
        for lists in (self._lists, backlog.lists):
            lists[request.list_id] -= 1
            if not lists[request.list_id]:
                del lists[request.list_id]
        backlog.order.discard(request.request_id)
        self._update_sizes(backlog, -request.bytes)

    def _update_sizes(self, backlog: "_Backlog", added_bytes: int) -> None:
        """Updates the sizes of a backlog that changed by ``added_bytes``, and deletes it if it is empty."""
        name = backlog.tenant
        weight = self._tenants[name].weight
        backlog.bytes += added_bytes
        self._bytes += added_bytes
        if backlog.requests:
            self._most_requests.put(name, -len(backlog.requests) / weight)
            self._most_bytes.put(name, -backlog.bytes / weight)
            return
        del self._backlogs[name]
        for heap in (self._start_tags, self._most_requests, self._most_bytes):
            heap.discard(name)

    def _exceeded_bound(self) -> RefusalReason | None:
        """Returns which bound is exceeded, None if none is."""
        if len(self._lists) <= 1:
            return None
        if len(self._waiting) > self._bounds.max_requests:
            return RefusalReason.QUEUE_FULL
        return RefusalReason.QUEUE_BYTES if self._bytes > self._bounds.max_bytes else None

    def _find_largest(self, reason: RefusalReason, newcomer: str) -> "_Backlog | None":
        """Returns the tenant with the most for its weight, None if none has more than that of the new request."""
        heap = self._most_requests if reason is RefusalReason.QUEUE_FULL else self._most_bytes
        largest = heap.first()
        return self._backlogs[largest] if heap.key(largest) < heap.key(newcomer) else None

    def _drop_newest(self, backlog: "_Backlog") -> QueuedRequest:
        _, request = backlog.requests.popitem()
        self._unlink(backlog, request)
        return request


class LazyHeap(Generic[Name]):
    """A heap whose entries can be moved and removed by name: names by their keys, smallest first and the earliest of
    equals. Every change costs O(log n), amortised: a stale entry stays in the heap until it comes to the top, or until
    more entries are stale than valid.
    """

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
        """Removes ``name`` if it is there."""
        if self._keys.pop(name, None) is not None:
            self._sweep()

    def key(self, name: Name) -> Any:
        """Returns the key of a name, which must be there."""
        return self._keys[name][0]

    def first(self) -> Name:
        """Returns the name with the smallest key; there must be one."""
        while True:
            key, number, name = self._heap[0]
            if self._keys.get(name) == (key, number):
                return name
            heappop(self._heap)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _MAX_STALE:
            self._heap = [(key, number, name) for name, (key, number) in self._keys.items()]
            heapify(self._heap)


@dataclass(slots=True)
class _Backlog:
    """The waiting requests of one tenant: ``requests`` as they came, ``order`` as they are taken."""

    tenant: str
    requests: dict[str, QueuedRequest] = field(default_factory=dict)
    order: LazyHeap[str] = field(default_factory=LazyHeap)
    lists: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
