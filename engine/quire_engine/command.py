"""How the engine's commands end with one sentence."""

import sys
from typing import NoReturn


def quit_with(status: int, message: str) -> NoReturn:
    """Ends the process with one sentence."""
    sys.stderr.write(f"quire-engine: {message}\n")
    raise SystemExit(status)
