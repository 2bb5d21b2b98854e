"""Folders of the user, as the XDG Base Directory Specification has them."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/quire``, or ``~/.cache/quire``. Raises ``RuntimeError`` where this user has no home."""
    return _base("XDG_CACHE_HOME", ".cache") / "quire"


def user_state_folder() -> Path:
    """``$XDG_STATE_HOME/quire``, or ``~/.local/state/quire``. Raises ``RuntimeError`` where this user has no home."""
    return _base("XDG_STATE_HOME", ".local/state") / "quire"


def _base(variable: str, default: str) -> Path:
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / default  # the specification: relative ones are ignored
