"""The command ``quire``: finds the subcommand and passes the other arguments on."""

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from quire_proto import __version__
from quire_proto.terminal import did_you_mean, fail

USAGE = """usage: quire COMMAND [FLAGS]

commands:
  serve MODEL      serve a model on this machine: a router and its engines, one log
  chat             talk to a running server
  complete         continue a text at a running server
  demo             watch an answer survive the death of its engine (kill -9)
  doctor           say what this machine has, and what is missing
  bench serve      measure an OpenAI-compatible server: latency, throughput and goodput at given request rates
  bench offline    compare the engine with others on this machine (quire-engine bench)
  simulate engine  try a trace of requests on a scheduler without a model (quire-engine simulate)
  simulate fleet   try a trace of requests on routers and engines without a model (quire-router simulate)

quire COMMAND --help shows the flags of a command, and quire --version the version.
"""
COMMANDS = re.findall(r"^  ([a-z]+(?: [a-z]+)?)", USAGE, re.MULTILINE)
# Commands of the services, which take the place of this process.
PASSED_ON = {
    ("bench", "offline"): ("quire_engine.cli", "bench"),
    ("simulate", "engine"): ("quire_engine.cli", "simulate"),
    ("simulate", "fleet"): ("quire_router.main", "simulate"),
}


def main() -> None:
    """Runs the subcommand that the arguments begin with. Exits with 2 if they name none."""
    arguments = sys.argv[1:]
    first, second = [*arguments[:2], "", ""][:2]
    if (first, second) in PASSED_ON:
        module, command = PASSED_ON[first, second]
        os.execv(sys.executable, [sys.executable, "-m", module, command, *arguments[2:]])  # noqa: S606 - this Python
    elif (first, second) == ("bench", "serve"):
        from quire_cli.bench.serve import bench_serve

        bench_serve(arguments[2:])
    elif first in ("serve", "chat", "complete", "demo", "doctor"):
        _run(first, arguments[1:])
    elif first == "--version":
        sys.stdout.write(f"quire {__version__}\n")
    elif first == "help" or (arguments and arguments[-1] in ("--help", "-h")):
        sys.stdout.write(USAGE)
    else:
        _refuse(arguments)


def _refuse(arguments: Sequence[str]) -> NoReturn:
    """Ends the process with what is wrong with this command, or with the list of commands if there was none."""
    first, second = [*arguments[:2], "", ""][:2]
    if not first:
        sys.stderr.write(USAGE)
        raise SystemExit(2)
    if below := [command for command in COMMANDS if command.startswith(f"{first} ")]:
        fail(f"quire {first} needs a subcommand: {' or '.join(below)}", "quire --help lists all commands", 2)
    alone = [command.partition(" ")[0] for command in COMMANDS]
    near = get_close_matches(first, alone, 1) or get_close_matches(f"{first} {second}".strip(), COMMANDS, 1)
    fail(f"unknown command {first}{did_you_mean(near[0] if near else '')}", "quire --help lists all commands", 2)


def _run(command: str, arguments: Sequence[str]) -> None:
    """Imports what the command needs, and no more, and runs it."""
    if command == "serve":
        from quire_cli.serve.serve_command import serve

        serve(arguments)
    elif command == "chat":
        from quire_cli.chat.chat_command import chat

        chat(arguments)
    elif command == "demo":
        from quire_cli.demo.demo_command import demo

        demo(arguments)
    elif command == "doctor":
        from quire_cli.doctor.doctor_command import doctor

        doctor(arguments)
    else:
        from quire_cli.chat.chat_command import complete

        complete(arguments)


if __name__ == "__main__":
    main()
