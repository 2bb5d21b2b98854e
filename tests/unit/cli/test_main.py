"""``quire`` finds its subcommands, and passes on those of the services."""

import subprocess
import sys

import pytest
from quire_cli.main import COMMANDS, PASSED_ON, USAGE
from quire_proto import __version__


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "offline"], "usage: quire-engine bench"),
        (["simulate", "engine"], "usage: quire-engine simulate"),
        (["simulate", "fleet"], "usage: quire-router simulate"),
        (["bench", "serve"], "usage: quire bench serve"),
        (["chat"], "usage: quire chat"),
        (["complete"], "usage: quire complete"),
        (["serve"], "usage: quire serve"),
        (["demo"], "usage: quire demo"),
        (["doctor"], "usage: quire doctor"),
        ([], "usage: quire COMMAND"),
    ],
    ids=" ".join,
)
def test_each_command_tells_its_flags(arguments: list[str], told: str) -> None:
    done = quire(*arguments, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "usage: quire COMMAND [FLAGS]"),
        (["serv"], "error: unknown command serv (did you mean serve?)"),
        (["run", "model"], "error: unknown command run"),
        (["bench"], "error: quire bench needs a subcommand: bench serve or bench offline"),
        (["bench", "--num-prompts"], "error: quire bench needs a subcommand: bench serve or bench offline"),
        (["simulate", "both"], "error: quire simulate needs a subcommand: simulate engine or simulate fleet"),
    ],
)
def test_an_unknown_command_is_named(arguments: list[str], told: str) -> None:
    done = quire(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{told}\n")
    assert done.stderr.endswith("tip: quire --help lists all commands\n" if arguments else USAGE)


def test_every_command_is_listed() -> None:
    listed = {
        "serve",
        "chat",
        "complete",
        "demo",
        "doctor",
        "bench serve",
        *(" ".join(command) for command in PASSED_ON),
    }
    assert set(COMMANDS) == listed


def test_version_is_printed() -> None:
    done = quire("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quire {__version__}\n", "")
