"""Tenants: what each may use (``Tenant``), and what it has used of its limits a minute (``TenantUsage``): its buckets,
the requests it has in progress, and the errors and headers that follow. Each limit is kept by the generic cell rate
algorithm (ITU-T I.371), as a single number.

The caller passes the time. Times are whole microseconds of any clock, so that every result is exact. Does no I/O.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quire_proto.errors import QuireError, invalid

from quire_router.core.errors import RefusalReason, polls_used_up, rate_limit_used_up, too_many_concurrent

MIN_KEY_CHARACTERS = 16
MAX_OTHERS = 4096  # tenants that no file names, of which one is at hand: an issuer may have millions


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's part of the service.

    ``id`` is its name, or derived from its key. It may use ``models``, all of them if that is empty. Its share of a
    queue is its ``weight`` relative to the other tenants that wait. ``priority`` is that of its requests, smaller
    first; with ``allow_priority`` they may add their own to it. With ``allow_fleet`` it may see the fleet. A limit is
    None if there is none: those a minute hold for all routers together, as does ``max_concurrent``, which counts the
    requests that wait and that run; ``max_queued`` bounds those that wait for one model at one router. ``retention`` is
    for how many seconds a request is stored after its end; None for the router's own setting. One that is ``listed`` is
    in the tenants' file.
    """

    id: str = ""
    models: frozenset[str] = frozenset()
    weight: float = 1.0
    priority: int = 0
    allow_priority: bool = False
    allow_fleet: bool = False
    allow_lora_updates: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_queued: int | None = None
    retention: float | None = None
    listed: bool = False


class Tenants(dict[str, Tenant]):
    """The configured tenants by their ids; every other id is a tenant with the limits of ``default``, each for itself.
    The last of those that were looked up are kept.
    """

    def __init__(self, tenants: Iterable[Tenant] = (), default: Tenant | None = None) -> None:
        super().__init__((tenant.id, tenant) for tenant in tenants)
        self._default = default or Tenant()
        self._named = frozenset(self)
        self.setdefault("", replace(self._default, id=""))  # everybody's, where there are no keys
        self._others: deque[str] = deque()

    def __missing__(self, tenant_id: str) -> Tenant:
        tenant = self[tenant_id] = replace(self._default, id=tenant_id)
        self._others.append(tenant_id)
        if len(self._others) > MAX_OTHERS:
            self.pop(self._others.popleft(), None)
        return tenant

    def replace_all(self, other: "Tenants") -> None:
        """Takes over the tenants and the default of ``other``: whoever looks a tenant up again finds its new limits."""
        self.clear()
        self.update(other)
        self._others.clear()
        self._default = other._default
        self._named = other._named

    def label(self, tenant_id: str) -> str:
        """The tenant in metrics: its id if it is a configured one, else ``other``, so that there are few labels."""
        return tenant_id if tenant_id in self._named else OTHER_TENANTS


def check_key(key: str) -> str:
    """Returns the key. Raises ``ValueError``, which does not contain it, if it is too short or no header value."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key must have at least {MIN_KEY_CHARACTERS} printable ASCII characters and no spaces, "
            "such as `openssl rand -hex 32` prints"
        )
    return key


MICROSECONDS = 1_000_000

WINDOW = 60 * MICROSECONDS
"""A full bucket is a minute's worth, so that in any ``w`` seconds at most ``limit * (1 + w / 60)`` are taken."""

OTHER_TENANTS = "other"  # in metrics: all that the tenants' file does not name
POLL_BYTES = 65_536  # that are read count as one more read
POLLS_A_REQUEST = 10  # reads of earlier requests a minute, for each request a minute


@dataclass(frozen=True, slots=True)
class WindowStatus:
    """The state of one limit a minute: the limit, what remains at once, and the seconds until all of it does."""

    limit: int
    remaining: int
    reset: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """The state of each limit a minute of a tenant; None if it has no such limit."""

    requests: WindowStatus | None = None
    tokens: WindowStatus | None = None


@dataclass(slots=True)
class GcraBucket:
    """A GCRA bucket: at most ``limit`` a minute, all of them at once if they were saved up.

    ``full_at`` is when the bucket will be full again if nothing more is taken: the algorithm's theoretical arrival
    time.
    """

    limit: int
    full_at: int = field(default=0)

    def cost(self, amount: int) -> int:
        """Returns the time it takes to refill ``amount``, rounded up: never too little may be charged."""
        return -(-amount * WINDOW // self.limit)

    def debt(self, now: int) -> int:
        """Returns the time until the bucket is full."""
        return max(0, self.full_at - now)

    def wait(self, amount: int, now: int) -> int | None:
        """Returns the time after which ``amount`` can be consumed if nothing else is consumed before, 0 for at once;
        None if it is more than a full bucket.
        """
        cost = self.cost(amount)
        return None if cost > WINDOW else max(0, self.debt(now) + cost - WINDOW)

    def consume(self, amount: int, now: int) -> None:
        """Consumes ``amount``, for which ``wait`` is 0."""
        self.full_at = max(self.full_at, now) + self.cost(amount)

    def refund(self, amount: int) -> None:
        """Gives back what was consumed and not used; what a full bucket cannot hold is lost."""
        self.full_at -= self.refund_time(amount)

    def refund_time(self, amount: int) -> int:
        """Returns the time that is given back for ``amount``, rounded down."""
        return amount * WINDOW // self.limit

    def sync(self, debt: int, now: int) -> None:
        """Sets the state to that of another bucket of the same limit."""
        self.full_at = now + debt

    def remaining(self, now: int) -> int:
        """Returns what can be consumed at once."""
        return max(0, (WINDOW - self.debt(now)) * self.limit // WINDOW)


class TenantUsage:
    """One tenant's buckets and the requests it has in progress. ``is_limited`` is whether the tenant has any limit that
    admission has to count.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._requests: GcraBucket | None = None
        self._tokens: GcraBucket | None = None
        self._polls: GcraBucket | None = None
        self._running: Counter[str] = Counter()
        self.used_at = 0
        self.set_limits(tenant)

    def set_limits(self, tenant: Tenant) -> None:
        """Takes the limits of ``tenant`` from now on. A bucket stays as full as it is, in time until it is full; what
        is in progress stays counted.
        """
        self.tenant = tenant
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrent)
        self.is_limited = any(limit is not None for limit in limits)
        polls = tenant.requests_per_minute and tenant.requests_per_minute * POLLS_A_REQUEST
        self._requests = _bucket(tenant.requests_per_minute, self._requests)
        self._tokens = _bucket(tenant.tokens_per_minute, self._tokens)
        self._polls = _bucket(polls, self._polls)

    def is_idle(self, now: int) -> bool:
        """Whether nothing is in progress, every bucket is full, and nobody has looked here for a minute: a new one says
        as much.
        """
        buckets = (self._requests, self._tokens, self._polls)
        is_full = all(each is None or each.full_at <= now for each in buckets)
        return is_full and not self._running and self.used_at <= now - WINDOW

    @property
    def running(self) -> int:
        """Requests that were admitted and have not ended; one that was admitted twice counts once."""
        return len(self._running)

    def num_running_before(self, request_id: str) -> int:
        """Returns how many requests are in progress that this one comes after: none if it is in progress itself."""
        return 0 if request_id in self._running else len(self._running)

    def check_size(self, requests: int, tokens: int) -> None:
        """Raises ``QuireError`` INVALID for requests, with so many tokens in all, that would never be admitted
        together, however long they waited.
        """
        if self._tokens is not None and tokens > self._tokens.limit:
            raise invalid(
                "max_tokens",
                f"The prompt and the most output are {tokens} tokens, but this key may use {self._tokens.limit} a "
                "minute: set a smaller max_tokens.",
            )
        most = min(filter(None, (self.tenant.requests_per_minute, self.tenant.max_concurrent)), default=requests)
        if requests > most:
            raise invalid(
                "prompt",
                f"Each of the {requests} prompts is a request, but this key may have {most} at once or a minute.",
            )

    def costs(self, tokens: int) -> tuple[int, int]:
        """Returns what one request costs in both buckets, in microseconds of refilling; 0 if there is no such limit."""
        return _cost(self._requests, 1), _cost(self._tokens, tokens)

    def refusal(self, tokens: int, now: int, running: int) -> QuireError | None:
        """Returns why a request cannot be admitted now, with ``running`` others in progress; None if it can. Waiting as
        long as ``retry_after`` says is enough, if nothing else is admitted before.
        """
        waits = [(_wait(self._requests, 1, now), RefusalReason.REQUESTS_PER_MINUTE)]
        waits.append((_wait(self._tokens, tokens, now), RefusalReason.TOKENS_PER_MINUTE))
        wait, reason = max(waits, key=lambda entry: entry[0])
        if wait > 0:
            return self._rate_limit_error(reason, wait / MICROSECONDS)
        most = self.tenant.max_concurrent
        if most is not None and running >= most:
            return too_many_concurrent(most)
        return None

    def request_refusal(self, now: int) -> QuireError | None:
        """Returns why not even a request without any tokens can be admitted now; None if it can."""
        wait = _wait(self._requests, 1, now)
        return self._rate_limit_error(RefusalReason.REQUESTS_PER_MINUTE, wait / MICROSECONDS) if wait > 0 else None

    def consume_request(self, now: int) -> None:
        """Consumes one request that was not refused, and does not count it as in progress."""
        if self._requests is not None:
            self._requests.consume(1, now)

    def count_poll(self, now: int) -> QuireError | None:
        """Counts one read of an earlier request. Returns an error if there were too many."""
        if self._polls is None:
            return None
        wait = self._polls.wait(1, now)
        if wait:
            return polls_used_up(self._polls.limit, wait / MICROSECONDS)
        self._polls.consume(1, now)
        return None

    def charge_read(self, size: int, now: int) -> None:
        """Counts the ``size`` bytes that a read took, which are known afterwards: the next ones wait for it."""
        if self._polls is not None:
            self._polls.consume(size // POLL_BYTES, now)

    def consume(self, request_id: str, tokens: int, now: int) -> None:
        """Admits a request that was not refused, until its ``release``."""
        if self._requests is not None:
            self._requests.consume(1, now)
        if self._tokens is not None:
            self._tokens.consume(tokens, now)
        self.add_running(request_id)

    def release(self, request_id: str, requests: int, tokens: int) -> None:
        """Ends a request, once for each time that it was admitted, and refunds so many requests and tokens."""
        self._running[request_id] -= 1
        if self._running[request_id] <= 0:
            del self._running[request_id]
        if self._requests is not None:
            self._requests.refund(requests)
        if self._tokens is not None:
            self._tokens.refund(tokens)

    def refunds(self, requests: int, tokens: int) -> tuple[int, int]:
        """Returns the refunds of both buckets, in microseconds of refilling."""
        return _refund(self._requests, requests), _refund(self._tokens, tokens)

    def sync(self, request_debt: int, token_debt: int, now: int) -> None:
        """Sets both buckets to the state that all routers share."""
        if self._requests is not None:
            self._requests.sync(request_debt, now)
        if self._tokens is not None:
            self._tokens.sync(token_debt, now)

    def add_running(self, request_id: str) -> None:
        """Counts a request among the running ones without a charge, until its ``release``."""
        self._running[request_id] += 1

    def status(self, now: int) -> RateLimitStatus:
        """Returns the state of both limits, as headers report it."""
        return RateLimitStatus(_window_status(self._requests, now), _window_status(self._tokens, now))

    def _rate_limit_error(self, reason: RefusalReason, wait: float) -> QuireError:
        requests = reason is RefusalReason.REQUESTS_PER_MINUTE
        limit = self.tenant.requests_per_minute if requests else self.tenant.tokens_per_minute
        return rate_limit_used_up(reason, limit, wait)


def rate_limit_headers(status: RateLimitStatus) -> dict[str, str]:
    """Returns the headers that the OpenAI API has for rate limits, without their ``x-``."""
    headers = {}
    for name, window in (("requests", status.requests), ("tokens", status.tokens)):
        if window is not None:
            headers[f"ratelimit-limit-{name}"] = str(window.limit)
            headers[f"ratelimit-remaining-{name}"] = str(window.remaining)
            headers[f"ratelimit-reset-{name}"] = f"{window.reset:.3f}s"
    return headers


def _bucket(limit: int | None, before: GcraBucket | None) -> GcraBucket | None:
    return None if limit is None else GcraBucket(limit, 0 if before is None else before.full_at)


def _cost(bucket: GcraBucket | None, amount: int) -> int:
    return 0 if bucket is None else bucket.cost(amount)


def _refund(bucket: GcraBucket | None, amount: int) -> int:
    return 0 if bucket is None else bucket.refund_time(amount)


def _wait(bucket: GcraBucket | None, amount: int, now: int) -> int:
    """An ``amount`` that is more than a full bucket was refused by ``check_size`` before."""
    return 0 if bucket is None else bucket.wait(amount, now) or 0


def _window_status(bucket: GcraBucket | None, now: int) -> WindowStatus | None:
    return (
        None if bucket is None else WindowStatus(bucket.limit, bucket.remaining(now), bucket.debt(now) / MICROSECONDS)
    )
