"""Clients of Redis: each room that talks to it has one of its own, with its own patience. Knows no key of any room."""

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def redis_client(url: str, *, timeout: float, repeats: int = 0, connections: int | None = None) -> Redis:
    """A client of the Redis at ``url`` that waits ``timeout`` seconds for each connection and each answer. A command
    whose connection fails is sent again so many times, at once: who uses the client knows better when to try again.
    With ``connections`` it opens so many at most, and waits ``timeout`` for one that is free. Raises ``ValueError``,
    without its password, when that is no URL.
    """
    retry = Retry(NoBackoff(), repeats)
    try:
        if connections is None:
            return Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=retry)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=retry,
        )
    except ValueError:
        # The library's text can quote a part of a password that holds a slash or a colon.
        raise ValueError("the Redis URL is not of the form redis://[user:password@]host:port/database") from None
    return Redis.from_pool(pool)
