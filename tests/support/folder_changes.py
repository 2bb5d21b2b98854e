"""Changes of model folders: keys of JSON files, and files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]
"""Changes a folder."""


def edit(name: str, **changes: Any) -> Change:
    """A change of the keys of a JSON file; None takes a key away."""

    def change(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({key: value for key, value in {**old, **changes}.items() if value is not None}))

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def file(name: str, content: object) -> Change:
    """A file with a text, or with JSON."""

    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def lost(*names: str) -> Change:
    """A folder without some of its files."""

    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def moved(old: str, new: str) -> Change:
    """A file by another name."""
    return lambda folder: (folder / old).rename(folder / new)
