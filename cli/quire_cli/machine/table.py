"""Tables in a terminal, and figures as people read them."""

import sys
from collections.abc import Sequence

from quire_proto.terminal import DIM, colored

_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns columns as wide as their longest cell, each line ended, for standard output."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    first, *others = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))
    return "".join(f"{line}\n" for line in (colored(first, DIM, sys.stdout), *others))


def size(count: float) -> str:
    """Returns bytes in the units of disks, as huggingface_hub writes them: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Returns seconds in the largest unit that fits: 3 minutes."""
    for length, unit in _UNITS:
        if seconds >= length:
            number = int(seconds / length)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "0 seconds"
