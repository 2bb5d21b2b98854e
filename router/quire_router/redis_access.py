"""Where Redis is, and who a router is there. Opens no connection."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio.connection import parse_url
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
