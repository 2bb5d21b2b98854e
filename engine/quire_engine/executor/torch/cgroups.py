"""The settings of this process's control groups, version 2 and version 1, as text. Knows files, not what they mean."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def read_cgroup(root: Path, controller: str, unified: str, *legacy: str) -> Iterator[tuple[str, ...]]:
    """The contents of some files in the process's group of ``controller`` and in all groups above it.

    ``unified`` is the file's name in version 2, ``legacy`` are the names in version 1. Where a file is not, its text is
    empty.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _with_parents(root / "sys/fs/cgroup", group):
                yield (read_text(folder / unified),)
        elif controller in controllers.split(","):
            for folder in _with_parents(root / "sys/fs/cgroup" / controllers, group):
                yield tuple(read_text(folder / name) for name in legacy)


def read_text(path: Path) -> str:
    """The text of a file without white space around it; nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a group and its parents. The path may be one of the host's: then only the mount is there."""
    folder = mount / group.strip("/")
    yield folder
    yield from (parent for parent in folder.parents if parent.is_relative_to(mount))
