"""What is to be written to a journal's database: coalesced per request, and bounded. Does no I/O."""

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from time import time
from zlib import crc32

from quire_proto.sampling import FinishReason

from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.usage import MAX_COUNTED_AGE, Account, used
from quire_router.journal.base import MAX_LOG_VALUES, AnyDelta, Lease
from quire_router.journal.codec import pack_tokens
from quire_router.journal.token_log import TokenLog

MAX_TOKENS_PER_WRITE = 65_536


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended."""

    reason: FinishReason
    error: str = ""
    usage: Usage = NO_USAGE


@dataclass(slots=True)
class BufferedRequest:
    """One request that runs, or that has ended or was released and is not written yet.

    It holds the whole record, not only what is new, so that it can be written again to a database that lost it: the
    token log, at 4 bytes a token, and the request with its prompt as it came. The database is known to have the first
    ``num_stored`` values of ``log``, with ``checksum``. The lease was last renewed at ``renewed`` (the loop's time).
    It is ``refused`` if the database did not take it when it was to be ``opened`` at once, and ``rewritten`` if the
    database lost it. ``version`` is the model's that the log is of. ``usage`` is what it had used when it was finished
    or released, at ``closed_at`` (s after 1970). Once ``end_stored``, the database has its end. Nothing is written of
    one that is ``deleted``.
    """

    generation: GenerationRequest
    lease: Lease
    log: TokenLog = field(init=False)
    opened: bool = False
    refused: bool = False
    num_stored: int = 0
    checksum: int = 0
    renewed: float = 0.0
    end: RequestEnd | None = None
    released: bool = False
    cancelled: bool = False
    rewritten: bool = False
    usage: Usage = NO_USAGE
    closed_at: float | None = None
    version: ModelVersion = UNKNOWN_VERSION
    end_stored: bool = False
    deleted: bool = False

    def __post_init__(self) -> None:
        self.log = TokenLog(self.generation.params.n)

    def close(self, usage: Usage) -> None:
        """Its router is done with it, and knows that it used so much."""
        self.usage, self.closed_at = usage, time()

    @property
    def used(self) -> Usage:
        """What is to be counted of it, when it is closed."""
        return used(self.usage, len(self.generation.prompt_token_ids), self.log.num_tokens)

    @property
    def is_countable(self) -> bool:
        """Whether it is known for sure what was counted of it: a database that answers after hours may have counted it
        and forgotten that. By the wall clock, as another one stands still while the machine sleeps.
        """
        begun = self.generation.created if self.rewritten else self.closed_at
        return begun is None or time() - begun < MAX_COUNTED_AGE

    @property
    def is_writable(self) -> bool:
        """Whether it may still be written to: it was neither finished nor released."""
        return self.end is None and not self.released

    @property
    def log_length(self) -> int:
        """Values in the token log."""
        return len(self.log.values)

    @property
    def num_unwritten(self) -> int:
        """Values that are to be written, with those of the request until the record is opened."""
        return self.log_length - self.num_stored + (0 if self.opened else self.generation.stored_size)


@dataclass(slots=True)  # a frozen one takes longer to make, and there is one for each flush and stream
class BufferedWrite:
    """What one flush writes of a request, fixed at its start: the request may grow while the database works.

    ``packed`` is its log from ``start`` to ``stop`` (in values), ``checksum`` that of the log up to ``stop``.
    ``num_tokens`` are those of the whole log, None if there is more to write.
    """

    request: BufferedRequest
    opens: bool
    start: int
    stop: int
    packed: bytes
    checksum: int
    num_tokens: int | None
    end: RequestEnd | None
    releases: bool

    @property
    def version(self) -> str:
        """The version of the model, which is written with the beginning of the log; else empty."""
        return "" if self.start or not self.packed else str(self.request.version)


@dataclass(frozen=True, slots=True)
class DroppedUsage:
    """What a request used that was dropped, and whose end is in no record."""

    lease: Lease
    account: Account
    usage: Usage


class WriteBuffer:
    """The buffered requests, and which of them are dirty: have something to write.

    At most ``max_requests`` requests and ``max_tokens`` unwritten tokens are kept; what goes beyond is dropped, whole
    requests at a time, so that a record in the database is always a prefix of what was sent. What dropped requests used
    is in ``dropped`` until it is counted, of ``max_requests`` of them at most. ``uncounted`` are requests that run
    without a record, by their leases. A request is urgent while somebody waits until it is written.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests: dict[str, BufferedRequest] = {}
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._num_unwritten = 0
        self._became_dirty = asyncio.Event()
        self._urgent: dict[str, None] = {}
        self._became_urgent = asyncio.Event()
        self.dropped: deque[DroppedUsage] = deque()
        self.uncounted: dict[Lease, GenerationRequest] = {}

    def __len__(self) -> int:
        """How many requests are dirty, or dropped and not counted."""
        return len(self._dirty) + len(self.dropped)

    def get(self, request_id: str) -> BufferedRequest | None:
        """The request of this id; None if it is not buffered."""
        return self._requests.get(request_id)

    @property
    def is_full(self) -> bool:
        """Whether no other request can be added."""
        return len(self._requests) >= self._max_requests

    def has_capacity(self, request: BufferedRequest) -> bool:
        """Whether the request is small enough to be kept, by itself and beside what is here."""
        fits = not self.is_full and self._num_unwritten + request.num_unwritten <= self._max_tokens
        return fits and request.generation.is_storable

    def add(self, request: BufferedRequest) -> bool:
        """Adds a request; False if there is no capacity for it, or one of its id is here already."""
        if not self.has_capacity(request) or request.lease.request_id in self._requests:
            return False
        self._requests[request.lease.request_id] = request
        self._num_unwritten += request.num_unwritten
        self.mark_dirty(request)
        return True

    def append(self, request: BufferedRequest, position: int, delta: AnyDelta) -> bool:
        """Adds what is new of a delta; removes the request and returns False if there is no capacity for it."""
        return self._on_appended(request, request.log.append(position, delta))

    def append_token(self, request: BufferedRequest, index: int, position: int, token_id: int) -> bool:
        """As ``append`` of a delta that is one token of choice ``index``."""
        return self._on_appended(request, request.log.append_token(index, position, token_id))

    def _on_appended(self, request: BufferedRequest, added: int) -> bool:
        self._num_unwritten += added
        if self._num_unwritten > self._max_tokens or request.log_length > MAX_LOG_VALUES:
            self.remove(request)
            return False
        if added:
            self.mark_dirty(request)
        return True

    def mark_dirty(self, request: BufferedRequest) -> None:
        """Marks the request as having something to write, or a lease to renew."""
        if request.lease.request_id not in self._dirty and not request.deleted:
            self._dirty[request.lease.request_id] = None
            self._became_dirty.set()

    def mark_urgent(self, request: BufferedRequest) -> None:
        """Has the request written at once, before the others that are dirty."""
        if self.contains(request) and not request.deleted:
            self.mark_dirty(request)
            self._dirty.move_to_end(request.lease.request_id, last=False)
            self._urgent[request.lease.request_id] = None
            self._became_urgent.set()

    async def wait_urgent(self, until: float) -> bool:
        """Waits until a request is urgent, or until this loop's time; returns whether one is."""
        self._became_urgent.clear()
        if not self._urgent:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._became_urgent.wait()
        return bool(self._urgent)

    def mark_unrenewed_dirty(self, than: float) -> None:
        """Marks every request whose lease was last renewed before ``than``."""
        for request in self._requests.values():
            if request.renewed < than:
                self.mark_dirty(request)

    def contains(self, request: BufferedRequest) -> bool:
        """Whether this request is still buffered, and not another one of its id."""
        return self._requests.get(request.lease.request_id) is request

    def remove(self, request: BufferedRequest) -> None:
        """Removes the request; does nothing if it was removed."""
        if self.contains(request):
            self._num_unwritten -= request.num_unwritten
            del self._requests[request.lease.request_id]
            self._dirty.pop(request.lease.request_id, None)
            self._urgent.pop(request.lease.request_id, None)

    def withhold(self, request: BufferedRequest) -> None:
        """Writes nothing more of a request that is being deleted."""
        request.deleted = True
        self._dirty.pop(request.lease.request_id, None)
        self._urgent.pop(request.lease.request_id, None)

    def resume(self, request: BufferedRequest) -> None:
        """Writes a request again that could not be deleted."""
        request.deleted = False
        if self.contains(request):
            self.mark_dirty(request)

    def forget(self, request: BufferedRequest) -> None:
        """Removes a request that was deleted. What it used is counted, once that is known."""
        if not self.contains(request):
            return
        self.remove(request)
        if request.closed_at is None:
            self.uncounted[request.lease] = request.generation
        elif request.used != NO_USAGE:
            self.add_dropped(DroppedUsage(request.lease, Account.of(request.generation), request.used))

    def add_dropped(self, dropped: DroppedUsage) -> bool:
        """Has the usage of a dropped request counted; False if there is no capacity for it."""
        if len(self.dropped) >= self._max_requests:
            return False
        self.dropped.append(dropped)
        self._became_dirty.set()
        return True

    async def wait_dirty(self) -> None:
        """Waits until a request is dirty, or dropped and not counted."""
        while not len(self):
            self._became_dirty.clear()
            await self._became_dirty.wait()

    def next_writes(self, count: int, *, urgent: bool = False) -> list[BufferedWrite]:
        """What to write of the ``count`` requests that have been dirty longest, or of those that are ``urgent``."""
        names = islice(self._urgent if urgent else self._dirty, count)
        return [_next_write(self._requests[request_id]) for request_id in names]

    def mark_stored(self, write: BufferedWrite, now: float) -> None:
        """The database has what was written, at the loop's time ``now``."""
        request = write.request
        if not self.contains(request):
            return  # it was removed in the meantime
        self._num_unwritten -= request.num_unwritten
        request.opened, request.renewed = True, now
        request.num_stored, request.checksum = write.stop, write.checksum
        self._num_unwritten += request.num_unwritten
        if write.end is not None or (write.releases and request.end is None):  # else it was cancelled in the meantime
            self.remove(request)
        elif request.num_stored == request.log_length and request.is_writable:
            self._dirty.pop(request.lease.request_id, None)
            self._urgent.pop(request.lease.request_id, None)
        elif request.lease.request_id in self._dirty:
            self._dirty.move_to_end(request.lease.request_id, last=request.lease.request_id not in self._urgent)

    def mark_lost(self, request: BufferedRequest) -> None:
        """The database lost the record: everything is to be written again."""
        if self.contains(request):
            self._num_unwritten -= request.num_unwritten
            request.opened, request.num_stored, request.checksum = False, 0, 0
            request.rewritten = True
            self._num_unwritten += request.num_unwritten
            self.mark_dirty(request)


def _next_write(request: BufferedRequest) -> BufferedWrite:
    stop = min(request.log_length, request.num_stored + MAX_TOKENS_PER_WRITE)
    whole = stop == request.log_length
    end = request.end if whole else None
    packed = pack_tokens(request.log.values[request.num_stored : stop])
    checksum = crc32(packed, request.checksum)
    releases = whole and request.released and end is None
    num_tokens = request.log.num_tokens if whole else None
    return BufferedWrite(
        request, not request.opened, request.num_stored, stop, packed, checksum, num_tokens, end, releases
    )
