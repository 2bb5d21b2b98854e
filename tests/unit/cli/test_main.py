"""``quire`` finds its subcommands, and passes on those of the services."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from quire_cli.commands import COMMANDS, Command, parser_of, usage
from quire_cli.main import main
from quire_proto import __version__

Done = subprocess.CompletedProcess[str]
Quire = Callable[..., Done]


def quire_process(*arguments: str) -> Done:
    command = [sys.executable, "-m", "quire_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Quire:
    """The same in this process, for commands that do not become a service."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        assert isinstance(status, int)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it becomes a service"))
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_tells_its_flags_by_the_name_that_was_typed(quire: Quire, command: Command) -> None:
    done = (quire if command.service is None else quire_process)(*command.name.split(), "--help")
    assert done.returncode == 0
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith(f"usage: quire {command.name} ")
    assert second == "", "the usage is one line"
    parser = parser_of(command)
    shown = set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--[a-z0-9-]+)", done.stdout, re.MULTILINE))
    known = {name for action in parser._actions for name in action.option_strings}
    assert shown <= known
    assert len(shown) > 1


def test_help_of_a_command_is_shown_by_help(quire: Quire) -> None:
    assert quire("help", "chat").stdout == quire("chat", "--help").stdout
    assert quire("help", "bench", "serve").stdout.startswith("usage: quire bench serve ")
    assert quire("help").stdout == quire("--help").stdout == quire("bench", "--help").stdout == usage()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "usage: quire COMMAND [FLAGS]"),
        (["serv"], "error: unknown command serv (did you mean serve?)"),
        (["run", "model"], "error: unknown command run"),
        (["bench"], "error: quire bench needs a subcommand: bench serve or bench offline"),
        (["bench", "--num-prompts"], "error: quire bench needs a subcommand: bench serve or bench offline"),
        (["simulate", "both"], "error: quire simulate needs a subcommand: simulate engine or simulate fleet"),
    ],
)
def test_an_unknown_command_is_named(quire: Quire, arguments: list[str], expected: str) -> None:
    done = quire(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{expected}\n")
    assert done.stderr.endswith("tip: quire --help lists all commands\n" if arguments else usage())


def test_every_command_is_listed() -> None:
    for command in COMMANDS:
        assert f"\n  {command.usage} " in usage()


def test_version_is_printed() -> None:
    done = quire_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quire {__version__}\n", "")
