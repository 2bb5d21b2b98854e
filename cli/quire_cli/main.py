"""The command ``quire``: finds the subcommand and passes the other arguments on."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from quire_proto import __version__
from quire_proto.cli import PROGRAM_VARIABLE
from quire_proto.terminal import bold_headings, did_you_mean, fail

from quire_cli.commands import COMMANDS, Command, usage

_HELP = ("--help", "-h")


def main() -> None:
    """Runs the subcommand that the arguments begin with. Exits with 2 if they name none."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    for command in COMMANDS:
        words = command.name.split()
        if arguments[: len(words)] == words:
            return _run(command, arguments[len(words) :])
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"quire {__version__}\n")
    elif arguments and arguments[-1] in _HELP and (len(arguments) == 1 or _below(arguments[0])):
        sys.stdout.write(bold_headings(usage(), sys.stdout))
    else:
        _refuse(arguments)


def _run(command: Command, arguments: Sequence[str]) -> None:
    """Imports what the command needs, and no more, and runs it."""
    if command.service is not None:
        module, subcommand = command.service
        os.environ[PROGRAM_VARIABLE] = f"quire {command.name}"
        os.execv(sys.executable, [sys.executable, "-m", module, subcommand, *arguments])  # noqa: S606 - this Python
    module, _, function = command.run.partition(":")
    getattr(import_module(module), function)(arguments)


def _below(first: str) -> list[str]:
    """The commands whose first of two words this is."""
    return [command.name for command in COMMANDS if command.name.startswith(f"{first} ")]


def _refuse(arguments: Sequence[str]) -> NoReturn:
    """Ends the process with what is wrong with this command, or with the list of commands if there was none."""
    first, second = [*arguments[:2], "", ""][:2]
    if not first:
        sys.stderr.write(bold_headings(usage(), sys.stderr))
        raise SystemExit(2)
    if below := _below(first):
        fail(f"quire {first} needs a subcommand: {' or '.join(below)}", "quire --help lists all commands", 2)
    names = [command.name for command in COMMANDS]
    alone = [name.partition(" ")[0] for name in names]
    near = get_close_matches(first, alone, 1) or get_close_matches(f"{first} {second}".strip(), names, 1)
    fail(f"unknown command {first}{did_you_mean(near[0] if near else '')}", "quire --help lists all commands", 2)


if __name__ == "__main__":
    main()
