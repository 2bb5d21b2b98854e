"""Clients of Redis: each component that talks to it has one of its own, with its own timeouts."""

import asyncio
from collections.abc import Iterable
from importlib.resources import files
from typing import Final

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from quire_router.redis_access import RedisAccess


def redis_client(
    place: RedisAccess | str,
    *,
    timeout: float,
    repeats: int = 0,
    connections: int | None = None,
    limited_by_caller: bool = False,
) -> Redis:
    """A client of the Redis at ``place`` that waits ``timeout`` seconds for each connection, and for each answer unless
    the caller puts a time limit around each exchange (``limited_by_caller``). A command whose connection fails is sent
    again ``repeats`` times, at once: callers know better when to try later. With ``connections`` it opens so many at
    most, and waits ``timeout`` for one that is free. Raises ``ValueError``,
    without its password, when that is no URL.
    """
    access = RedisAccess.of(place)
    terms = {
        "socket_timeout": None if limited_by_caller else timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), repeats),
    }
    if connections is None:
        pool = ConnectionPool.from_url(access.url, **terms)
    else:
        pool = BlockingConnectionPool.from_url(access.url, max_connections=connections, timeout=timeout, **terms)
    access.identify(pool.connection_kwargs)
    pool.connection_class = _MENDED[pool.connection_class]
    return Redis.from_pool(pool)


def lua_source(package: str, name: str) -> str:
    """The text of the script ``name.lua`` that is installed in ``package``."""
    return files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")


class _Mended(AbstractConnection):
    """Ends when its task is cancelled. The library sends within ``asyncio.wait_for``, which in Python 3.11 loses a
    cancellation that comes in the moment in which the command is on its way: its task would go on for ever, for nobody.
    (https://github.com/python/cpython/issues/86296, mended in 3.12.)

    Says of a connection that broke just before that it did: uvloop raises a RuntimeError, which the library lets pass.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """As the library's."""
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # the next one here would be given this command's answer
            raise asyncio.CancelledError


class _Tcp(_Mended, Connection):
    pass


class _Tls(_Mended, SSLConnection):
    pass


class _Unix(_Mended, UnixDomainSocketConnection):
    pass


_MENDED: Final[dict[type, type[_Mended]]] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
