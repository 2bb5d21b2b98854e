"""Objects in Redis: the text of ``NAME`` in the hash ``quire:{NAME}:object``, its parts in ``quire:{NAME}:parts``, and
collections and accounts in two keys each (``enter.lua``, ``charge.lua``).
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from quire_router.clients.redis_client import RedisAccess, execute_each, lua_source, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.core.errors import journal_unavailable, store_full
from quire_router.journal.objects import ANY, MAX_NAMES, Excess, Quota, StoredObject

log = logging.getLogger(__name__)
T = TypeVar("T")


class RedisObjectStore:
    """See ``ObjectStore``. Each call waits ``timeout`` seconds at most, and is repeated once on a new connection where
    its own broke: a part that is written again stays as it is, and a text that was replaced counts as such.
    """

    def __init__(self, access: RedisAccess | str, *, timeout: float = 5.0) -> None:
        self._client: Redis = redis_client(access, timeout=timeout, connections=8)
        self._replace = self._client.register_script(lua_source(__package__, "object"))
        self._charge = self._client.register_script(lua_source(__package__, "charge"))
        self._enter = self._client.register_script(lua_source(__package__, "enter"))
        self._away = False  # as the log has it

    async def get(self, name: str) -> StoredObject | None:
        """See ``ObjectStore``."""
        return (await self.get_many([name]))[0]

    async def get_many(self, names: Sequence[str]) -> list[StoredObject | None]:
        """See ``ObjectStore``."""
        if not names:
            return []

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.hmget(_object(name), ["data", "version"])
            return await execute_each(pipeline)

        return [_read(reply) for reply in await self._call(exchange)]

    async def put(self, name: str, data: bytes, version: int, ttl: float, *, drop_parts: bool = False) -> bool:
        """See ``ObjectStore``."""
        keys = [_object(name), _parts(name)]
        arguments: list[Any] = [version, data, ceil(ttl), "drop" if drop_parts else ""]
        return bool(await self._call(lambda: self._replace(keys, arguments)))

    async def delete(self, name: str) -> None:
        """See ``ObjectStore``."""
        await self._call(lambda: self._client.unlink(_object(name), _parts(name)))

    async def add_part(self, name: str, number: int, data: bytes, ttl: float) -> bool:
        """See ``ObjectStore``."""

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hsetnx(_parts(name), str(number), data)
            pipeline.expire(_parts(name), ceil(ttl))
            return await pipeline.execute()

        return bool((await self._call(exchange))[0])

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """See ``ObjectStore``."""
        if not numbers:
            return []
        found: Any = await self._call(lambda: self._client.hmget(_parts(name), [str(each) for each in numbers]))
        return list(found)

    async def part_numbers(self, name: str) -> list[int]:
        """See ``ObjectStore``."""
        return sorted(map(int, await self._call(lambda: self._client.hkeys(_parts(name)))))

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        """See ``ObjectStore``."""
        await self._call(lambda: self._enter(_collection(collection), [name, ceil(ttl)]))

    async def leave(self, collection: str, *names: str) -> None:
        """See ``ObjectStore``."""

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=True)
            for key in _collection(collection):
                pipeline.zrem(key, *names)
            return await pipeline.execute()

        await self._call(exchange)

    async def names(self, collection: str) -> list[str]:
        """See ``ObjectStore``."""
        found: Any = await self._call(lambda: self._client.zrange(_collection(collection)[0], 0, MAX_NAMES - 1))
        return [name.decode() for name in found]

    async def charge(self, account: str, name: str, size: int, ttl: float, quota: Quota = ANY) -> Excess | None:
        """See ``ObjectStore``."""
        limits = ["" if most is None else most for most in (quota.max_names, quota.max_bytes)]
        arguments = [name, size, ceil(ttl), *limits]
        excess = await self._call(lambda: self._charge(_account(account), arguments))
        return Excess(excess) if excess else None

    async def discharge(self, account: str, name: str) -> None:
        """See ``ObjectStore``."""
        await self._call(lambda: self._charge(_account(account), [name, ""]))

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _call(self, exchange: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await exchange()
        except OutOfMemoryError:
            raise store_full() from None
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                log.warning("files and batches cannot be read or written in Redis: %s", describe_failure(error))
            self._away = True
            raise journal_unavailable() from error
        if self._away:
            log.info("files and batches are available in Redis again")
        self._away = False
        return answer


def _read(reply: Any) -> StoredObject | None:
    """Returns the object in a reply. One whose key is something else's has no text: only its own reader fails."""
    if isinstance(reply, ResponseError):
        return StoredObject(b"", 0)
    data, version = reply
    if version is None:
        return None
    return StoredObject(data or b"", int(version)) if version.isdigit() else StoredObject(b"", 0)


def _object(name: str) -> str:
    return f"quire:{{{name}}}:object"


def _parts(name: str) -> str:
    return f"quire:{{{name}}}:parts"


def _collection(name: str) -> list[str]:
    key = f"quire:collection:{name}"
    return [key, f"quire:{{{key}}}:expirations"]  # in the same slot


def _account(name: str) -> list[str]:
    return [f"quire:{{account:{name}}}:expirations", f"quire:{{account:{name}}}:sizes"]
