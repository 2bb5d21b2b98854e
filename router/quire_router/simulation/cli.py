"""The subcommand ``quire-router simulate``. Only this module of the package can be imported without the engine."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def simulate(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, and with 1 and one sentence if something is not installed
    or a file cannot be read or written.
    """
    if find_spec("quire_engine") is None:
        sys.stderr.write("quire-router: The simulator needs the engine's code: pip install ./engine in the checkout.\n")
        raise SystemExit(1)
    from quire_router.simulation.command import run

    run(arguments)
