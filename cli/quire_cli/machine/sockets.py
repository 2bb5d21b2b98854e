"""Whether addresses are this machine's, ports free, and who listens on them."""

import os
import socket
from contextlib import suppress
from pathlib import Path

LOCALHOST = "127.0.0.1"
_TABLES = "/proc/net/tcp", "/proc/net/tcp6"
_LISTEN = "0A"  # the state in these tables


def is_free(port: int, host: str = LOCALHOST) -> bool:
    """Whether the port can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


def is_local(host: str) -> bool:
    """Whether this machine has the address, so that some port of it can be listened on."""
    return is_free(0, host)


def listens(group: int, port: int) -> bool:
    """Whether a process of the group listens on the port; True also where the system does not say who does."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    try:
        return not sockets or any(sockets & _open_files(process) for process in _members(group))
    except PermissionError:  # of a Python with capabilities, as for ports below 1024
        return True


def _listeners(port: int) -> set[str]:
    """The inodes of the sockets that listen on the port, at any address; empty where the system does not say."""
    found: set[str] = set()
    for table in _TABLES:
        with suppress(OSError):  # no IPv6, or a sandbox
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    found.add(more[5])
    return found


def _members(group: int) -> list[int]:
    members: list[int] = []
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):  # no process, or one that has ended
            if os.getpgid(int(entry)) == group:
                members.append(int(entry))
    return members


def _open_files(process: int) -> set[str]:
    files: set[str] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                files.add(os.readlink(descriptor))
    return files
