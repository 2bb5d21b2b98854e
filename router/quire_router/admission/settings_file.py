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


FileVersions = dict[Path, tuple[int, int, int] | None]
"""Of each file its inode, the time of its last change in nanoseconds and its size in bytes; None where none is."""


class SettingsFile(Protocol):
    """What a file says."""

    @property
    def versions(self) -> FileVersions:
        """The files that it was read from, and their versions just before (``versions_of``)."""
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
    """Reads a file again with ``read`` when it, or one that it names, was replaced since it was read as ``file``. One
    that cannot be used is logged once, and ``current`` is 0; what was read before stays in force.
    """

    def __init__(self, path: Path, file: FileT, read: Callable[[Path], FileT], current: Gauge) -> None:
        self._path = path
        self._versions = file.versions
        self._read = read
        self._current = current
        self._problem = ""
        current.set(1)

    async def look(self) -> FileT | None:
        """Returns what is in the file now, None if that was returned before or cannot be used. Never raises."""
        if not self._problem and await asyncio.to_thread(versions_of, self._versions) == self._versions:
            return None
        try:
            file = await asyncio.to_thread(self._read, self._path)
        except SettingsFileError as error:
            self._current.set(0)
            if str(error) != self._problem:
                log.error("%s The previous content stays in force.", error)
            self._problem = str(error)
            return None
        self._versions, self._problem = file.versions, ""
        self._current.set(1)
        log.info("%s was read again: %s", self._path, file.summary)
        return file


def versions_of(paths: Iterable[Path]) -> FileVersions:
    """Returns what differs once a file is replaced, also where that is a link, as in mounted Secrets; None for one that
    is not there. Whoever asks before reading finds out later about what was replaced meanwhile.
    """
    versions: FileVersions = {}
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:
            versions[path] = None
        else:
            versions[path] = state.st_ino, state.st_mtime_ns, state.st_size
    return versions
