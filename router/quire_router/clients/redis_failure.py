"""Why Redis could not be used, in words for a log: without any part of what was sent, which its messages may repeat."""

import os
import re
import ssl
from collections.abc import Iterator
from typing import Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire_router.clients.redis_client import PasswordFileError
from quire_router.core.retry import first_error

_REASONS: Final = {
    "BUSY": "it is busy with a script",
    "CLUSTERDOWN": "its cluster is down",
    "CROSSSLOT": "it is a cluster, which routers cannot use",
    "LOADING": "it loads its data",
    "MASTERDOWN": "it is a replica without its primary",
    "MISCONF": "it cannot write its file",
    "MOVED": "it is a cluster, which routers cannot use",
    "NOAUTH": "it asks for a password",
    "NOPERM": "its user may not access all keys and channels of routers",
    "NOREPLICAS": "it has too few replicas",
    "OOM": "it is out of memory",
    "READONLY": "it is a read-only replica",
    "WRONGPASS": "the user or the password is wrong",
}
_NO_PERMISSION = re.compile(r"no permissions to run the '([a-z|]{1,40})' command")
_NO_PERMISSION_IN_SCRIPT = "The user executing the script can't"  # Redis 7.0, without the command or the key


def describe_failure(error: BaseException) -> str:
    """The cause that was observed, with Redis' own word for it; of a group that of its first error."""
    error = first_error(error)
    why = _refusal(error) or next(filter(None, map(_break, _causes(error))), None)
    if why is None and isinstance(error, TimeoutError | RedisTimeoutError):
        why = "it did not answer in time"
    if why is None and isinstance(error, RedisConnectionError) and "closed" in str(error).lower():
        why = "it closed the connection"
    return why or type(error).__name__


def _refusal(error: BaseException) -> str | None:
    """Why Redis refused a command; None if it did not, or for another reason."""
    if refused := _NO_PERMISSION.search(str(error)):
        return f"its user may not run {refused[1].upper().replace('|', ' ')}: NOPERM"
    if _NO_PERMISSION_IN_SCRIPT in str(error):
        return "its user lacks a right, which its ACL LOG names: NOPERM"
    code = str(getattr(error, "status_code", None) or str(error).partition(" ")[0])
    return f"{_REASONS[code]}: {code}" if code in _REASONS else None


def _break(cause: BaseException) -> str | None:
    """Why there is no connection, as far as this one of the causes says it."""
    if isinstance(cause, PasswordFileError):
        return str(cause)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed: {cause.reason or 'the connection was closed'}"
    if isinstance(cause, OSError) and cause.strerror:
        return os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
