"""What a command says when it cannot go on."""

import sys
from typing import NoReturn


def fail(sentence: str, status: int = 1) -> NoReturn:
    """Ends the process with ``status``, and one sentence on standard error."""
    sys.stderr.write(f"quire: {sentence}\n")
    raise SystemExit(status)
