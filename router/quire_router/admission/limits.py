"""Rate limits: each request reserves what it may use before it is queued, and settles what it used when it ends. Usage
is counted for all routers together if they have a shared rate limiter, and else by each for itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Protocol, Self

from quire_proto.errors import QuireError, internal

from quire_router.admission.tenants import RateLimitStatus, Tenants, TenantUsage
from quire_router.core import metrics

_KEPT_AT_ONCE = 2  # tenants that are looked at for a new one, and are not idle


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """One request to admit: ``request_cost`` and ``token_cost`` are in microseconds of refilling, 0 without such a
    limit, and ``max_concurrent`` is how many may be in progress, None for any number.
    """

    tenant: str
    request_id: str
    request_cost: int
    token_cost: int
    max_concurrent: int | None


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """The state of a tenant after a reservation, unchanged if that was not ``admitted``: ``request_debt`` and
    ``token_debt`` are the microseconds until its buckets are full, ``running`` are its requests in progress.
    ``newly_running`` is whether the request was not among these before.
    """

    admitted: bool
    newly_running: bool
    request_debt: int
    token_debt: int
    running: int


class SharedRateLimiter(Protocol):
    """What tenants have used and have in progress, as all routers count it together. A request counts once among those
    in progress, whichever routers count it.
    """

    async def reserve(self, request: ReserveRequest) -> ReserveResult | None:
        """Admits a request if all limits allow it, atomically. Returns None if there is no answer in time."""
        ...

    def adopt(self, tenant: str, request_id: str) -> None:
        """Counts a request among those in progress without charging it. Never waits."""
        ...

    def release(
        self, tenant: str, request_id: str, *, newly_running: bool, request_refund: int = 0, token_refund: int = 0
    ) -> None:
        """Ends what was reserved or adopted, once for each time; with ``newly_running`` the request is not in progress
        any more. Refunds are in microseconds of refilling. Never waits.
        """
        ...


class RateLimiter:
    """Reserves what requests may use. Without a ``shared`` rate limiter, and while that is unavailable, this router
    counts by itself, beginning with the last known state of each tenant.

    A request counts once among those in progress: what is reserved again meanwhile, such as a request that is repeated
    under its idempotency key, does not count as another, and its end does not end the first.
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
        self._usages: OrderedDict[str, TenantUsage] = OrderedDict()

    def label(self, tenant_id: str) -> str:
        """See ``Tenants.label``."""
        return self._tenants.label(tenant_id)

    async def reserve(self, tenant_id: str, request_id: str, tokens: int) -> "Reservation":
        """Admits a request that may use ``tokens`` at most, until its reservation is settled. Raises ``QuireError``:
        OVERLOADED with a reason, INVALID when it is more than the tenant may ever use at once.
        """
        usage = self._usage(tenant_id)
        if not usage.is_limited:
            return Reservation(tokens, _release_nothing)
        usage.check_size(1, tokens)
        with counting_refusals():
            result = await self._reserve(usage, request_id, tokens)
        if result is None:
            return Reservation(tokens, partial(usage.release, request_id))
        return Reservation(tokens, partial(self._release, usage, request_id, result.newly_running))

    def adopt(self, tenant_id: str, request_id: str) -> "Reservation":
        """Counts a request that was charged before and goes on here among those in progress, until its reservation is
        settled. It is charged nothing and never refused. Never waits.
        """
        usage = self._usage(tenant_id)
        if usage.tenant.max_concurrent is None:
            return Reservation(0, _release_nothing)
        usage.add_running(request_id)
        if self._shared is None:
            return Reservation(0, partial(usage.release, request_id))
        self._shared.adopt(tenant_id, request_id)
        return Reservation(0, partial(self._release, usage, request_id, True))

    def check_size(self, tenant_id: str, tokens: Sequence[int]) -> None:
        """Raises ``QuireError`` INVALID for requests with so many tokens each that may never run together."""
        usage = self._usage(tenant_id)
        if usage.is_limited:
            usage.check_size(len(tokens), sum(tokens))

    def check_rate(self, tenant_id: str) -> None:
        """Raises ``QuireError`` OVERLOADED when a tenant has no request left this minute, as far as this router knows.
        Charges nothing.
        """
        usage = self._usage(tenant_id)
        if usage.tenant.requests_per_minute is not None:
            with counting_refusals():
                _raise_if_any(usage.request_refusal(self._clock()))

    async def consume_request(self, tenant_id: str) -> None:
        """Charges one request that no engine will get, and that does not count as in progress. Raises ``QuireError``
        OVERLOADED when there is none left this minute.
        """
        usage = self._usage(tenant_id)
        if usage.tenant.requests_per_minute is None:
            return
        cost, result = usage.costs(0)[0], None
        if self._shared is not None:
            result = await self._shared.reserve(ReserveRequest(tenant_id, "", cost, 0, None))
        now = self._clock()
        if result is not None:
            usage.sync(result.request_debt, result.token_debt, now)
        with counting_refusals():
            if result is None:
                _raise_if_any(usage.request_refusal(now))
                usage.consume_request(now)
            elif not result.admitted:
                raise usage.request_refusal(now) or internal()

    def count_poll(self, tenant_id: str) -> None:
        """Counts a read of an earlier request (status, events, cancel, delete), at this router alone. Raises
        ``QuireError`` OVERLOADED after too many within a minute.
        """
        with counting_refusals():
            _raise_if_any(self._usage(tenant_id).count_poll(self._clock()))

    def charge_read(self, tenant_id: str, size: int) -> None:
        """Counts the ``size`` bytes that a read took, at this router alone. Never refuses: later reads wait for it."""
        self._usage(tenant_id).charge_read(size, self._clock())

    def status(self, tenant_id: str) -> RateLimitStatus | None:
        """Returns the state of a tenant's limits as far as this router knows: since its last request here, other
        routers may have admitted more. Returns None if it has no limits.
        """
        usage = self._usage(tenant_id)
        return usage.status(self._clock()) if usage.is_limited else None

    def _usage(self, tenant_id: str) -> TenantUsage:
        usage, tenant = self._usages.get(tenant_id), self._tenants[tenant_id]
        if usage is None:
            self._forget_idle()
            usage = self._usages[tenant_id] = TenantUsage(tenant)
        elif usage.tenant != tenant:  # the tenants' file was read again
            usage.set_limits(tenant)
        usage.used_at = self._clock()
        self._usages.move_to_end(tenant_id)
        return usage

    def _forget_idle(self) -> None:
        """Forgets tenants that have used nothing for a minute: an issuer may have millions. Looks at those that came
        longest ago, until it finds some that have.
        """
        now, kept = self._clock(), 0
        while kept < _KEPT_AT_ONCE and kept < len(self._usages):
            tenant_id, usage = self._usages.popitem(last=False)
            if not usage.is_idle(now):
                self._usages[tenant_id] = usage
                kept += 1

    async def _reserve(self, usage: TenantUsage, request_id: str, tokens: int) -> ReserveResult | None:
        """Admits a request. Returns None if only this router counted it. Raises ``QuireError`` when it is refused."""
        result = await self._reserve_shared(usage, request_id, tokens)
        now = self._clock()
        if result is None:
            error = usage.refusal(tokens, now, usage.num_running_before(request_id))
            if error is not None:
                raise error
            usage.consume(request_id, tokens, now)
            return None
        usage.sync(result.request_debt, result.token_debt, now)
        if not result.admitted:
            raise usage.refusal(tokens, now, result.running) or internal()
        usage.add_running(request_id)
        return result

    async def _reserve_shared(self, usage: TenantUsage, request_id: str, tokens: int) -> ReserveResult | None:
        if self._shared is None:
            return None
        tenant = usage.tenant
        return await self._shared.reserve(
            ReserveRequest(tenant.id, request_id, *usage.costs(tokens), tenant.max_concurrent)
        )

    def _release(self, usage: TenantUsage, request_id: str, newly_running: bool, requests: int, tokens: int) -> None:
        usage.release(request_id, requests, tokens)
        if self._shared is not None:
            request_refund, token_refund = usage.refunds(requests, tokens)
            self._shared.release(
                usage.tenant.id,
                request_id,
                newly_running=newly_running,
                request_refund=request_refund,
                token_refund=token_refund,
            )


class Reservation:
    """The tokens that one request was charged. As a context manager, it settles on exit. ``used`` is how many of them
    it has used, which the request's runner keeps up to date: the rest is refunded.
    """

    def __init__(self, tokens: int, release: Callable[[int, int], None]) -> None:
        """``release`` is called once, with the requests and tokens to refund."""
        self.used = 0
        self._charged = tokens
        self._release: Callable[[int, int], None] | None = release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.settle()

    def commit_all(self) -> None:
        """Charges all tokens and refunds none, as another router may go on with the request."""
        self.used = self._charged
        self.settle()

    def cancel(self) -> None:
        """Refunds all tokens and the request itself, as it never ran."""
        self._close(1, self._charged)

    def settle(self) -> None:
        """Refunds the tokens that the request did not use. Never waits; only the first call has an effect."""
        self._close(0, max(0, self._charged - self.used))

    def _close(self, requests: int, tokens: int) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(requests, tokens)


@contextmanager
def counting_refusals() -> Iterator[None]:
    """Counts an error that leaves the block in ``ADMISSION_REFUSALS``, by its reason."""
    try:
        yield
    except QuireError as error:
        if error.reason is not None:
            metrics.ADMISSION_REFUSALS.labels(error.reason).inc()
        raise


def _raise_if_any(error: QuireError | None) -> None:
    if error is not None:
        raise error


def _release_nothing(_requests: int, _tokens: int) -> None:
    """Releases a request that was not counted."""
