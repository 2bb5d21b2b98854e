"""Where Redis is, and who a router is there. Opens no connection."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The Redis at ``url`` (``redis://``, ``rediss://`` for TLS, ``unix://``), as the user and with the password that
    are in it, or with these instead. Raises ``ValueError``, without the password, when that is no URL, or where it has
    a user or a password already.
    """

    url: str = field(repr=False)
    username: str | None = None
    password_file: Path | None = None

    def __post_init__(self) -> None:
        in_url = self._of_url()
        if self.username is not None and in_url.get("username"):
            raise ValueError("the Redis URL has a user name already")
        if self.password_file is not None and in_url.get("password"):
            raise ValueError("the Redis URL has a password already")

    @classmethod
    def of(cls, place: "RedisAccess | str") -> "RedisAccess":
        """``place`` itself, or the Redis at that URL."""
        return cls(place) if isinstance(place, str) else place

    def identify(self, terms: dict[str, Any]) -> None:
        """Changes the ``terms`` of connections to ``url``, which have the user and the password in it."""
        if self.password_file is not None:
            username = self.username or terms.pop("username", None)
            terms["credential_provider"] = PasswordFile(self.password_file, username)
        elif self.username is not None:
            terms["username"] = self.username

    def _of_url(self) -> dict[str, Any]:
        try:
            return dict(parse_url(self.url))
        except ValueError:
            # The library's text can quote a part of a password that holds a slash or a colon.
            raise ValueError("the Redis URL is not of the form redis://[user:password@]host:port/database") from None


class PasswordFile(CredentialProvider):
    """The password in a file, read again for each connection, so that one that changed is used from the next on."""

    def __init__(self, file: Path, username: str | None = None) -> None:
        self._file = file
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User, if there is one, and password. Raises what a server raises that cannot be reached."""
        try:
            password = read_password(self._file)
        except ValueError as error:
            raise RedisConnectionError(str(error)) from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: reading it takes no longer than finding out whether it would."""
        return self.get_credentials()


def read_password(file: Path) -> str:
    """What is in ``file``, without the ends of lines after it, as a shell reads it. Raises ``ValueError``, without a
    word of it.
    """
    try:
        password = file.read_bytes().decode().rstrip("\n")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8") from None
    if not password:
        raise ValueError(f"{file} is empty")
    return password


# Clients of Redis: each component that talks to it has one of its own, with its own timeouts.


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
