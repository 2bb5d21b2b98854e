"""What all routers count together, in Redis: one round trip when a request comes, none that anybody waits for when it
ends. Redis is the clock.
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire_router import metrics
from quire_router.admission.bucket import MICROSECONDS, WINDOW
from quire_router.admission.limits import ReserveRequest, ReserveResult
from quire_router.redis_access import RedisAccess
from quire_router.redis_client import lua_source, redis_client
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger(__name__)
_ASKING = 16  # requests at a time, each on a connection of its own
_CONNECTIONS = _ASKING + 1  # one for what has ended
_FAILURES_IN_A_ROW = 3  # until all count by themselves: one that is slow may be this loop's own lag, or one key's
_HELD_UP = 0.005  # seconds by which a timer is late where the loop was held up
_PATIENCE = 2.0  # seconds of one exchange; a request waits less
_AWAY = 1.0  # seconds in which Redis is not asked again after it failed
_LAST_WORDS = 1.0  # seconds for what is not told yet when closing
_AT_ONCE = 1000
_MOST_ENDS = 50_000
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
        self._client = redis_client(place, timeout=_PATIENCE, repeats=1, connections=_CONNECTIONS)
        self._timeout = timeout
        self._lease = lease
        self._charge = self._client.register_script(lua_source(__package__, "charge"))
        self._held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._begun: dict[tuple[str, str], None] = {}
        self._ends: deque[tuple[str, str, int, int]] = deque(maxlen=_MOST_ENDS)
        self._news = asyncio.Event()
        self._telling: SupervisedTask | None = None
        self._away_until = 0.0
        self._failures = 0  # one after the other
        self._asking = asyncio.Semaphore(_ASKING)
        metrics.LIMITS_SHARED.set(1)  # until it could not be asked

    async def reserve(self, charge: ReserveRequest) -> ReserveResult | None:
        """See ``SharedRateLimiter``."""
        self._start()
        async with self._asking:  # before time is counted: others here are no reason to take Redis for slow
            return None if self._is_away else await self._ask(charge)

    async def _ask(self, charge: ReserveRequest) -> ReserveResult | None:
        try:
            asking = self._charge(keys=_keys(charge.tenant), args=self._arguments(charge))
            reply = _read(await _answered(asking, self._timeout))
        except _FAILURES as error:
            self._lose(error)
            self._note_end(charge.tenant, charge.request_id)  # it may have been taken in, and the answer was lost
            return None
        except asyncio.CancelledError:
            self._note_end(charge.tenant, charge.request_id)
            raise
        self._failures = 0
        metrics.LIMITS_SHARED.set(1)
        admitted, placed, request_debt, token_debt, running = reply
        if admitted and charge.max_concurrent is not None:
            self._held[charge.tenant][charge.request_id] += 1
        return ReserveResult(bool(admitted), bool(placed), request_debt, token_debt, running)

    def adopt(self, tenant: str, request_id: str) -> None:
        """See ``SharedRateLimiter``."""
        self._start()
        self._held[tenant][request_id] += 1
        self._begun[tenant, request_id] = None
        self._news.set()

    def release(
        self, tenant: str, request_id: str, *, placed: bool, request_refund: int = 0, token_refund: int = 0
    ) -> None:
        """See ``SharedRateLimiter``."""
        held = self._held[tenant]
        held[request_id] -= 1
        if held[request_id] <= 0:
            del held[request_id]
            self._begun.pop((tenant, request_id), None)
        if not held:
            del self._held[tenant]
        if placed or request_refund or token_refund:
            self._note_end(tenant, request_id if placed else "", request_refund, token_refund)

    async def close(self) -> None:
        """Tells what has ended, within a bounded time, and lets go of connections."""
        if self._telling is not None:
            await self._telling.stop()
            try:
                async with asyncio.timeout(_LAST_WORDS):
                    await self._tell_ends()
            except _FAILURES:
                log.warning("the end of %d requests was not counted", len(self._ends))
        await self._client.aclose()

    def _note_end(self, tenant: str, request_id: str, request_refund: int = 0, token_refund: int = 0) -> None:
        self._ends.append((tenant, request_id, request_refund, token_refund))
        self._news.set()

    def _arguments(self, charge: ReserveRequest) -> list[Any]:
        most = -1 if charge.max_concurrent is None else charge.max_concurrent
        return [charge.request_id, charge.request_cost, charge.token_cost, WINDOW, most, self._lease_time]

    @property
    def _lease_time(self) -> int:
        return round(self._lease * MICROSECONDS)

    def _start(self) -> None:
        if self._telling is None:
            self._telling = supervise("limits", self._tell)

    async def _tell(self) -> None:
        """Tells Redis what has ended and what is held as it comes, and three times a lease all that goes on."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            due = renewed + self._lease / 3
            await self._wait_for_news(due - loop.time())
            try:
                await self._tell_ends()  # first: what is held may be what has ended just before
                await self._tell_begun()
                if loop.time() >= due:
                    renewed = loop.time()
                    await self._renew_all()
            except _FAILURES as error:
                self._lose(error)
                await asyncio.sleep(_AWAY)
            except Exception:  # whatever went wrong with one of them, the others have to be renewed
                log.exception("limits cannot be told to Redis")
                await asyncio.sleep(_AWAY)

    async def _wait_for_news(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _tell_ends(self) -> None:
        """Of what could not be told, the places are given back the next time. Tokens are not: given back twice, they
        would be too many.
        """
        self._news.clear()
        while self._ends:
            ends = [self._ends.popleft() for _ in range(min(_AT_ONCE, len(self._ends)))]
            pipeline = self._client.pipeline(transaction=False)
            for tenant, request_id, *refunds in ends:
                pipeline.eval(_END, 3, *_keys(tenant), request_id, *map(str, refunds))
            try:
                answers = await pipeline.execute(raise_on_error=False)
            except BaseException:
                self._end_again(ends)
                raise
            failed = {end: error for end, error in zip(ends, answers, strict=True) if isinstance(error, Exception)}
            if failed:
                self._end_again([end for end, error in failed.items() if "WRONGTYPE" not in str(error)])
                raise next(iter(failed.values()))

    def _end_again(self, ends: Sequence[tuple[str, str, int, int]]) -> None:
        """Notes the ends of places once more, but of those that were taken again since."""
        places = [end for end in ends if end[1] and end[1] not in self._held.get(end[0], ())]
        for tenant, request_id, *_ in places[: _MOST_ENDS - len(self._ends)]:
            self._note_end(tenant, request_id)

    async def _tell_begun(self) -> None:
        """What could not be told is renewed with the rest."""
        begun, self._begun = self._begun, {}
        for tenant, request_id in begun:
            await self._renew(tenant, [request_id])

    async def _renew_all(self) -> None:
        """All that is held here, and whether Redis can be asked: perhaps nobody else does."""
        await self._client.ping()
        metrics.LIMITS_SHARED.set(1)
        for tenant, request_ids in list(self._held.items()):
            for part in _parts(list(request_ids)):
                await self._renew(tenant, part)

    async def _renew(self, tenant: str, request_ids: Sequence[str]) -> None:
        await self._client.eval(_RENEW, 1, _keys(tenant)[2], str(self._lease_time), *request_ids)

    @property
    def _is_away(self) -> bool:
        return asyncio.get_running_loop().time() < self._away_until

    def _lose(self, error: Exception) -> None:
        """One that failed counts by itself; all do where Redis is certainly not there, or several failed in a row."""
        self._failures += 1
        gone = isinstance(error, OSError | RedisConnectionError) and not isinstance(error, TimeoutError)
        if not gone and self._failures < _FAILURES_IN_A_ROW:
            return
        if not self._is_away:
            log.warning("limits are counted by this router alone: %s", type(error).__name__)
        self._away_until = asyncio.get_running_loop().time() + _AWAY
        metrics.LIMITS_SHARED.set(0)


def _read(reply: object) -> list[int]:
    """What the script returns. Raises ``RedisError`` for anything else, as what answers need not be a Redis."""
    if isinstance(reply, list) and len(reply) == _REPLY and all(isinstance(each, int) for each in reply):
        return reply
    raise RedisError("this is no answer to what was asked")


async def _answered(asking: Awaitable[T], seconds: float) -> T:
    """What Redis answers within so many seconds, not counting those in which this loop was held up: a timer that is
    late says nothing of Redis, whose answer may be in the socket. Raises ``TimeoutError``, and what ``asking`` raises.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(asking)
    due = loop.time() + seconds
    last = due + _PATIENCE
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
    return [entries[begin : begin + _AT_ONCE] for begin in range(0, len(entries), _AT_ONCE)]


def _keys(tenant: str) -> list[str]:
    """All of a tenant's are in one slot of a cluster."""
    return [f"quire:limits:{{t:{tenant}}}:{name}" for name in ("requests", "tokens", "running")]


_END, _RENEW = lua_source(__package__, "end"), lua_source(__package__, "renew")
