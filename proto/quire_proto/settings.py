"""How the services' commands come by their settings: from flags and from variables."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from quire_proto.flags import FlagParser, describe_unknown_env, drop_kubernetes_service_vars

Settings = TypeVar("Settings", bound="CliSettings")
EXIT_USAGE = 2
"""The status of a process that ends because of its settings, as of command line tools."""


class CliSettings(BaseSettings):
    """The settings of a command, which ``cli_prog_name`` names in full. Its docstring is what the help begins with, and
    ``metavars`` are what stands there for flags' values (see ``FlagParser``). ``foreign_flags`` are flags of other
    servers that people try here, each with what there is instead.
    """

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True, protected_namespaces=()
    )
    metavars: ClassVar[Mapping[str, str]] = {}
    foreign_flags: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags count more than variables, of which those of Kubernetes' Services are left out."""
        del settings_cls, dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = drop_kubernetes_service_vars(env_settings.env_vars)
        return init_settings, env_settings


def read_settings(kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """The settings from ``arguments`` and from the environment. Where they are wrong, the process ends with a line for
    each that is.
    """
    try:
        source: CliSettingsSource[FlagParser] = CliSettingsSource(
            kind,
            add_argument_method=FlagParser.add_argument,
            root_parser=FlagParser(_command(kind), kind.__doc__ or "", kind.metavars, kind.foreign_flags),
        )
        return CliApp.run(kind, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        _stop(kind, (_explain(problem["loc"], problem["msg"]) for problem in error.errors(include_url=False)))
    except SettingsError as error:
        _stop(kind, [str(error)])


def reject_unknown_env(kind: type[CliSettings], others: Iterable[str] = ()) -> None:
    """Ends the process where a variable begins like a setting and is none, nor one of ``others``: it would leave
    something as it is that somebody meant to change, such as who may use the service.
    """
    known = (*kind.model_fields, *others)
    if unknown := describe_unknown_env(kind.model_config.get("env_prefix", ""), known, os.environ):
        _stop(kind, unknown)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ").replace(" after validation", "")
    text = "needed, and not given" if text == "Field required" else text
    return f"--{str(location[0]).replace('_', '-')}: {text}" if location else text


def _stop(kind: type[CliSettings], problems: Iterable[str]) -> NoReturn:
    program = _command(kind).partition(" ")[0]
    sys.stderr.writelines(f"{program}: {problem}\n" for problem in problems)
    raise SystemExit(EXIT_USAGE)


def _command(kind: type[CliSettings]) -> str:
    return kind.model_config.get("cli_prog_name") or kind.__name__
