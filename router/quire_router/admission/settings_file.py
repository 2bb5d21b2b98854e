"""Files of settings, TOML or JSON, that are read again when they were replaced: ``read_content`` checks one against a
pydantic model, and ``FileWatch`` looks for another version of it. The tenants' file and that of targets are such.
"""

import asyncio
import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Gauge
from pydantic import BaseModel, ValidationError

log = logging.getLogger(__name__)

WATCH_PERIOD = 2.0  # seconds between two looks at a file
_MAX_BYTES = 4 * 2**20


class SettingsFileError(ValueError):
    """The file cannot be used. The message is one sentence with the path of the entry at fault, and never has a key."""


class SettingsFile(Protocol):
    """What a file says."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it was read from."""
        ...

    @property
    def summary(self) -> str:
        """What it says, in a few words."""
        ...


ContentT = TypeVar("ContentT", bound=BaseModel)
FileT = TypeVar("FileT", bound=SettingsFile)


def read_content(path: Path, content: type[ContentT]) -> ContentT:
    """Returns what is in ``path``, which is JSON if its name ends in ``.json`` and else TOML. Raises
    ``SettingsFileError``.
    """
    text = read_text(path, str(path))
    try:
        parsed = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsFileError(f"{path}: it cannot be read: {_format_parse_error(error)}.") from None
    try:
        return content.model_validate(parsed)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise SettingsFileError(f"{path}: {_format_location(problem['loc'])}{_format_problem(problem)}.") from None


def read_text(path: Path, where: str) -> str:
    """Returns the text of a file, which errors name as ``where``. Raises ``SettingsFileError``."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise SettingsFileError(f"{where}: it has more than {_MAX_BYTES} bytes.")
        return content.decode()
    except OSError as error:
        raise SettingsFileError(f"{where}: it cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsFileError(f"{where}: it is not UTF-8 text.") from None


def _format_location(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return f"{path[:128]}: " if path else ""


def _format_problem(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such setting"
    if problem["type"] == "missing":
        return "it is missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _format_parse_error(error: Exception) -> str:
    """Returns where the parser failed; never the text that stands there."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}"
    return str(error).partition("\n")[0] if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__


class FileWatch(Generic[FileT]):
    """Reads a file, from which ``file`` was read, again with ``read`` when it or one that it names was replaced. One
    that cannot be used is logged once, and ``current`` is 0; what was read before stays in force.
    """

    def __init__(self, path: Path, file: FileT, read: Callable[[Path], FileT], current: Gauge) -> None:
        self._path = path
        self._paths = file.paths
        self._read = read
        self._current = current
        self._seen: list[_Version] | None = _versions(self._paths)
        self._problem = ""
        current.set(1)

    async def look(self) -> FileT | None:
        """Returns what is in the file now, None if that was returned before or cannot be used. Never raises."""
        seen = await asyncio.to_thread(_versions, self._paths)
        if seen == self._seen:
            return None
        try:
            file = await asyncio.to_thread(self._read, self._path)
        except SettingsFileError as error:
            self._seen = None
            self._current.set(0)
            if str(error) != self._problem:
                log.error("%s What was read before stays in force.", error)
            self._problem = str(error)
            return None
        # What is replaced while it is read has another version the next time, and other files are read once more.
        self._seen = seen if file.paths == self._paths else None
        self._paths, self._problem = file.paths, ""
        self._current.set(1)
        log.info("%s was read again: %s", self._path, file.summary)
        return file


_Version = tuple[int, int, int] | None


def _versions(paths: Iterable[Path]) -> list[_Version]:
    """Returns what differs once a file is replaced, also where that is a link, as in mounted Secrets."""
    versions: list[_Version] = []
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:
            versions.append(None)
        else:
            versions.append((state.st_ino, state.st_mtime_ns, state.st_size))
    return versions
