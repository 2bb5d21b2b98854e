"""What the commands share: reading settings, and ending with one sentence."""

import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource
from quire_proto.flags import FlagParser

Settings = TypeVar("Settings", bound=BaseSettings)
_METAVARS = {
    "--model": "FOLDER",
    "--served-model-name": "NAME",
    "--host": "ADDRESS",
    "--port": "PORT",
    "--metrics-port": "PORT",
    "--max-model-len": "N",
    "--kv-cache-memory": "BYTES",
    "--swap-space": "GIB",
    "--trace": "FILE",
    "--output": "FILE",
    "--plot": "FILE",
}


def read_settings(kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """The settings from these arguments and from the environment. Exits with 2 when they are wrong."""
    program = kind.model_config.get("cli_prog_name") or "quire-engine"
    parser = FlagParser(program, kind.__doc__ or "", _METAVARS)
    try:
        source: CliSettingsSource[FlagParser] = CliSettingsSource(
            kind, add_argument_method=FlagParser.add_argument, root_parser=parser
        )
        return CliApp.run(kind, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        quit_with(2, "; ".join(_explain(problem["loc"], problem["msg"]) for problem in error.errors()))


def quit_with(status: int, message: str) -> NoReturn:
    """Ends the process with one sentence."""
    sys.stderr.write(f"quire-engine: {message}\n")
    raise SystemExit(status)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    said = message.removeprefix("Value error, ")
    return f"--{str(location[0]).replace('_', '-')}: {said}" if location else said
