"""The command ``quire stop``: ends a server, and waits until it has ended.

It sends SIGTERM rather than SIGINT: of the latter, the second one kills, and a command that is typed again must not.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from time import monotonic

from quire_proto.cli import EXIT_USAGE, FlagParser
from quire_proto.terminal import INTERRUPTED, fail, waiting

from quire_cli.machine.running import RunningServer, running_servers, start_ticks
from quire_cli.machine.server import base_url

DESCRIPTION = """Ends a server that quire serve runs on this machine, and waits for its end. Running requests have the
seconds of the server's --shutdown-timeout. Without URL or PID there has to be only one server."""
TIMEOUT = 60.0  # seconds; longer than a server takes by default


def stop(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 1 if there is no such server or if it does not end in time, and with 2 if several
    could be meant.
    """
    flags = stop_parser().parse_args(list(arguments))
    server = _choose(flags.server, running_servers())
    name, began = f"{server.model} at {server.url}", monotonic()
    try:
        process = os.pidfd_open(server.pid)
    except OSError:
        return _say(f"{name} has ended by itself")
    ended = "stopped"
    if start_ticks(server.pid) == server.ticks:  # now that its id cannot become another's
        _say(f"stopping {name}")
        signal.pidfd_send_signal(process, signal.SIGTERM)
        try:
            with waiting(f"waiting for the end of {name}"):
                has_ended, _, _ = select.select([process], [], [], max(0.0, flags.timeout))
            if not has_ended:
                if not flags.force:
                    tip = f"quire stop --force {server.pid} kills it, and --timeout SECONDS waits longer"
                    fail(f"{name} has not ended after {flags.timeout:g} s", tip)
                signal.pidfd_send_signal(process, signal.SIGKILL)  # its engines and its router die with it
                select.select([process], [], [])
                ended = "killed"
        except KeyboardInterrupt:
            fail(f"{name} has not ended yet", status=INTERRUPTED)
    _say(f"{ended} after {monotonic() - began:.1f} s")


def stop_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire stop", DESCRIPTION, {})
    parser.add_argument("server", nargs="?", metavar="URL|PID", help="which one, as quire ps lists it")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="how long to wait")
    parser.add_argument("--force", action="store_true", help="kill it if it has not ended by then")
    return parser


def _choose(text: str | None, running: Sequence[RunningServer]) -> RunningServer:
    """The server that is meant. Ends the process if there is none, or more than one."""
    if text is None and len(running) > 1:
        which = " or ".join(f"quire stop {server.pid} ({server.model})" for server in running)
        fail(f"{len(running)} servers run here", which, EXIT_USAGE)
    found = [server for server in running if text is None or text in (str(server.pid), server.url)]
    found = found or [server for server in running if text is not None and base_url(text) == server.url]
    if not found:
        where = "here" if text is None else f"at {text}"
        fail(f"no server of quire serve runs {where}", "quire ps lists those of this user")
    return found[0]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
