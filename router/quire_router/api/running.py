"""Requests in progress: how many there may be, and how many bytes of their bodies."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.reason import RefusalReason
from quire_router.admission.refusals import counting_refusals
from quire_router.admission.stopping import shutting_down_error

BUSY_RETRY_AFTER = 1.0  # seconds
MAX_BODY_BYTES_HELD = 128 * 2**20  # bytes
INITIAL_RESERVATION = 4096  # of a body of which nothing has come


class ConcurrencyLimit:
    """The places for requests in progress, of both APIs: at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_progress = 0
        self._accepting = True
        self._draining = False

    def __len__(self) -> int:
        return self._in_progress

    @property
    def draining(self) -> bool:
        """Whether clients had better go elsewhere with what is new, even if it is still accepted."""
        return self._draining

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """A place for one request. Raises ``QuireError`` OVERLOADED or, when stopping, UNAVAILABLE."""
        self._check_accepting()
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1

    def start_draining(self) -> None:
        """Everybody is told from now on that this router leaves."""
        self._draining = True

    def close(self) -> None:
        """Refuses new requests from now on; those in progress go on."""
        self._draining, self._accepting = True, False

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise shutting_down_error()
        if self._in_progress >= self._limit:
            message = f"{self._limit} requests are in progress, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=BUSY_RETRY_AFTER)


class TenantBudget:
    """At most ``limit`` bytes or characters that all requests together hold. Where there are keys, one tenant has at
    most half of them. A request that is alone, in all or of its tenant, may hold any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """What is held now."""
        return self._tenants.total()

    def try_acquire(self, tenant: str, size: int, *, held: int = 0) -> bool:
        """Takes ``size`` more for a request of this tenant ("" without keys) that holds ``beside`` already; False, and
        takes nothing, where that is above the limit.
        """
        others, own = self.used - held, self._tenants[tenant] - held
        is_half_taken = bool(tenant and own) and own + held + size > self._limit // 2
        if is_half_taken or (others and others + held + size > self._limit):
            return False
        self._tenants[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Of what ``take`` took."""
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class BodyBudget:
    """The bytes of request bodies that are held at once, as in ``TenantBudget``. A body may be several times as large
    while it is parsed and tokenised.
    """

    def __init__(self, limit: int = MAX_BODY_BYTES_HELD) -> None:
        self._bytes = TenantBudget(limit)
        self._held: dict[str, list[ReservedBody]] = {}

    @property
    def used(self) -> int:
        """The bytes that are reserved now."""
        return self._bytes.used

    @contextmanager
    def reserve(self, tenant: str, size: int) -> Iterator["ReservedBody"]:
        """Room for a body of ``size`` bytes that are here, until the block ends or the request waits in the queue.
        Raises ``QuireError`` OVERLOADED.
        """
        with self.reserve_incoming(tenant, 0) as body:
            body.reserve(size)
            yield body

    @contextmanager
    def reserve_incoming(self, tenant: str, size: int) -> Iterator["ReservedBody"]:
        """As ``reserve`` for a body that comes, of ``size`` bytes as its sender states it; 0 where nothing is stated.
        There must be room for all of it. What is taken of that is little at first, and twice what has come of it then,
        so that a head which promises much keeps nobody out.
        """
        body = ReservedBody(self, tenant, size)
        try:
            body.reserve(size)
            body.shrink(size - INITIAL_RESERVATION)
            yield body
        finally:
            body.release()

    def release_queued(self, request_id: str) -> None:
        """The request waits in the queue, whose own bytes count from now on."""
        for body in self._held.pop(request_id, ()):
            body.release()

    def hold_until_queued(self, request_id: str, body: "ReservedBody") -> None:
        """``request_id`` is what the queue will know this body's request by."""
        self._held.setdefault(request_id, []).append(body)

    def stop_holding(self, request_id: str, body: "ReservedBody") -> None:
        """The request of this body does not come to the queue any more."""
        others = [each for each in self._held.pop(request_id, ()) if each is not body]
        if others:
            self._held[request_id] = others

    def acquire(self, tenant: str, size: int, *, held: int) -> None:
        """As ``TenantBudget.try_acquire``. Raises ``QuireError`` OVERLOADED."""
        if not self._bytes.try_acquire(tenant, size, held=held):
            message = "The bodies that are being read here take as much memory as this router gives them."
            with counting_refusals():
                raise QuireError(
                    ErrorCode.OVERLOADED, message, retry_after=BUSY_RETRY_AFTER, reason=RefusalReason.BODY_BYTES
                )

    def release(self, tenant: str, size: int) -> None:
        """What ``take`` took."""
        self._bytes.release(tenant, size)


class ReservedBody:
    """One request's body as it comes, and the bytes that are reserved for it."""

    def __init__(self, budget: BodyBudget, tenant: str, stated: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._stated = stated
        self._reserved = 0
        self._data = bytearray()
        self._request_id: str | None = None

    def __len__(self) -> int:
        return len(self._data)

    def reserve(self, size: int) -> None:
        """Makes what is reserved ``size`` bytes, if it is less. Raises ``QuireError`` OVERLOADED."""
        if size > self._reserved:
            self._budget.acquire(self._tenant, size - self._reserved, held=self._reserved)
            self._reserved = size

    def shrink(self, size: int) -> None:
        """Reserves ``size`` bytes less; none where that is negative."""
        size = max(0, size)
        self._budget.release(self._tenant, size)
        self._reserved -= size

    def append(self, data: bytes) -> None:
        """Some more of the body. Raises ``QuireError`` OVERLOADED where there is no room for it."""
        size = len(self._data) + len(data)
        self.reserve(max(size, min(self._stated, 2 * size + INITIAL_RESERVATION)))
        self._data += data

    def detach(self) -> bytearray:
        """All of the body, which is not kept here any longer."""
        data, self._data = self._data, bytearray()
        return data

    def hold_until_queued(self, request_id: str) -> None:
        """The body has been read and validated, as ``request_id``. What is reserved for it stays so until that waits in
        the queue.
        """
        self._request_id = request_id
        self._budget.hold_until_queued(request_id, self)

    def release(self) -> None:
        """Gives back what is reserved."""
        self.shrink(self._reserved)
        if self._request_id is not None:
            self._budget.stop_holding(self._request_id, self)
            self._request_id = None
