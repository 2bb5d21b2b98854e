"""What all routers count together, in Redis: one round trip when a request comes, none that anybody waits for when it
ends. Redis is the clock.
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from quire_proto.supervise import SupervisedTask
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire_router.admission.limits import ReserveRequest, ReserveResult
from quire_router.admission.rate_limit import MICROSECONDS, WINDOW
from quire_router.clients.redis_client import RedisAccess, lua_source, redis_client
from quire_router.core import metrics
from quire_router.core.retry import supervise

log = logging.getLogger(__name__)
_MAX_CONCURRENT_REQUESTS = 16  # requests at a time, each on a connection of its own
_CONNECTIONS = _MAX_CONCURRENT_REQUESTS + 1  # one for what has ended
_FAILURES_IN_A_ROW = 3  # until all count by themselves: one that is slow may be this loop's own lag, or one key's
_HELD_UP = 0.005  # seconds by which a timer is late where the loop was held up
_EXCHANGE_TIMEOUT = 2.0  # seconds of one exchange; a request waits less
_RETRY_AFTER_FAILURE = 1.0  # seconds in which Redis is not asked again after it failed
_CLOSE_TIMEOUT = 1.0  # seconds for what is not told yet when closing
_BATCH_SIZE = 1000
_MAX_PENDING_RELEASES = 50_000
_FAILURES = (RedisError, OSError, TimeoutError)
_REPLY = 5  # numbers that the script returns
T = TypeVar("T")


class RedisRateLimiter:
    """Implements ``SharedRateLimiter`` in the Redis at ``place``. A request waits at most ``timeout`` seconds for its
    answer. One in progress counts for ``lease`` seconds at a time, so that those of a router which died are forgotten.
    What ended while Redis was away gives its place back later; its unused tokens stay charged.
    """

    def __init__(self, place: RedisAccess | str, *, timeout: float = 0.05, lease: float = 30.0) -> None:
        # A connection that died with a former Redis is replaced at once.
        self._client = redis_client(place, timeout=_EXCHANGE_TIMEOUT, repeats=1, connections=_CONNECTIONS)
        self._timeout = timeout
        self._lease = lease
        self._reserve_script = self._client.register_script(lua_source(__package__, "reserve"))
        self._running: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._adopted: dict[tuple[str, str], None] = {}
        self._releases: deque[tuple[str, str, int, int]] = deque(maxlen=_MAX_PENDING_RELEASES)
        self._changed = asyncio.Event()
        self._publisher: SupervisedTask | None = None
        self._unavailable_until = 0.0
        self._failures = 0  # one after the other
        self._request_slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)
        metrics.LIMITS_SHARED.set(1)  # until it could not be asked

    async def reserve(self, charge: ReserveRequest) -> ReserveResult | None:
        """See ``SharedRateLimiter``."""
        self._start()
        async with self._request_slots:  # before time is counted: others here are no reason to take Redis for slow
            return None if self._is_unavailable else await self._ask(charge)

    async def _ask(self, charge: ReserveRequest) -> ReserveResult | None:
        try:
            asking = self._reserve_script(keys=_keys(charge.tenant), args=self._arguments(charge))
            reply = _read(await _with_timeout(asking, self._timeout))
        except _FAILURES as error:
            self._record_failure(error)
            self._queue_release(charge.tenant, charge.request_id)  # it may have been taken in, and the answer was lost
            return None
        except asyncio.CancelledError:
            self._queue_release(charge.tenant, charge.request_id)
            raise
        self._failures = 0
        metrics.LIMITS_SHARED.set(1)
        admitted, placed, request_debt, token_debt, running = reply
        if admitted and charge.max_concurrent is not None:
            self._running[charge.tenant][charge.request_id] += 1
        return ReserveResult(bool(admitted), bool(placed), request_debt, token_debt, running)

    def adopt(self, tenant: str, request_id: str) -> None:
        """See ``SharedRateLimiter``."""
        self._start()
        self._running[tenant][request_id] += 1
        self._adopted[tenant, request_id] = None
        self._changed.set()

    def release(
        self, tenant: str, request_id: str, *, placed: bool, request_refund: int = 0, token_refund: int = 0
    ) -> None:
        """See ``SharedRateLimiter``."""
        held = self._running[tenant]
        held[request_id] -= 1
        if held[request_id] <= 0:
            del held[request_id]
            self._adopted.pop((tenant, request_id), None)
        if not held:
            del self._running[tenant]
        if placed or request_refund or token_refund:
            self._queue_release(tenant, request_id if placed else "", request_refund, token_refund)

    async def close(self) -> None:
        """Tells what has ended, within a bounded time, and lets go of connections."""
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
        self._changed.set()

    def _arguments(self, charge: ReserveRequest) -> list[Any]:
        most = -1 if charge.max_concurrent is None else charge.max_concurrent
        return [charge.request_id, charge.request_cost, charge.token_cost, WINDOW, most, self._lease_time]

    @property
    def _lease_time(self) -> int:
        return round(self._lease * MICROSECONDS)

    def _start(self) -> None:
        if self._publisher is None:
            self._publisher = supervise("limits", self._publish)

    async def _publish(self) -> None:
        """Tells Redis what has ended and what is held as it comes, and three times a lease all that goes on."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            due = renewed + self._lease / 3
            await self._wait_for_changes(due - loop.time())
            try:
                await self._send_releases()  # first: what is held may be what has ended just before
                await self._send_adopted()
                if loop.time() >= due:
                    renewed = loop.time()
                    await self._renew_all()
            except _FAILURES as error:
                self._record_failure(error)
                await asyncio.sleep(_RETRY_AFTER_FAILURE)
            except Exception:  # whatever went wrong with one of them, the others have to be renewed
                log.exception("limits cannot be told to Redis")
                await asyncio.sleep(_RETRY_AFTER_FAILURE)

    async def _wait_for_changes(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _send_releases(self) -> None:
        """Of what could not be told, the places are given back the next time. Tokens are not: given back twice, they
        would be too many.
        """
        self._changed.clear()
        while self._releases:
            ends = [self._releases.popleft() for _ in range(min(_BATCH_SIZE, len(self._releases)))]
            pipeline = self._client.pipeline(transaction=False)
            for tenant, request_id, *refunds in ends:
                pipeline.eval(_RELEASE, 3, *_keys(tenant), request_id, *map(str, refunds))
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
        """Notes the ends of places once more, but of those that were taken again since."""
        places = [end for end in ends if end[1] and end[1] not in self._running.get(end[0], ())]
        for tenant, request_id, *_ in places[: _MAX_PENDING_RELEASES - len(self._releases)]:
            self._queue_release(tenant, request_id)

    async def _send_adopted(self) -> None:
        """What could not be told is renewed with the rest."""
        begun, self._adopted = self._adopted, {}
        for tenant, request_id in begun:
            await self._renew(tenant, [request_id])

    async def _renew_all(self) -> None:
        """All that is held here, and whether Redis can be asked: perhaps nobody else does."""
        await self._client.ping()
        metrics.LIMITS_SHARED.set(1)
        for tenant, request_ids in list(self._running.items()):
            for part in _parts(list(request_ids)):
                await self._renew(tenant, part)

    async def _renew(self, tenant: str, request_ids: Sequence[str]) -> None:
        await self._client.eval(_RENEW, 1, _keys(tenant)[2], str(self._lease_time), *request_ids)

    @property
    def _is_unavailable(self) -> bool:
        return asyncio.get_running_loop().time() < self._unavailable_until

    def _record_failure(self, error: Exception) -> None:
        """One that failed counts by itself; all do where Redis is certainly not there, or several failed in a row."""
        self._failures += 1
        gone = isinstance(error, OSError | RedisConnectionError) and not isinstance(error, TimeoutError)
        if not gone and self._failures < _FAILURES_IN_A_ROW:
            return
        if not self._is_unavailable:
            log.warning("limits are counted by this router alone: %s", type(error).__name__)
        self._unavailable_until = asyncio.get_running_loop().time() + _RETRY_AFTER_FAILURE
        metrics.LIMITS_SHARED.set(0)


def _read(reply: object) -> list[int]:
    """What the script returns. Raises ``RedisError`` for anything else, as what answers need not be a Redis."""
    if isinstance(reply, list) and len(reply) == _REPLY and all(isinstance(each, int) for each in reply):
        return reply
    raise RedisError("this is no answer to what was asked")


async def _with_timeout(asking: Awaitable[T], seconds: float) -> T:
    """What Redis answers within so many seconds, not counting those in which this loop was held up: a timer that is
    late says nothing of Redis, whose answer may be in the socket. Raises ``TimeoutError``, and what ``asking`` raises.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(asking)
    due = loop.time() + seconds
    last = due + _EXCHANGE_TIMEOUT
    try:
        while not (await asyncio.wait([task], timeout=max(0.0, due - loop.time())))[0]:
            held_up = loop.time() - due
            if held_up < _HELD_UP or loop.time() > last:
                raise TimeoutError("Redis does not answer in time")
            due = loop.time() + min(held_up, seconds)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _parts(entries: Sequence[str]) -> list[Sequence[str]]:
    return [entries[begin : begin + _BATCH_SIZE] for begin in range(0, len(entries), _BATCH_SIZE)]


def _keys(tenant: str) -> list[str]:
    """All of a tenant's are in one slot of a cluster."""
    return [f"quire:limits:{{t:{tenant}}}:{name}" for name in ("requests", "tokens", "running")]


_RELEASE, _RENEW = lua_source(__package__, "release"), lua_source(__package__, "renew")
