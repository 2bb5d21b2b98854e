"""The command ``quire ps``: lists the servers that run on this machine."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from time import time
from urllib.request import ProxyHandler, build_opener

from quire_proto.cli import FlagParser, join_host_port

from quire_cli.machine.running import RunningServer, running_servers
from quire_cli.machine.table import duration, table

DESCRIPTION = """Lists the servers that quire serve runs on this machine for this user, the newest first."""
HEAD = ("PID", "MODEL", "URL", "ENGINES", "DEVICE", "SINCE")
_ANSWER_TIMEOUT = 2.0  # seconds


def ps(arguments: Sequence[str]) -> None:
    """Runs the subcommand."""
    flags = ps_parser().parse_args(list(arguments))
    servers = [(server, ready_engines(server)) for server in running_servers()]
    if flags.json:
        listed = [
            {key: value for key, value in asdict(server).items() if key != "ticks"} | {"ready_engines": ready}
            for server, ready in servers
        ]
        sys.stdout.write(f"{json.dumps(listed, indent=2)}\n")
    elif servers:
        sys.stdout.write(table(HEAD, [_row(server, ready) for server, ready in servers]))
    else:
        sys.stderr.write("no server runs here; quire serve MODEL starts one\n")


def ps_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire ps", DESCRIPTION, {})
    parser.add_argument("--json", action="store_true", help="print the list as JSON; since is Unix time")
    return parser


def ready_engines(server: RunningServer) -> int:
    """Returns how many engines of a server can take requests, as its router says; 0 where that does not answer."""
    url = f"http://{join_host_port(server.host, server.metrics_port)}/health"
    # Without an engine the answer is a 503, an error of urllib.
    with suppress(OSError, ValueError), build_opener(ProxyHandler({})).open(url, timeout=_ANSWER_TIMEOUT) as answer:
        return max(json.load(answer)["ready_engines"].values(), default=0)
    return 0


def _row(server: RunningServer, ready: int) -> list[str]:
    engines = f"{ready} of {server.engines} ready"
    since = f"{duration(time() - server.since)} ago"
    return [str(server.pid), server.model, server.url, engines, server.device, since]
