"""One limit a minute, as the generic cell rate algorithm (ITU-T I.371) keeps it: a single number. Has no clock.

Times are whole microseconds, so that every answer is exact.
"""

from collections import Counter
from dataclasses import dataclass, field

from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_router.admission.tenants import Tenant
from quire_router.core.errors import RefusalReason

MICROSECONDS = 1_000_000
WINDOW = 60 * MICROSECONDS
"""A full bucket is a minute's worth, so that in any ``w`` seconds at most ``limit * (1 + w / 60)`` are taken."""


@dataclass(slots=True)
class GcraBucket:
    """At most ``limit`` a minute, all of them at once if they were saved up.

    ``full_at`` is when the bucket will be full again if nothing more is taken: the algorithm's theoretical arrival
    time.
    """

    limit: int
    full_at: int = field(default=0)

    def cost(self, amount: int) -> int:
        """The time it takes to refill ``amount``, rounded up: what is taken may never be too little."""
        return -(-amount * WINDOW // self.limit)

    def debt(self, now: int) -> int:
        """Time until the bucket is full."""
        return max(0, self.full_at - now)

    def wait(self, amount: int, now: int) -> int | None:
        """Time after which ``amount`` can be taken if nobody takes anything before, 0 for at once; None when it is more
        than a full bucket.
        """
        cost = self.cost(amount)
        return None if cost > WINDOW else max(0, self.debt(now) + cost - WINDOW)

    def consume(self, amount: int, now: int) -> None:
        """Takes ``amount``, which needed no wait."""
        self.full_at = max(self.full_at, now) + self.cost(amount)

    def refund(self, amount: int) -> None:
        """Puts back what was taken and not used; what a full bucket cannot hold is lost."""
        self.full_at -= self.refund_time(amount)

    def refund_time(self, amount: int) -> int:
        """The time that is given back for ``amount``, rounded down."""
        return amount * WINDOW // self.limit

    def sync(self, debt: int, now: int) -> None:
        """Takes over how another bucket of the same limit stands."""
        self.full_at = now + debt

    def remaining(self, now: int) -> int:
        """What can be taken at once."""
        return max(0, (WINDOW - self.debt(now)) * self.limit // WINDOW)


# What one tenant has used of its limits. Pure: has no clock; times are microseconds of any clock.


POLLS_A_REQUEST = 10  # reads of earlier requests a minute, for each request a minute
RETRY_CONCURRENT = 1.0  # seconds; nobody knows when a request ends


@dataclass(frozen=True, slots=True)
class WindowStatus:
    """How one limit a minute stands: the limit, what is left at once, and the seconds until all of it is."""

    limit: int
    remaining: int
    reset: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """How a tenant stands with each of its limits a minute; None where it has no such limit."""

    requests: WindowStatus | None = None
    tokens: WindowStatus | None = None


def rate_limit_headers(standing: RateLimitStatus) -> dict[str, str]:
    """A standing in the words that the OpenAI API has for it in its headers, without their ``x-``."""
    words = {}
    for name, allowance in (("requests", standing.requests), ("tokens", standing.tokens)):
        if allowance is not None:
            words[f"ratelimit-limit-{name}"] = str(allowance.limit)
            words[f"ratelimit-remaining-{name}"] = str(allowance.remaining)
            words[f"ratelimit-reset-{name}"] = f"{allowance.reset:.3f}s"
    return words


class TenantUsage:
    """One tenant's buckets and the requests it has in progress."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._requests = _bucket(tenant.requests_per_minute)
        self._tokens = _bucket(tenant.tokens_per_minute)
        polls = tenant.requests_per_minute and tenant.requests_per_minute * POLLS_A_REQUEST
        self._polls = _bucket(polls)
        self._running: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Requests that were taken in and have not ended; one that was taken in twice has one place."""
        return len(self._running)

    def num_running_before(self, request_id: str) -> int:
        """How many of them were there before this one: none if it is one of them, and has its place."""
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
        """What one request takes from both buckets, in microseconds of refilling; 0 where there is no limit."""
        return _cost(self._requests, 1), _cost(self._tokens, tokens)

    def refusal(self, tokens: int, now: int, ahead: int) -> QuireError | None:
        """Why a request cannot be taken in now, with so many in progress ``ahead`` of it; None when it can. Waiting as
        long as ``retry_after`` says is enough, if nothing else is taken in before.
        """
        waits = [(_wait(self._requests, 1, now), RefusalReason.REQUESTS_PER_MINUTE)]
        waits.append((_wait(self._tokens, tokens, now), RefusalReason.TOKENS_PER_MINUTE))
        wait, reason = max(waits, key=lambda entry: entry[0])
        if wait > 0:
            return self._too_often(reason, wait / MICROSECONDS)
        most = self.tenant.max_concurrent
        if most is not None and ahead >= most:
            return _too_many(most)
        return None

    def request_refusal(self, now: int) -> QuireError | None:
        """Why not even a request without any tokens can be taken in now; None when it can."""
        wait = _wait(self._requests, 1, now)
        return self._too_often(RefusalReason.REQUESTS_PER_MINUTE, wait / MICROSECONDS) if wait > 0 else None

    def consume_request(self, now: int) -> None:
        """Takes one request that was not refused, without a place among those in progress."""
        if self._requests is not None:
            self._requests.consume(1, now)

    def count_poll(self, now: int) -> QuireError | None:
        """Counts one read of an earlier request; why it is refused where there were too many, else None."""
        if self._polls is None:
            return None
        wait = self._polls.wait(1, now)
        if wait:
            message = f"This key may read earlier requests {self._polls.limit} times a minute."
            retry = wait / MICROSECONDS
            return QuireError(ErrorCode.OVERLOADED, message, retry_after=retry, reason=RefusalReason.POLLS_PER_MINUTE)
        self._polls.consume(1, now)
        return None

    def consume(self, request_id: str, tokens: int, now: int) -> None:
        """Takes in a request that was not refused, until its ``end``."""
        if self._requests is not None:
            self._requests.consume(1, now)
        if self._tokens is not None:
            self._tokens.consume(tokens, now)
        self.add_running(request_id)

    def release(self, request_id: str, requests: int, tokens: int) -> None:
        """Ends a request once for each time that it was taken in; so much of its charge is given back."""
        self._running[request_id] -= 1
        if self._running[request_id] <= 0:
            del self._running[request_id]
        if self._requests is not None:
            self._requests.refund(requests)
        if self._tokens is not None:
            self._tokens.refund(tokens)

    def refunds(self, requests: int, tokens: int) -> tuple[int, int]:
        """What so many give back to both buckets, in microseconds of refilling."""
        return _refund(self._requests, requests), _refund(self._tokens, tokens)

    def sync(self, request_debt: int, token_debt: int, now: int) -> None:
        """Takes over how the tenant stands for all routers together."""
        if self._requests is not None:
            self._requests.sync(request_debt, now)
        if self._tokens is not None:
            self._tokens.sync(token_debt, now)

    def add_running(self, request_id: str) -> None:
        """Counts a request among the running ones without a charge, until its ``end``."""
        self._running[request_id] += 1

    def status(self, now: int) -> RateLimitStatus:
        """What a client is told."""
        return RateLimitStatus(_allowance(self._requests, now), _allowance(self._tokens, now))

    def _too_often(self, reason: RefusalReason, wait: float) -> QuireError:
        requests = reason is RefusalReason.REQUESTS_PER_MINUTE
        limit = self.tenant.requests_per_minute if requests else self.tenant.tokens_per_minute
        message = f"This key may use {limit} {'requests' if requests else 'tokens'} a minute, and they are used up."
        return QuireError(ErrorCode.OVERLOADED, message, retry_after=wait, reason=reason)


def _too_many(most: int) -> QuireError:
    message = f"{most} requests of yours are in progress, which is the most you may have."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_CONCURRENT, reason=RefusalReason.MAX_CONCURRENT)


def _bucket(limit: int | None) -> GcraBucket | None:
    return None if limit is None else GcraBucket(limit)


def _cost(bucket: GcraBucket | None, amount: int) -> int:
    return 0 if bucket is None else bucket.cost(amount)


def _refund(bucket: GcraBucket | None, amount: int) -> int:
    return 0 if bucket is None else bucket.refund_time(amount)


def _wait(bucket: GcraBucket | None, amount: int, now: int) -> int:
    """A larger ``amount`` than fits was refused for its size before."""
    return 0 if bucket is None else bucket.wait(amount, now) or 0


def _allowance(bucket: GcraBucket | None, now: int) -> WindowStatus | None:
    return (
        None if bucket is None else WindowStatus(bucket.limit, bucket.remaining(now), bucket.debt(now) / MICROSECONDS)
    )
