"""Folders: those of the user, as the XDG Base Directory Specification has them, and those whose path was mistyped."""

import os
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


def no_such_path(text: str) -> str:
    """Returns "no folder TEXT is here", and the path that was probably meant where one is similar."""
    near = _nearest(Path(text).expanduser())
    return f"no folder {text} is here" + (f" (did you mean {near}?)" if near else "")


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
