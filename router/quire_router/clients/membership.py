"""Which routers are alive, and what each of them says of itself, in Redis.

A router has one id for as long as its process lives. Under it, it registers by writing a record with a lease, renews
both when the record changes and at every heartbeat, and leaves when it closes. A router that died is no member any more
when its lease has expired, which Redis decides by its own clock, so that no clock is compared with another machine's.

There are two registers with these four operations, and each of their records has a lease of its own:

* ``PeerRegister``, for the other routers: each follows the messages of all, and reads the records once, when it comes.
  The records are keys that expire by themselves, named by a set, because a search for keys would go through every
  request that Redis remembers.
* ``TotalsRegister``, for autoscalers, which need a sum over all routers at one moment or none: the records are in one
  hash, read by one script, in one slot of a cluster, beside the time at which the first router came.

They stay two, because routers of two versions use them side by side during a rolling upgrade, because one may be lost
and the other not, and because they are lost after different times. What other parts of a router lease in Redis are
requests and not routers: the journal (``owner`` is the same id) and ``RedisRateLimiter``.
"""

from redis.asyncio import Redis

from quire_router.clients.redis_client import execute_each, lua_source

CHANNEL = "quire:load"
ROUTERS = "quire:routers"
TOTALS_KEYS = ("quire:{autoscale}:leases", "quire:{autoscale}:parts", "quire:{autoscale}:born")
"""All in one slot of a cluster."""


class PeerRegister:
    """The routers that share their load, in the Redis of ``client``. Each is forgotten ``lease`` seconds after it was
    last renewed. All methods raise what the client raises.
    """

    def __init__(self, client: Redis, lease: float) -> None:
        self._client = client
        self._lease = lease

    async def renew(self, router_id: str, record: bytes, message: bytes) -> None:
        """Registers a router or renews its lease, and sends ``message`` to all that are subscribed to ``CHANNEL``."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(_peer_key(router_id), record, px=_milliseconds(self._lease))
        pipeline.sadd(ROUTERS, router_id)
        pipeline.publish(CHANNEL, message)
        await pipeline.execute()

    async def leave(self, router_id: str, message: bytes) -> None:
        """Removes a router, and sends ``message`` as ``renew`` does."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.delete(_peer_key(router_id))
        pipeline.srem(ROUTERS, router_id)
        pipeline.publish(CHANNEL, message)
        await pipeline.execute()

    async def read(self, max_routers: int, max_bytes: int) -> list[tuple[bytes, float]]:
        """Returns the records of so many routers, chosen at random where there are more, each with the seconds for
        which it is still leased; of a longer record the first ``max_bytes`` and one more. Removes the routers whose
        lease has expired.
        """
        members = await self._client.srandmember(ROUTERS, max_routers)
        names = [name for name in members if isinstance(name, bytes)] if isinstance(members, list) else []
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            key = _peer_key(name.decode(errors="replace"))
            pipeline.getrange(key, 0, max_bytes)
            pipeline.pttl(key)
        answers = await execute_each(pipeline) if names else []
        found: list[tuple[bytes, float]] = []
        expired: list[bytes] = []
        for name, record, milliseconds in zip(names, answers[::2], answers[1::2], strict=True):
            if isinstance(record, bytes) and record:
                found.append((record, min(self._lease, milliseconds / 1000)))
            else:
                expired.append(name)
        if expired:
            await self._client.srem(ROUTERS, *expired)
        return found


class TotalsRegister:
    """The routers whose load is added up for autoscalers, as ``PeerRegister``. Here the scripts remove the routers
    whose lease has expired.
    """

    def __init__(self, client: Redis, lease: float) -> None:
        self._lease = lease
        self._publish = client.register_script(lua_source(__package__, "publish_load"))
        self._read = client.register_script(lua_source(__package__, "read_load"))

    async def renew(self, router_id: str, record: bytes) -> None:
        """Registers a router or renews its lease. The record must not be empty."""
        await self._publish(keys=TOTALS_KEYS, args=[router_id, record, _milliseconds(self._lease)])

    async def leave(self, router_id: str) -> None:
        """Removes a router."""
        await self.renew(router_id, b"")

    async def read(self, max_routers: int) -> tuple[float, int, list[bytes | None]]:
        """Returns for how many seconds there has been a router (negative: there is none), how many there are, and their
        records: none of them if there are more than ``max_routers``, and None for one that is damaged.
        """
        milliseconds, routers, records = await self._read(keys=TOTALS_KEYS, args=[max_routers])
        return milliseconds / 1000, routers, records


def _peer_key(router_id: str) -> str:
    return f"quire:load:{router_id}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
