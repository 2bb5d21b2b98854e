"""The servers that ``quire serve`` runs here for this user: each leaves a file in the user's state folder.

A file counts while its process runs. A process is its id and its start in ticks since boot, so that another one with
the same id is not taken for it. Names of files begin with the host's name: a home may be shared by machines.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from quire_proto.folders import trusted_folder, user_state_folder


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One ``quire serve``: where its API is, what it serves (``source`` as it was typed), on how many ``engines`` and
    which ``device``, and the port of its router's metrics at ``host``. ``since`` is Unix time. ``pid`` and ``ticks``
    identify the process.
    """

    pid: int
    ticks: int
    since: float
    url: str
    model: str
    source: str
    engines: int
    device: str
    host: str
    metrics_port: int


def running_servers() -> list[RunningServer]:
    """Returns those that run, the newest first. Removes the files of those that have ended without doing so."""
    with suppress(OSError, RuntimeError):
        if (folder := _folder()).is_dir():
            read = map(_read, trusted_folder(folder).glob(f"{_host()}-*.json"))
            return sorted(filter(None, read), key=lambda server: server.since, reverse=True)
    return []


@contextmanager
def registered(server: RunningServer) -> Iterator[None]:
    """Lists a server while the block runs; not at all where this user has no folder to write to."""
    file = None
    with suppress(OSError, RuntimeError):
        with NamedTemporaryFile("w", dir=trusted_folder(_folder()), delete=False) as writing:  # only this user reads it
            json.dump(asdict(server), writing)
        file = Path(writing.name).replace(_folder() / f"{_host()}-{server.pid}.json")
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                file.unlink(missing_ok=True)


def start_ticks(pid: int) -> int | None:
    """Returns when a process of this user started, in ticks since boot; None if there is none, or it has ended."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        # The second field is the command in parentheses, which may have any characters.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def _read(file: Path) -> RunningServer | None:
    """The server of a file; None if it has ended, which removes the file, or is of another version."""
    try:
        entry = json.loads(file.read_text())
        runs = start_ticks(entry["pid"]) == entry["ticks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not runs:
        file.unlink(missing_ok=True)
        return None
    with suppress(TypeError):
        return RunningServer(**entry)
    return None


def _folder() -> Path:
    return user_state_folder() / "running"


def _host() -> str:
    return socket.gethostname().replace("/", "-")
