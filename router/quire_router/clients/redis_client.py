"""Where Redis is, with which credentials, and clients of it: each component has its own, with its own timeouts."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

_RECONNECT_PERIOD = 1.0  # seconds at least between two failovers: a Redis that stays read-only is not stormed
_NOT_PRIMARY = ("READONLY", "MASTERDOWN", "NOREPLICAS", "NOAUTH")
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # seconds; less than NATs wait


class Failovers:
    """How often clients of one Redis had to leave the server that they were connected to: it answered that it is not
    the primary, or not any more, while the name may lead to another one by now. A connection that was made before the
    last of these is replaced when it is used next, whichever client has it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._noticed_at = -_RECONNECT_PERIOD

    def notice(self, error: Exception, count: int) -> None:
        """An ``error`` was the reply on a connection that was made after ``count`` failovers."""
        # Redis 6 has the error of a command in a script in the middle of its text.
        if count == self.count and _is_no_primary(error) and monotonic() >= self._noticed_at + _RECONNECT_PERIOD:
            self.count += 1
            self._noticed_at = monotonic()


def _is_no_primary(error: Exception) -> bool:
    code = getattr(error, "status_code", None)
    return code in _NOT_PRIMARY or any(f"{each} " in str(error) for each in _NOT_PRIMARY)


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The Redis at ``url`` (``redis://``, ``rediss://`` for TLS, ``unix://``), with the user and password that are in
    it, or with ``username`` and ``password_file``. Raises ``ValueError``, without the password, if it is no URL, or has
    a user or password as well.
    """

    url: str = field(repr=False)
    username: str | None = None
    password_file: Path | None = None
    failovers: Failovers = field(default_factory=Failovers, repr=False, compare=False)

    def __post_init__(self) -> None:
        in_url = self._of_url()
        if self.username is not None and in_url.get("username"):
            raise ValueError("the Redis URL has a user name already")
        if self.password_file is not None and in_url.get("password"):
            raise ValueError("the Redis URL has a password already")

    @classmethod
    def of(cls, access: "RedisAccess | str") -> "RedisAccess":
        """``access`` itself, or the Redis at that URL."""
        return cls(access) if isinstance(access, str) else access

    def add_credentials(self, options: dict[str, Any]) -> None:
        """Adds the credentials to the ``options`` of connections to ``url``, which have those of the URL."""
        if self.password_file is not None:
            username = self.username or options.pop("username", None)
            options["credential_provider"] = PasswordFile(self.password_file, username)
        elif self.username is not None:
            options["username"] = self.username

    def _of_url(self) -> dict[str, Any]:
        try:
            return dict(parse_url(self.url))
        except ValueError:
            # The library's text can quote a part of a password that holds a slash or a colon.
            raise ValueError("the Redis URL is not of the form redis://[user:password@]host:port/database") from None


class PasswordFileError(ValueError):
    """A file with a password cannot be used; its text has nothing of the password."""


class PasswordFile(CredentialProvider):
    """The password in a file, read for each connection, so that the next one uses a changed password."""

    def __init__(self, file: Path, username: str | None = None) -> None:
        self._file = file
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User, if there is one, and password. Raises ``redis.ConnectionError`` if the file cannot be used."""
        try:
            password = read_password(self._file)
        except PasswordFileError as error:
            raise RedisConnectionError(str(error)) from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As ``get_credentials``: reading the file takes less than handing it to a thread."""
        return self.get_credentials()


def read_password(file: Path) -> str:
    """The text in ``file`` without newlines at its end, as a shell reads it. Raises ``PasswordFileError``."""
    try:
        password = file.read_bytes().decode().rstrip("\n")
    except OSError as error:
        raise PasswordFileError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise PasswordFileError(f"{file} is not text in UTF-8") from None
    if not password:
        raise PasswordFileError(f"{file} is empty")
    return password


def redis_client(
    access: RedisAccess | str,
    *,
    timeout: float,
    repeats: int = 1,
    connections: int | None = None,
    limited_by_caller: bool = False,
) -> Redis:
    """A client that waits ``timeout`` seconds for each connection, and for each reply unless the caller puts a time
    limit around each exchange (``limited_by_caller``). A command whose connection breaks is sent again ``repeats``
    times, at once, on a new one: callers know better when to try later. With ``connections`` it opens so many at most,
    and waits ``timeout`` for one that is free. Raises ``ValueError``, without the password, if ``access`` is no URL.
    """
    where = RedisAccess.of(access)
    options = {
        "socket_timeout": None if limited_by_caller else timeout,
        "socket_connect_timeout": timeout,
        "driver_info": None,  # what it would tell Redis of itself, a user with few rights may not
        "socket_keepalive": True,
        "socket_keepalive_options": _KEEPALIVE,
        "retry": Retry(NoBackoff(), repeats, (RedisConnectionError,)),  # what was too slow once is not waited for twice
        # With these notifications the library does not find out before use that the other end closed a connection.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    if connections is None:
        pool = ConnectionPool.from_url(where.url, **options)
    else:
        pool = BlockingConnectionPool.from_url(where.url, max_connections=connections, timeout=timeout, **options)
    where.add_credentials(pool.connection_kwargs)
    pool.connection_kwargs["failovers"] = where.failovers
    if pool.connection_class is UnixDomainSocketConnection:
        del pool.connection_kwargs["socket_keepalive"], pool.connection_kwargs["socket_keepalive_options"]
    pool.connection_class = _FIXED[pool.connection_class]
    return Redis.from_pool(pool)


async def execute_each(pipeline: Pipeline) -> list[Any]:
    """The replies to a pipeline's commands, each of another key. Where a key is of another kind than its command's, the
    reply is that ``RedisError``, and the others stand. Raises any other error, such as that Redis is busy with a script
    or loads its file: it says nothing of what is stored.
    """
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, RedisError) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return replies


def lua_source(package: str, name: str) -> str:
    """The text of the script ``name.lua`` that is installed in ``package``."""
    return files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")


class _FixedConnection(AbstractConnection):
    """A connection that is replaced after a failover. It also works around two bugs. The library sends within
    ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that comes while the command is being sent: the
    cancelled task would run on for ever. (https://github.com/python/cpython/issues/86296, fixed in 3.12.)

    For a connection that broke just before, uvloop raises a RuntimeError, which the library does not handle.
    """

    def __init__(self, *, failovers: Failovers, **options: Any) -> None:
        super().__init__(**options)
        self._failovers = failovers
        self._made_after = failovers.count

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """As ``Connection.connect_check_health``."""
        if not self.is_connected:
            self._made_after = self._failovers.count
        await super().connect_check_health(check_health, retry_socket_connect)

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """As ``Connection.send_packed_command``. Raises ``redis.ConnectionError`` also where uvloop does not."""
        if self._made_after != self._failovers.count:
            await self.disconnect(nowait=True)  # sending connects again
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # the next command here would get this one's reply
            raise asyncio.CancelledError

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        """As ``Connection.read_response``."""
        try:
            return await super().read_response(*arguments, **options)
        except (ResponseError, AuthenticationError) as error:
            self._failovers.notice(error, self._made_after)
            raise


class _Tcp(_FixedConnection, Connection):
    """Looks up its host by itself. When a time limit ends a connection of uvloop's that still looks it up, that goes on
    without an owner, and its late failure is logged as an exception that nobody retrieved.
    """

    _address: str | int = ""

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            for number, (*_, place) in enumerate(found, 1):
                self._address = place[0]
                try:
                    await super()._connect()  # type: ignore[no-untyped-call]  # the library's has no types
                    break
                except OSError:
                    if number == len(found):
                        raise

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "host": self._address}


class _Tls(_Tcp, SSLConnection):
    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self.host}


class _Unix(_FixedConnection, UnixDomainSocketConnection):
    pass


_FIXED: Final[dict[type, type[_FixedConnection]]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
