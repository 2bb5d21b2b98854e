"""What the services' command lines share: flags as people read them, and variables that are nobody's."""

import os
import re
import sys
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any, ClassVar, NoReturn, TypeVar

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

from quire_proto import __version__

# What Kubernetes gives a container for each Service of its namespace, as NAME_SERVICE_HOST or NAME_PORT_8000_TCP_ADDR.
_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}
_Value = TypeVar("_Value", bound=str | None)
_UNKNOWN = "unrecognized arguments: "  # as argparse begins what it says of them
_DEFAULT = re.compile(r" \(default: (.*)\)$")
# What a default is called that has no word of its own on a command line; what is nothing is not told.
_WORDS = {"null": "", "[]": "", "True": "on", "False": "off"}


class FlagParser(ArgumentParser):
    """The root of a command line of pydantic-settings: says what a value is rather than which type holds it, and knows
    ``--version``. Its ``add_argument`` is to be the source's ``add_argument_method``.

    ``metavars`` are what stands for a flag's value in its help, by the flag's name; other values are called by their
    type. A default is told as one would write it, and one that is nothing is not told. A flag that does not exist ends
    the process with one line, which says of one of other servers' (``foreign``) what there is instead.
    """

    def __init__(
        self, program: str, description: str, metavars: Mapping[str, str], foreign: Mapping[str, str] | None = None
    ) -> None:
        self._metavars = dict(metavars)
        self._foreign = dict(foreign or {})
        self._flags: list[str] = []
        super().__init__(
            prog=program,
            description=cleandoc(description),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--version", action="version", version=f"{program} {__version__}", help="show the version and exit"
        )

    def add_argument(self, *names: str, **options: Any) -> Action:
        """As ``ArgumentParser`` does."""
        if "metavar" in options:
            options["metavar"] = self._metavars.get(names[0]) or _kind(options["metavar"])
        self._flags += names
        options["help"] = _DEFAULT.sub(_tell_default, options.get("help") or "")
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Ends with a line, without the usage, in which tens of flags would hide it."""
        if message.startswith(_UNKNOWN):
            flag = re.split(r"[ =]", message.removeprefix(_UNKNOWN))[0]  # its value is nobody's to read in a log
            message = f"{flag} is no flag{self._instead(flag)}"
        self.exit(2, f"{self.prog}: {message}. {self.prog} --help tells them all.\n")

    def _instead(self, flag: str) -> str:
        if flag in self._foreign:
            return f"; {self._foreign[flag]}"
        close = get_close_matches(flag, self._flags, 1, cutoff=0.7)
        return f"; {close[0]} is one" if close else ""


def _tell_default(told: re.Match[str]) -> str:
    value = _WORDS.get(told[1], told[1])
    if value.startswith("["):
        value = ", ".join(entry.strip("' ") for entry in value[1:-1].split(","))
    return f" (default: {value})" if value else ""


def drop_kubernetes_service_vars(environment: Mapping[str, _Value]) -> dict[str, _Value]:
    """The variables without what Kubernetes says of its Services: a Service ``quire-engine`` gives every container a
    ``QUIRE_ENGINE_PORT`` such as ``tcp://10.0.0.1:9000``, which is not meant as the port of an engine.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _SERVICE_LINK.fullmatch(name.upper())
        and not (name.upper().endswith("PORT") and _SERVICE_ADDRESS.fullmatch(str(value)))
    }


def describe_unknown_env(prefix: str, fields: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that begins with ``prefix`` and is the setting of no field."""
    known = {field.upper() for field in fields}
    wanted = {name: name.upper().removeprefix(prefix) for name in drop_kubernetes_service_vars(environment)}
    return [
        f"{name} is no setting{_meant(prefix, field, known)}."
        for name, field in wanted.items()
        if name.upper() == prefix + field and field not in known
    ]


def _meant(prefix: str, field: str, known: Iterable[str]) -> str:
    close = get_close_matches(field, known, 1, cutoff=0.7)
    return f"; {prefix}{close[0]} is one" if close else ""


def _kind(metavar: Any) -> Any:
    """The library's name of a type as a word; ``list[str]`` is one of its entries."""
    if not isinstance(metavar, str):
        return metavar
    return _KINDS.get(metavar.removeprefix("list[").removesuffix("]"), metavar)


# How the services' commands come by their settings: from flags and from variables.


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


def join_host_port(host: str, port: int) -> str:
    """``host:port``, or ``[host]:port`` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
