"""Looks for background requests that nobody holds. Changes nothing but the index of them, which may be behind."""

from typing import Any

from redis.asyncio import Redis

from quire_router.journal.bounds import MAX_ORPHANS
from quire_router.journal.codec import MAX_LEASE, is_epoch
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.server import to_milliseconds

MAX_EXAMINED = 4 * MAX_ORPHANS


class OrphanFinder:
    """Each search begins where the last one ended, and at the end with the first again: those that nobody takes up, as
    their models run elsewhere or they fail again and again, hold up the others for a round at most.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._start = 0

    async def find(self) -> list[str]:
        """At most 16 of them. Takes from the index what has ended. Raises what the client raises."""
        now = to_milliseconds(await self._client.time())
        await self._correct_future_leases(now)
        names = await self._next_names(now)
        states = await self._states(names)
        free = [name for name in names if _is_free(states[name], now)][:MAX_ORPHANS]
        if len(free) == MAX_ORPHANS:
            names = names[: names.index(free[-1]) + 1]
        ended = [name for name in names if _has_ended(states[name])]
        if ended:
            await self._client.zrem(BACKGROUND, *ended)
        self._start += len(names) - len(ended)
        return [name.decode() for name in free]

    async def _correct_future_leases(self, now: int) -> None:
        """Sets entries to ``now`` (ms) whose lease ends later than any lease can: they were written before Redis' clock
        went back. The holder, if it lives, writes the right time with its next heartbeat.
        """
        beyond = f"({now + MAX_LEASE}"
        ahead: Any = await self._client.zrangebyscore(BACKGROUND, beyond, "+inf", start=0, num=MAX_EXAMINED)
        if ahead:
            await self._client.zadd(BACKGROUND, dict.fromkeys(ahead, now), xx=True)

    async def _next_names(self, now: int) -> list[bytes]:
        """What comes next in the index, whose first are those with the oldest leases."""
        count = await self._client.zcount(BACKGROUND, "-inf", now)
        if self._start >= count:
            self._start = 0
        last = min(count, self._start + MAX_EXAMINED) - 1
        names: Any = await self._client.zrange(BACKGROUND, self._start, last) if count else []
        return list(names)

    async def _states(self, names: list[bytes]) -> dict[bytes, Any]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(keys(name.decode(errors="replace"))[0], "epoch", "reason", "lease_expires")
        return dict(zip(names, await pipeline.execute(raise_on_error=False), strict=True))


def _has_ended(state: Any) -> bool:
    """Whether a record is gone, so damaged that nobody can ever claim it, or has a reason why it ended."""
    return isinstance(state, Exception) or not is_epoch(state[0] or b"") or state[1] is not None


def _is_free(state: Any, now: int) -> bool:
    """Whether a record has not ended and nobody holds it."""
    if _has_ended(state):
        return False
    expires = state[2] or b"0"
    return not expires.isdigit() or not 0 < int(expires) - now <= MAX_LEASE
