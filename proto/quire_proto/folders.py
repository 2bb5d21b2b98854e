"""Folders: those of the user, as the XDG Base Directory Specification has them, those whose contents are trusted, and
those whose path was mistyped.
"""

import errno
import os
import stat
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

_MOST_ENTRIES = 10_000  # of a folder in which a similar name is searched
_SIMILAR = 0.6  # as ``difflib`` counts it


def user_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/quire``, or ``~/.cache/quire``. Raises ``RuntimeError`` where this user has no home."""
    return _base("XDG_CACHE_HOME", ".cache") / "quire"


def user_state_folder() -> Path:
    """``$XDG_STATE_HOME/quire``, or ``~/.local/state/quire``. Raises ``RuntimeError`` where this user has no home."""
    return _base("XDG_STATE_HOME", ".local/state") / "quire"


def _base(variable: str, default: str) -> Path:
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / default  # the specification: relative ones are ignored


def trusted_folder(path: Path, within: Path | None = None) -> Path:
    """Makes a folder for this user alone, if it is not there, and returns it. What it has is executed or believed, so
    its owner is this user or root, and nobody else may write there but a group that root gave the volume to, as
    Kubernetes does with a pod's ``fsGroup``. No link leads out of ``within``. Raises ``OSError`` with what is wrong.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if not {path.lstat().st_uid, found.st_uid} <= {0, os.geteuid()}:
        raise _untrusted(path, f"it belongs to user {found.st_uid}")
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_given(path.resolve())):
        raise _untrusted(path, f"others may write there (mode {stat.S_IMODE(found.st_mode):o})")
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise _untrusted(path, f"it is a link that leads out of {within}")
    return path


def _is_given(path: Path) -> bool:
    """Whether root gave the folder to a group of ours, or gave it the one that it is in: with ``fsGroupChangePolicy``
    ``Always`` the kubelet does that at each start to all that a volume has.
    """
    found = path.stat()
    is_of_group = bool(found.st_mode & stat.S_ISGID) and found.st_gid in os.getgroups()
    return is_of_group and (found.st_uid == 0 or (found.st_uid == os.geteuid() and _is_given(path.parent)))


def open_trusted(path: Path) -> int:
    """Opens a file of a trusted folder, or makes it, for reading and writing; returns its descriptor. Raises
    ``OSError``, also for a link and for what is no file of this user or root.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in (0, os.geteuid()):
        return descriptor
    os.close(descriptor)
    raise _untrusted(path, "it is not a file of this user")


def _untrusted(path: Path, why: str) -> PermissionError:
    return PermissionError(
        errno.EPERM, f"it is not trusted, because {why}: remove it, or name another folder", str(path)
    )


def no_such_path(text: str) -> str:
    """Returns "no folder TEXT is here", with the folder where a relative path was looked for, and the path that was
    probably meant where one is similar.
    """
    path = Path(text).expanduser()
    near = _nearest(path)
    where = "here" if path.is_absolute() else f"in {Path.cwd()}"
    return f"no folder {text} is {where}" + (f" (did you mean {near}?)" if near else "")


def _nearest(path: Path) -> Path | None:
    """The existing path whose parts are equal or similar to those of ``path``; None if a part has none."""
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        name = part if (found / part).exists() else _similar_entry(found, part)
        if name is None:
            return None
        found /= name
    return found


def _similar_entry(folder: Path, name: str) -> str | None:
    try:
        entries = [entry.name for entry in islice(os.scandir(folder), _MOST_ENTRIES)]
    except OSError:
        return None
    return next(iter(get_close_matches(name, entries, n=1, cutoff=_SIMILAR)), None)
