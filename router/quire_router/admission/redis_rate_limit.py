"""The rate limiter that all routers share, in Redis: one round trip when a request comes, none that a request waits for
when it ends. Redis is the clock, and may go back (``clock.lua``).
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from quire_proto.supervise import SupervisedTask
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire_router.admission.limits import ReserveRequest, ReserveResult
from quire_router.admission.tenants import MICROSECONDS, WINDOW
from quire_router.clients.redis_client import RedisAccess, lua_source, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.core import metrics
from quire_router.core.retry import supervise, wait_at_most

log = logging.getLogger(__name__)
_MAX_CONCURRENT_REQUESTS = 16  # requests at a time, each on a connection of its own
_CONNECTIONS = _MAX_CONCURRENT_REQUESTS + 1  # one for what has ended
_FAILURES_IN_A_ROW = 3  # until all requests are counted locally: a slow one may be this loop's own lag, or one key's
_LATE_TIMER = 0.005  # seconds by which a timer is late if the loop was blocked
_SILENCE = 2.0  # seconds without any answer of Redis after which a request does not wait for its own
_EXCHANGE_TIMEOUT = 5.0  # seconds of one exchange, however many others are answered meanwhile
_RETRY_AFTER_FAILURE = 1.0  # seconds in which Redis is not asked again after it failed
_CLOSE_TIMEOUT = 1.0  # seconds for sending what is pending when closing
_BATCH_SIZE = 1000
_MAX_PENDING_RELEASES = 50_000
_FAILURES = (RedisError, OSError, TimeoutError)
_REPLY = 5  # numbers that the script returns
T = TypeVar("T")


class RedisRateLimiter:
    """Implements ``SharedRateLimiter`` in the Redis at ``access``. A request waits for its answer until Redis has
    answered nobody here for ``timeout`` seconds: a burst makes answers late, and is when limits matter. One in progress
    counts for ``lease`` seconds at a time, so that those of a router which died expire: what is leased here are
    requests, not routers (see ``clients.membership``). One that ended while Redis was unavailable is removed later; its
    unused tokens stay charged.
    """

    def __init__(self, access: RedisAccess | str, *, timeout: float = _SILENCE, lease: float = 30.0) -> None:
        self._client = redis_client(access, timeout=_EXCHANGE_TIMEOUT, connections=_CONNECTIONS)
        self._timeout = timeout
        self._lease = lease
        self._reserve_script = self._client.register_script(_RESERVE)
        self._running: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._adopted: dict[tuple[str, str], None] = {}
        self._releases: deque[tuple[str, str, int, int]] = deque(maxlen=_MAX_PENDING_RELEASES)
        self._pending = asyncio.Event()
        self._publisher: SupervisedTask | None = None
        self._unavailable_until = self._answered_at = 0.0
        self._failures = 0  # one after the other
        self._request_slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)
        metrics.LIMITS_SHARED.set(1)  # until Redis is unavailable

    async def reserve(self, request: ReserveRequest) -> ReserveResult | None:
        """See ``SharedRateLimiter``."""
        self._start()
        async with self._request_slots:  # outside the timeout: waiting for other requests here is not Redis being slow
            return None if self._is_unavailable else await self._run_reserve(request)

    async def _run_reserve(self, request: ReserveRequest) -> ReserveResult | None:
        try:
            call = self._reserve_script(keys=_keys(request.tenant), args=self._arguments(request))
            reply = _read(await _with_timeout(call, self._timeout, lambda: self._answered_at))
        except _FAILURES as error:
            self._record_failure(error)
            self._queue_release(request.tenant, request.request_id)  # it may have been admitted, and the reply was lost
            return None
        except asyncio.CancelledError:
            self._queue_release(request.tenant, request.request_id)
            raise
        self._failures = 0
        self._answered_at = asyncio.get_running_loop().time()
        metrics.LIMITS_SHARED.set(1)
        admitted, newly_running, request_debt, token_debt, running = reply
        if admitted and request.max_concurrent is not None:
            self._running[request.tenant][request.request_id] += 1
        return ReserveResult(bool(admitted), bool(newly_running), request_debt, token_debt, running)

    def adopt(self, tenant: str, request_id: str) -> None:
        """See ``SharedRateLimiter``."""
        self._start()
        self._running[tenant][request_id] += 1
        self._adopted[tenant, request_id] = None
        self._pending.set()

    def release(
        self, tenant: str, request_id: str, *, newly_running: bool, request_refund: int = 0, token_refund: int = 0
    ) -> None:
        """See ``SharedRateLimiter``."""
        running = self._running[tenant]
        running[request_id] -= 1
        if running[request_id] <= 0:
            del running[request_id]
            self._adopted.pop((tenant, request_id), None)
        if not running:
            del self._running[tenant]
        if newly_running or request_refund or token_refund:
            self._queue_release(tenant, request_id if newly_running else "", request_refund, token_refund)

    async def close(self) -> None:
        """Sends the releases that are pending, within a bounded time, and closes the connections."""
        if self._publisher is not None:
            await self._publisher.stop()
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._send_releases()
            except _FAILURES:
                log.warning("the end of %d requests was not counted", len(self._releases))
        await self._client.aclose()

    def _queue_release(self, tenant: str, request_id: str, request_refund: int = 0, token_refund: int = 0) -> None:
        self._releases.append((tenant, request_id, request_refund, token_refund))
        self._pending.set()

    def _arguments(self, request: ReserveRequest) -> list[Any]:
        most = -1 if request.max_concurrent is None else request.max_concurrent
        return [request.request_id, request.request_cost, request.token_cost, WINDOW, most, self._lease_time]

    @property
    def _lease_time(self) -> int:
        return round(self._lease * MICROSECONDS)

    def _start(self) -> None:
        if self._publisher is None:
            self._publisher = supervise("limits", self._publish)

    async def _publish(self) -> None:
        """Sends releases and adopted requests to Redis as they come, and renews all leases three times a lease."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            due = renewed + self._lease / 3
            await wait_at_most(self._pending, due - loop.time())
            try:
                await self._send_releases()  # first: what is adopted may have been released just before
                await self._send_adopted()
                if loop.time() >= due:
                    renewed = loop.time()
                    await self._renew_all()
            except _FAILURES as error:
                self._record_failure(error)
                await asyncio.sleep(_RETRY_AFTER_FAILURE)
            except Exception:  # whatever one of them did wrong, the others have to be renewed
                log.exception("cannot send limits to Redis")
                await asyncio.sleep(_RETRY_AFTER_FAILURE)

    async def _send_releases(self) -> None:
        """Sends the pending releases. Of those that failed, the requests are removed the next time; their tokens are
        not refunded, as they might be refunded twice.
        """
        self._pending.clear()
        while self._releases:
            ends = [self._releases.popleft() for _ in range(min(_BATCH_SIZE, len(self._releases)))]
            pipeline = self._client.pipeline(transaction=False)
            for tenant, request_id, *refunds in ends:
                pipeline.eval(_RELEASE, 3, *_keys(tenant)[:3], request_id, *map(str, refunds))
            try:
                answers = await pipeline.execute(raise_on_error=False)
            except BaseException:
                self._requeue_releases(ends)
                raise
            failed = {end: error for end, error in zip(ends, answers, strict=True) if isinstance(error, Exception)}
            if failed:
                self._requeue_releases([end for end, error in failed.items() if "WRONGTYPE" not in str(error)])
                raise next(iter(failed.values()))

    def _requeue_releases(self, ends: Sequence[tuple[str, str, int, int]]) -> None:
        """Queues the ends of requests once more, without their refunds, but not of those that were reserved again."""
        ended = [end for end in ends if end[1] and end[1] not in self._running.get(end[0], ())]
        for tenant, request_id, *_ in ended[: _MAX_PENDING_RELEASES - len(self._releases)]:
            self._queue_release(tenant, request_id)

    async def _send_adopted(self) -> None:
        """Sends adopted requests. Those that fail are renewed with the rest."""
        adopted, self._adopted = self._adopted, {}
        for tenant, request_id in adopted:
            await self._renew(tenant, [request_id])

    async def _renew_all(self) -> None:
        """Renews all requests in progress here. Pings first, as no request may come that finds out whether Redis is
        back.
        """
        await self._client.ping()
        metrics.LIMITS_SHARED.set(1)
        for tenant, request_ids in list(self._running.items()):
            for part in _batches(list(request_ids)):
                await self._renew(tenant, part)

    async def _renew(self, tenant: str, request_ids: Sequence[str]) -> None:
        await self._client.eval(_RENEW, 4, *_keys(tenant), str(self._lease_time), *request_ids)

    @property
    def _is_unavailable(self) -> bool:
        return asyncio.get_running_loop().time() < self._unavailable_until

    def _record_failure(self, error: Exception) -> None:
        """The request that failed is counted locally. All are for a while if Redis is certainly not there, or several
        failed in a row.
        """
        self._failures += 1
        disconnected = isinstance(error, OSError | RedisConnectionError) and not isinstance(error, TimeoutError)
        if not disconnected and self._failures < _FAILURES_IN_A_ROW:
            return
        if not self._is_unavailable:
            log.warning("this router counts limits alone: %s", describe_failure(error))
        self._unavailable_until = asyncio.get_running_loop().time() + _RETRY_AFTER_FAILURE
        metrics.LIMITS_SHARED.set(0)


def _read(reply: object) -> list[int]:
    """Returns the reply of the script. Raises ``RedisError`` for anything else, as the server need not be a Redis."""
    if isinstance(reply, list) and len(reply) == _REPLY and all(isinstance(each, int) for each in reply):
        return reply
    raise RedisError("this is not an answer to what was asked")


async def _with_timeout(call: Awaitable[T], seconds: float, answered_at: Callable[[], float]) -> T:
    """Returns the result of ``call``. Raises ``TimeoutError`` once Redis has answered nobody here for ``seconds``, the
    last time ``answered_at``, not counting those in which this loop was blocked (a late timer says nothing of Redis,
    whose reply may be in the socket), and what ``call`` raises.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(call)
    due = loop.time() + seconds
    last = due + _EXCHANGE_TIMEOUT
    try:
        while not (await asyncio.wait([task], timeout=max(0.0, due - loop.time())))[0]:
            now = loop.time()
            late, silent_at = now - due, answered_at() + seconds
            if now > last or (late < _LATE_TIMER and now >= silent_at):
                raise TimeoutError("Redis does not answer in time")
            due = max(silent_at, now + min(late, seconds))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _batches(entries: Sequence[str]) -> list[Sequence[str]]:
    return [entries[begin : begin + _BATCH_SIZE] for begin in range(0, len(entries), _BATCH_SIZE)]


def _keys(tenant: str) -> list[str]:
    """Returns the keys of a tenant, which are in one slot of a cluster."""
    return [f"quire:limits:{{t:{tenant}}}:{name}" for name in ("requests", "tokens", "running", "clock")]


_CLOCK, _RELEASE = lua_source(__package__, "clock"), lua_source(__package__, "release")
_RESERVE, _RENEW = (_CLOCK + lua_source(__package__, name) for name in ("reserve", "renew_running"))
