"""The command ``quire-router``: installs signal handlers before the imports, which take long."""

import gc
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serves until a signal comes; one that comes before there is anything to close ends the process at once. The
    subcommand ``simulate`` simulates a fleet instead, and ``usage`` prints what tenants used.
    """
    if sys.argv[1:2] == ["simulate"]:
        from quire_router.simulation.cli import simulate

        simulate(sys.argv[2:])
        return
    if sys.argv[1:2] == ["usage"]:
        from quire_router.usage.export import run as run_usage

        run_usage(sys.argv[2:])
        return
    for number in SIGNALS:
        signal.signal(number, _exit)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC writes a line for what any client sends wrong
    gc.disable()  # what is imported stays: looking for garbage meanwhile takes a seventh of the time
    from quire_router.app import run

    run(sys.argv[1:])


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # as shells report a signal; an exception would come out of whatever is being imported


if __name__ == "__main__":
    main()
