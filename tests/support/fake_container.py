"""The files from which a process learns how much memory it may have."""

from pathlib import Path

GIB = 1 << 30


def container(root: Path, limit: int | None, *, total: int = 256 * GIB, available: int = 128 * GIB) -> Path:
    """A root folder in which this process has so many bytes to itself; None for a machine without such a limit."""
    files = {
        "proc/meminfo": f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n" if limit is None else f"{limit}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
