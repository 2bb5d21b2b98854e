"""The token that engines ask their callers for: ``EngineTokens`` reads it from a file, again whenever that changes.

Each line of the file is a token, and the first is the one that routers send, so that a new one can be added before the
old one goes. A line ``optional-until TIME`` (RFC 3339) lets callers in without any until then: routers of a release
that had no tokens, while they are being replaced. Lines that begin with ``#`` are ignored.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Annotated

from pydantic import AfterValidator

log = logging.getLogger(__name__)

MAX_BYTES = 16 << 10
"""Of the file, which holds a few lines."""
RELOAD_SECONDS = 1.0
HEADER = "authorization"
"""The metadata that carries the token, as ``Bearer TOKEN``."""
_SCHEME = b"Bearer "
_OPTIONAL = "optional-until"
_TOKEN = re.compile(r"[!-~]{16,512}")


class TokenError(ValueError):
    """A file that cannot be used. The text is one sentence without its full stop, and says which file."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a file holds. Callers without a token are let in until ``optional_until``; None: they never are."""

    values: tuple[bytes, ...]
    optional_until: datetime | None = None

    @property
    def are_optional(self) -> bool:
        """Whether callers need no token now."""
        return self.optional_until is not None and datetime.now(UTC) < self.optional_until

    def accept(self, headers: Sequence[str | bytes]) -> bool:
        """Whether a call with these ``authorization`` headers is let in. Takes as long for one wrong token as for
        another of its length.
        """
        if not headers:
            return self.are_optional
        sent = [header.encode("latin-1", "replace") if isinstance(header, str) else header for header in headers]
        matches = [compare_digest(header, _SCHEME + value) for header in sent for value in self.values]
        return len(headers) == 1 and any(matches)


def read_tokens(file: Path) -> Tokens:
    """Reads a file. Raises ``TokenError``."""
    try:
        with file.open("rb") as source:
            contents = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise TokenError(f"{file} cannot be read: {error.strerror or error}") from error
    if len(contents) > MAX_BYTES:
        raise TokenError(f"{file} has more than {MAX_BYTES >> 10} KiB, and should have one token a line")
    lines = [line.strip() for line in contents.decode("latin-1").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    dates = [line for line in lines if line.startswith(f"{_OPTIONAL} ")]
    values = [line for line in lines if line not in dates]
    if not values:
        raise TokenError(f"{file} has no token: write one of at least 16 characters on a line")
    if not all(map(_TOKEN.fullmatch, values)):
        raise TokenError(f"{file} has a line that is not a token: 16 to 512 printable ASCII characters without spaces")
    until = max((_time(file, line) for line in dates), default=None)
    return Tokens(tuple(value.encode() for value in values), until)


def _time(file: Path, line: str) -> datetime:
    try:
        time = datetime.fromisoformat(line.removeprefix(_OPTIONAL).strip())
    except ValueError:
        time = datetime.min
    if time.tzinfo is None:
        raise TokenError(f"{file} has an {_OPTIONAL} without a time such as 2027-01-31T12:00:00Z")
    return time


class EngineTokens:
    """The tokens of ``file``, which is read again at most once in ``RELOAD_SECONDS``. Raises ``TokenError`` if it
    cannot be used at the start; later the former tokens stay in use, and the log says so once. Any thread may use it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tokens = read_tokens(file)
        self._read_at = monotonic()
        self._problem = ""
        self._reading = Lock()

    @property
    def current(self) -> Tokens:
        """What the file holds now, or held when it could last be used."""
        with self._reading:
            if monotonic() - self._read_at >= RELOAD_SECONDS:
                self._read_at = monotonic()
                self._reload()
        return self._tokens

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a caller sends."""
        return ((HEADER, (_SCHEME + self.current.values[0]).decode()),)

    def _reload(self) -> None:
        try:
            tokens = read_tokens(self._file)
        except TokenError as error:
            if str(error) != self._problem:
                log.warning("%s: the previous tokens stay in use", error)
            self._problem = str(error)
            return
        self._problem = ""
        if tokens != self._tokens:
            log.info("using new tokens from %s", self._file)
        self._tokens = tokens


def _readable(file: Path) -> Path:
    read_tokens(file)
    return file


TokenFile = Annotated[Path, AfterValidator(_readable)]
