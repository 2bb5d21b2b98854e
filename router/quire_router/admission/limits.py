"""The limits of all tenants: what they may use, counted for the whole fleet where routers share a meter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Protocol, Self

from quire_proto.errors import QuireError, internal

from quire_router.admission.rate_limit import RateLimitStatus, TenantUsage
from quire_router.admission.tenants import Tenants
from quire_router.core import metrics

# Counting what admission refuses.


@contextmanager
def counting_refusals() -> Iterator[None]:
    """Counts an error that leaves the block by its reason."""
    try:
        yield
    except QuireError as error:
        if error.reason is not None:
            metrics.ADMISSION_REFUSALS.labels(error.reason).inc()
        raise


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """One request on its way in: ``request_cost`` and ``token_cost`` in microseconds of refilling, 0 without such a
    limit, and how many may be in progress at ``most``.
    """

    tenant: str
    request_id: str
    request_cost: int
    token_cost: int
    max_concurrent: int | None


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """How a tenant stands after a charge, or where it ``admitted`` nothing, as before: microseconds until its buckets
    are full, and its requests in progress. ``placed`` is whether the request was not among these before.
    """

    admitted: bool
    newly_running: bool
    request_debt: int
    token_debt: int
    running: int


class SharedRateLimiter(Protocol):
    """What tenants have used and have in progress, as all routers count it together. A request has one place among
    those in progress, whoever counts it.
    """

    async def reserve(self, charge: ReserveRequest) -> ReserveResult | None:
        """Takes a request in if all limits allow it, in one step; None when it cannot be asked in time."""
        ...

    def adopt(self, tenant: str, request_id: str) -> None:
        """Counts a request among those in progress, without a charge. Never waits."""
        ...

    def release(
        self, tenant: str, request_id: str, *, placed: bool, request_refund: int = 0, token_refund: int = 0
    ) -> None:
        """Ends what was charged or held, once for each time; with ``placed`` the request has no place any more. So many
        microseconds of refilling are given back. Never waits.
        """
        ...


class Reservation:
    """What one request was charged, until it is closed; a context that does that. ``used`` is what it has used, which
    whoever runs it keeps up to date: the rest of its tokens is given back.
    """

    def __init__(self, charged: int, end: Callable[[int, int], None]) -> None:
        self.used = 0
        self._charged = charged
        self._end: Callable[[int, int], None] | None = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.settle()

    def commit_all(self) -> None:
        """What is left of the request is paid for, whoever goes on with it and when: nothing is given back."""
        self.used = self._charged
        self.settle()

    def cancel(self) -> None:
        """The request never ran: all of it is given back, and it does not count as one."""
        self._close(1, self._charged)

    def settle(self) -> None:
        """The request has ended. Never waits; a second time does nothing."""
        self._close(0, max(0, self._charged - self.used))

    def _close(self, requests: int, tokens: int) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(requests, tokens)


class RateLimiter:
    """Takes requests in. Without a ``shared`` meter, and while it cannot be asked, this router counts by itself,
    beginning with how each tenant stood last.

    A request has one place among those in progress: what is charged again while it has one, such as a request that is
    repeated under its idempotency key, takes no other, and leaves it that place when it ends.
    """

    def __init__(
        self,
        tenants: Tenants,
        shared: SharedRateLimiter | None = None,
        *,
        clock: Callable[[], int] = lambda: monotonic_ns() // 1000,
    ) -> None:
        self._tenants = tenants
        self._shared = shared
        self._clock = clock
        self._meters: dict[str, TenantUsage] = {}

    async def reserve(self, tenant_id: str, request_id: str, tokens: int) -> Reservation:
        """Takes in a request of a tenant that may use ``tokens`` at most, until its bill is closed. Raises
        ``QuireError``: OVERLOADED with a reason, INVALID when it is more than the tenant may ever use at once.
        """
        meter = self._meter(tenant_id)
        if not meter.tenant.is_limited:
            return Reservation(tokens, _nothing)
        meter.check_size(1, tokens)
        with counting_refusals():
            charged = await self._take(meter, request_id, tokens)
        if charged is None:
            return Reservation(tokens, partial(meter.release, request_id))
        return Reservation(tokens, partial(self._end, meter, request_id, charged.newly_running))

    def adopt(self, tenant_id: str, request_id: str) -> Reservation:
        """Counts a request that was charged before and goes on here among those in progress, until its bill is closed.
        It is charged nothing and never refused. Never waits.
        """
        meter = self._meter(tenant_id)
        if meter.tenant.max_concurrent is None:
            return Reservation(0, _nothing)
        meter.add_running(request_id)
        if self._shared is None:
            return Reservation(0, partial(meter.release, request_id))
        self._shared.adopt(tenant_id, request_id)
        return Reservation(0, partial(self._end, meter, request_id, True))

    def check_size(self, tenant_id: str, tokens: Sequence[int]) -> None:
        """Raises ``QuireError`` INVALID for requests with so many tokens each that may never run together."""
        meter = self._meter(tenant_id)
        if meter.tenant.is_limited:
            meter.check_size(len(tokens), sum(tokens))

    def check_rate(self, tenant_id: str) -> None:
        """Raises ``QuireError`` OVERLOADED where a tenant has no request left this minute, as far as this router knows.
        Nothing is charged.
        """
        meter = self._meter(tenant_id)
        if meter.tenant.requests_per_minute is not None:
            with counting_refusals():
                _raise(meter.request_refusal(self._clock()))

    async def consume_request(self, tenant_id: str) -> None:
        """Charges one request that no engine will see, and that has no place among those in progress. Raises
        ``QuireError`` OVERLOADED where there is none left this minute.
        """
        meter = self._meter(tenant_id)
        if meter.tenant.requests_per_minute is None:
            return
        cost, charged = meter.costs(0)[0], None
        if self._shared is not None:
            charged = await self._shared.reserve(ReserveRequest(tenant_id, "", cost, 0, None))
        now = self._clock()
        if charged is not None:
            meter.sync(charged.request_debt, charged.token_debt, now)
        with counting_refusals():
            if charged is None:
                _raise(meter.request_refusal(now))
                meter.consume_request(now)
            elif not charged.admitted:
                raise meter.request_refusal(now) or internal()

    def count_poll(self, tenant_id: str) -> None:
        """Counts a read of an earlier request (status, events, cancel, delete), at this router alone. Raises
        ``QuireError`` OVERLOADED after too many within a minute.
        """
        with counting_refusals():
            _raise(self._meter(tenant_id).count_poll(self._clock()))

    def status(self, tenant_id: str) -> RateLimitStatus | None:
        """How a tenant stands, as far as this router knows: since its last request here, other routers may have taken
        in more. Returns None if it has no limits.
        """
        meter = self._meter(tenant_id)
        return meter.status(self._clock()) if meter.tenant.is_limited else None

    def _meter(self, tenant_id: str) -> TenantUsage:
        meter = self._meters.get(tenant_id)
        if meter is None:
            meter = self._meters[tenant_id] = TenantUsage(self._tenants.get(tenant_id))
        return meter

    async def _take(self, meter: TenantUsage, request_id: str, tokens: int) -> ReserveResult | None:
        """Takes a request in, or raises why not; None when only this router knows."""
        charged = await self._ask(meter, request_id, tokens)
        now = self._clock()
        if charged is None:
            error = meter.refusal(tokens, now, meter.num_running_before(request_id))
            if error is not None:
                raise error
            meter.consume(request_id, tokens, now)
            return None
        meter.sync(charged.request_debt, charged.token_debt, now)
        if not charged.admitted:
            raise meter.refusal(tokens, now, charged.running) or internal()
        meter.add_running(request_id)
        return charged

    async def _ask(self, meter: TenantUsage, request_id: str, tokens: int) -> ReserveResult | None:
        if self._shared is None:
            return None
        tenant = meter.tenant
        return await self._shared.reserve(
            ReserveRequest(tenant.id, request_id, *meter.costs(tokens), tenant.max_concurrent)
        )

    def _end(self, meter: TenantUsage, request_id: str, placed: bool, requests: int, tokens: int) -> None:
        meter.release(request_id, requests, tokens)
        if self._shared is not None:
            request_refund, token_refund = meter.refunds(requests, tokens)
            self._shared.release(
                meter.tenant.id, request_id, placed=placed, request_refund=request_refund, token_refund=token_refund
            )


def _raise(error: QuireError | None) -> None:
    if error is not None:
        raise error


def _nothing(_requests: int, _tokens: int) -> None:
    """The end of a request that was not counted."""
