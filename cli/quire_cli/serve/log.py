"""The one log of ``quire serve``: each line begins with the process that wrote it. Below it a status line may move."""

import os
from collections.abc import Callable
from contextlib import suppress

from quire_proto.terminal import CLEAR_LINE

WriteLine = Callable[[str, str], None]
"""Prints one line of a speaker: the text, and who says it."""
SELF = "quire"
_STANDARD_OUTPUT = 1
_status = ""


def say(text: str, speaker: str = SELF) -> None:
    """Prints a line, if there still is someone to read it: a reader that went away (``| head``, a closed terminal) must
    not prevent the processes from being stopped. Nothing is buffered, so that nothing is left to fail at the exit.
    """
    before, after = (CLEAR_LINE, _status) if _status else ("", "")
    _write(f"{before}{speaker:8} | {text}\n{after}")


def show_status(text: str) -> None:
    """Writes the line below the log anew; an empty one takes it away. Only for a terminal."""
    global _status  # noqa: PLW0603 - standard output is one, too
    if text or _status:
        _write(f"{CLEAR_LINE}{text}")
    _status = text


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(_STANDARD_OUTPUT, text.encode(errors="replace"))
