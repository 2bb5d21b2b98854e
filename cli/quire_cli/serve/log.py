"""The one log of ``quire serve``: each line begins with the process that wrote it."""

import os
from collections.abc import Callable
from contextlib import suppress

WriteLine = Callable[[str, str], None]
"""Prints one line of a speaker: the text, and who says it."""
SELF = "quire"
_STANDARD_OUTPUT = 1


def say(text: str, speaker: str = SELF) -> None:
    """Prints a line, if there still is someone to read it: a reader that went away (``| head``, a closed terminal) must
    not prevent the processes from being stopped. Nothing is buffered, so that nothing is left to fail at the exit.
    """
    with suppress(OSError):
        os.write(_STANDARD_OUTPUT, f"{speaker:8} | {text}\n".encode(errors="replace"))
