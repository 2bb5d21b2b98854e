"""What the commands share: reading settings, and ending with one sentence."""

import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """The settings from these arguments and from the environment. Exits with 2 when they are wrong."""
    try:
        return CliApp.run(kind, cli_args=list(arguments))
    except ValidationError as error:
        quit_with(2, "; ".join(_explain(problem["loc"], problem["msg"]) for problem in error.errors()))


def quit_with(status: int, message: str) -> NoReturn:
    """Ends the process with one sentence."""
    sys.stderr.write(f"quire-engine: {message}\n")
    raise SystemExit(status)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    said = message.removeprefix("Value error, ")
    return f"--{str(location[0]).replace('_', '-')}: {said}" if location else said
