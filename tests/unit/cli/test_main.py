"""``quire`` finds its subcommands, and passes on those of the services."""

import subprocess
import sys

import pytest


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
        (["doctor"], "usage: quire doctor"),
        ([], "usage: quire COMMAND"),
    ],
    ids=" ".join,
)
def test_each_command_tells_its_flags(arguments: list[str], told: str) -> None:
    done = quire(*arguments, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(told)


@pytest.mark.parametrize("arguments", [[], ["serv"], ["bench"], ["simulate", "both"]])
def test_what_is_no_command_shows_those_that_there_are(arguments: list[str]) -> None:
    done = quire(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "commands:" in done.stderr
