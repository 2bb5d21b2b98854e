"""The one error of model folders, and how other errors are told in it. Knows nothing else."""

import sys
from typing import NoReturn


class ModelError(Exception):
    """A model cannot be served. The text is one sentence that names the file or setting at fault, and the problem."""


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, without a full stop: torch's go on with advice to programmers."""
    return str(error).partition("\n")[0].rstrip(".")


# How the engine's commands end with one sentence.


def quit_with(status: int, message: str) -> NoReturn:
    """Ends the process with one sentence."""
    sys.stderr.write(f"quire-engine: {message}\n")
    raise SystemExit(status)
