"""``quire-router simulate``, as far as it goes without the engine: only this module can be imported then."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def simulate(arguments: Sequence[str]) -> None:
    """The subcommand. Exits with 2 for wrong settings, 1 with one sentence for what is not installed and for a file
    that it cannot read or write.
    """
    if find_spec("quire_engine") is None:
        sys.stderr.write("quire-router: Simulating runs the engine's own code: pip install 'quire-router[simulate]'.\n")
        raise SystemExit(1)
    from quire_router.simulation.command import run

    run(arguments)
