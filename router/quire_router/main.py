"""The command ``quire-router``: says what signals mean before anything that takes long is imported."""

import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serves until a signal comes; one that comes before there is anything to close just ends the process. The
    subcommand ``simulate`` simulates a fleet instead.
    """
    if sys.argv[1:2] == ["simulate"]:
        from quire_router.simulation.cli import simulate

        simulate(sys.argv[2:])
        return
    for number in SIGNALS:
        signal.signal(number, _exit)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes a line of its own for each engine that leaves
    from quire_router.app import run

    run(sys.argv[1:])


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # as shells report a signal; an exception would come out of whatever is being imported


if __name__ == "__main__":
    main()
