"""The services' command lines: settings from flags and environment variables, with one-line errors and readable help.

``CliSettings`` is the base of each command's settings, ``read_settings`` reads them, and ``reject_unknown_env`` rejects
misspelt variables. ``FlagParser`` writes the help and the error messages of flags.
"""

import errno
import os
import re
import sys
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import AfterValidator, ValidationError
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
from quire_proto.terminal import bold_headings, did_you_mean, fail, report_error
from quire_proto.units import unit_metavar

if TYPE_CHECKING:
    from argparse import _ArgumentGroup as ArgumentGroup

Settings = TypeVar("Settings", bound="CliSettings")
EXIT_USAGE = 2
"""The exit status for wrong settings, as command line tools have it."""
PROGRAM_VARIABLE = "QUIRE_PROGRAM"
"""What the user typed, where another program passed its arguments on."""


# What Kubernetes gives a container for each Service of its namespace, as NAME_SERVICE_HOST or NAME_PORT_8000_TCP_ADDR.
_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}
_CLOSE = 0.8  # how alike a misspelt name is; other words for a thing are not
_Value = TypeVar("_Value", bound=str | None)
_UNKNOWN = "unrecognized arguments: "  # the beginning of argparse's message
_PAIR = re.compile(r"[^-=/][^=/]*=")  # the beginning of NAME=VALUE, and of no path
_DEFAULT = re.compile(r" \(default: (.*)\)$")
_OF_FLAG = re.compile(r"argument (\S+): (?:invalid (.+) value: (.*)|(.*))")  # argparse's message on a flag's value
_TYPES = {"int": "whole number", "float": "number"}
_PLAINER = {"expected": "needs a value", "ignored": "takes no value"}  # by the first word of argparse's
# What a setting must be, by pydantic's type of the error; those of numbers and words, which are never secret.
_RULES = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "finite_number": "finite",
    "literal_error": "{expected}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
}
# Other words for values, as in vLLM and torch.
_SYNONYMS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


_LISTEN_ADVICE = {
    errno.EADDRINUSE: "another program has this port: stop it, or choose another port",
    errno.EADDRNOTAVAIL: "--host is not an address of this machine",
    errno.EACCES: "ports below 1024 need privileges: choose another port",
}
# Defaults that are shown in other words; empty ones are not shown.
_WORDS = {"null": "", "[]": "", "True": "on", "False": "off"}


class CliSettings(BaseSettings):
    """The base of a command's settings. ``cli_prog_name`` is the command's full name, and its docstring the beginning
    of the help. ``metavars`` and ``foreign_flags`` are described in ``FlagParser``.
    """

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True, protected_namespaces=()
    )
    metavars: ClassVar[Mapping[str, str]] = {}
    foreign_flags: ClassVar[Mapping[str, str]] = {}
    flag_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Further names of flags, by flag."""
    examples: ClassVar[str | None] = None
    """What stands at the end of the help."""

    @classmethod
    def all_metavars(cls) -> dict[str, str]:
        """The placeholders of flags: those of units, and ``metavars``."""
        units = {name: unit_metavar(field) for name, field in cls.model_fields.items()}
        return {**{f"--{name.replace('_', '-')}": unit for name, unit in units.items() if unit}, **cls.metavars}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags take precedence over variables; variables of Kubernetes' Services are ignored."""
        del settings_cls, dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = drop_kubernetes_service_vars(env_settings.env_vars)
        return init_settings, env_settings


def read_settings(kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """Reads the settings from ``arguments`` and the environment. If some are wrong, ends the process with a
    line for each.
    """
    try:
        return CliApp.run(kind, cli_args=list(arguments), cli_settings_source=_source(kind, settings_parser(kind)))
    except ValidationError as error:
        _stop(_explain(problem) for problem in error.errors(include_url=False))
    except SettingsError as error:
        _stop([str(error)])


def settings_parser(kind: type[CliSettings]) -> "FlagParser":
    """Returns the parser of a command's flags, still without them: ``read_settings`` adds them."""
    program = os.environ.get(PROGRAM_VARIABLE) or kind.model_config.get("cli_prog_name") or kind.__name__
    parser = FlagParser(program, kind.__doc__ or "", kind.all_metavars(), kind.foreign_flags)
    parser.aliases, parser.epilog = kind.flag_aliases, kind.examples
    return parser


def flags_parser(kind: type[CliSettings]) -> "FlagParser":
    """Returns the parser of a command's flags, with all of them."""
    parser = settings_parser(kind)
    _source(kind, parser)
    return parser


def _source(kind: type[CliSettings], parser: "FlagParser") -> "CliSettingsSource[FlagParser]":
    return CliSettingsSource(kind, add_argument_method=FlagParser.add_argument, root_parser=parser)


def reject_unknown_env(kind: type[CliSettings], others: Iterable[str] = ()) -> None:
    """Ends the process if a variable begins with the settings' prefix but is neither a setting nor one of ``others``: a
    misspelt setting would silently have no effect, such as one that restricts access.
    """
    known = (*kind.model_fields, *others)
    if unknown := describe_unknown_env(kind.model_config.get("env_prefix", ""), known, os.environ):
        _stop(unknown)


def _explain(problem: Mapping[str, Any]) -> str:
    """Returns what is wrong with a setting, without pydantic's words for it where others are plainer."""
    location, kind = problem["loc"], problem["type"]
    limits = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in problem.get("ctx", {}).items()
    }
    text = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    if kind == "missing":
        text = "needed, and not given"
    elif kind in _RULES:
        text = f"must be {_RULES[kind].format(**limits).replace(chr(39), '')}, not {problem['input']}"
    if kind == "literal_error" and (meant := _SYNONYMS.get(str(problem["input"]).lower())):
        text += did_you_mean(meant if f"'{meant}'" in str(limits["expected"]) else "")
    return f"--{str(location[0]).replace('_', '-')}: {text}" if location else text


def _stop(problems: Iterable[str]) -> NoReturn:
    for problem in problems:
        report_error(problem)
    raise SystemExit(EXIT_USAGE)


class FlagParser(ArgumentParser):
    """The root parser of a pydantic-settings command line, with readable help and ``--version``. Its ``add_argument``
    is the source's ``add_argument_method``.

    ``metavars`` are the placeholders of flags' values in the help, by flag; others are named by their type. Defaults
    are shown as a user would write them, and empty ones are not shown. An unknown flag ends the process with one line;
    ``foreign`` are flags of other servers, each with what to use instead. A flag whose placeholder is ``NAME=…`` may
    have several such values behind it, as with vLLM.
    """

    def __init__(
        self, program: str, description: str, metavars: Mapping[str, str], foreign: Mapping[str, str] | None = None
    ) -> None:
        self._metavars = dict(metavars)
        self._foreign = dict(foreign or {})
        self.lists_all_with = "--help"
        self.aliases: Mapping[str, Sequence[str]] = {}
        self._flags: list[str] = []
        self._pair_flags: set[str] = set()
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
        """As ``ArgumentParser.add_argument``, with the flag's aliases."""
        names += tuple(self.aliases.get(names[0], ()))
        return super().add_argument(*names, **self._prepare(names, options))

    def add_to(self, group: "ArgumentGroup", *names: str, **options: Any) -> Action:
        """As ``add_argument``, listed in a group of this parser."""
        return group.add_argument(*names, **self._prepare(names, options))

    def _prepare(self, names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        if "metavar" in options:
            options["metavar"] = self._metavars.get(names[0]) or _kind(options["metavar"])
            if str(options["metavar"]).startswith("NAME="):
                self._pair_flags.update(names)
        self._flags += names
        options["help"] = _DEFAULT.sub(_format_default, options.get("help") or "")
        return options

    def format_help(self) -> str:
        """As ``ArgumentParser.format_help``, with a usage of one line: the flags are listed below it."""
        operands = (_operand(each) for each in self._actions if not each.option_strings)
        self.usage = self.usage or " ".join((self.prog, "[FLAGS]", *operands))
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """As ``ArgumentParser.print_help``, with bold headings in a terminal."""
        stream = sys.stdout if file is None else file
        stream.write(bold_headings(self.format_help(), stream))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ``ArgumentParser.parse_known_args``, which ``parse_args`` calls."""
        return super().parse_known_args(list(self._join_pairs(sys.argv[1:] if args is None else args)), namespace)

    def _join_pairs(self, arguments: Iterable[str]) -> Iterator[str]:
        """The arguments, where ``--flag a=1 b=2`` is ``--flag=a=1,b=2``."""
        rest = deque(arguments)
        while rest:
            flag, equals, value = rest.popleft().partition("=")
            if flag not in self._pair_flags or (not equals and not rest):
                yield flag + equals + value
                continue
            values = [value if equals else rest.popleft()]
            while rest and _PAIR.match(rest[0]):
                values.append(rest.popleft())
            yield f"{flag}={','.join(values)}"

    def error(self, message: str) -> NoReturn:
        """Ends the process with an error and a tip, without the usage, whose many flags would hide them."""
        tip = f"{self.prog} {self.lists_all_with} lists all options"
        if message.startswith(_UNKNOWN):
            flag = re.split(r"[ =]", message.removeprefix(_UNKNOWN))[0]  # without its value, which may be secret
            foreign = flag.partition(".")[0].replace("_", "-")  # vLLM's --flag.key and --a_flag
            tip = self._foreign.get(foreign, tip)
            near = "" if foreign in self._foreign else self._nearest(flag)
            kind = "unknown option" if flag.startswith("-") else "unexpected argument"
            message = f"{kind} {flag}{did_you_mean(near)}"
        elif found := _OF_FLAG.fullmatch(message):
            flag, kind, value, rest = found.groups()
            wrong = f"must be a {_TYPES.get(kind, kind)}, not {value.strip(chr(39))}" if kind else ""
            message = f"{flag}: {wrong or _PLAINER.get(rest.partition(' ')[0], rest)}"
        fail(message, tip, EXIT_USAGE)

    def _nearest(self, flag: str) -> str:
        if not flag.startswith("-"):  # vLLM takes the model without a flag
            return "--model" if "--model" in self._flags else ""
        names = {name.lstrip("-"): name for name in self._flags}
        close = get_close_matches(flag.lstrip("-"), names, 1, cutoff=_CLOSE)
        close = close or [name for name in names if sorted(name) == sorted(flag.lstrip("-"))]  # short, letters swapped
        return names[close[0]] if close else ""


def _operand(action: Action) -> str:
    name = str(action.metavar or action.dest)
    return {"*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _format_default(match: re.Match[str]) -> str:
    value = _WORDS.get(match[1], match[1])
    if value.startswith("["):
        value = ", ".join(entry.strip("' ") for entry in value[1:-1].split(","))
    return f" (default: {value})" if value else ""


def _kind(metavar: Any) -> Any:
    """The placeholder for a type's name in pydantic-settings; that of ``list[str]`` is one of its entries."""
    if not isinstance(metavar, str):
        return metavar
    return _KINDS.get(metavar.removeprefix("list[").removesuffix("]"), metavar)


def drop_kubernetes_service_vars(environment: Mapping[str, _Value]) -> dict[str, _Value]:
    """The variables without those that Kubernetes sets for Services: a Service ``quire-engine`` gives every container a
    ``QUIRE_ENGINE_PORT`` such as ``tcp://10.0.0.1:9000``, which is not the port setting of an engine.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _SERVICE_LINK.fullmatch(name.upper())
        and not (name.upper().endswith("PORT") and _SERVICE_ADDRESS.fullmatch(str(value)))
    }


def describe_unknown_env(prefix: str, fields: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that begins with ``prefix`` and is not the setting of a field."""
    known = {field.upper() for field in fields}
    wanted = {name: name.upper().removeprefix(prefix) for name in drop_kubernetes_service_vars(environment)}
    return [
        f"unknown variable {name}{did_you_mean(_nearest(prefix, field, known))}"
        for name, field in wanted.items()
        if name.upper() == prefix + field and field not in known
    ]


def _nearest(prefix: str, field: str, known: Iterable[str]) -> str:
    close = get_close_matches(field, known, 1, cutoff=_CLOSE)
    return f"{prefix}{close[0]}" if close else ""


def strip_brackets(host: str) -> str:
    """The address without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


ListenAddress = Annotated[str, AfterValidator(strip_brackets)]


def describe_listen_error(flag: str, host: str, port: int, error: OSError) -> str:
    """Returns why nobody can listen where ``flag`` says, and what to do, without a point at the end."""
    number = error.errno or 0  # negative where a name is not found
    reason = os.strerror(number) if number > 0 else error.strerror
    why = f"{flag}: {join_host_port(host, port)} cannot be listened on: {reason}"
    advice = _LISTEN_ADVICE.get(number)
    return f"{why}; {advice}" if advice else why


def join_host_port(host: str, port: int) -> str:
    """``host:port``, or ``[host]:port`` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
