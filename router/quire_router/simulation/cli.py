"""The subcommand ``quire-router simulate``. Only this module of the package can be imported without the engine."""

from collections.abc import Sequence
from importlib.util import find_spec

from quire_proto.terminal import fail


def simulate(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, and with 1 and one sentence if something is not installed
    or a file cannot be read or written.
    """
    if find_spec("quire_engine") is None:
        fail("the simulator needs the engine's code", "pip install ./engine in the checkout")
    from quire_router.simulation.command import run

    run(arguments)
