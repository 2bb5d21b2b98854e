"""What the services' command lines share: flags as people read them, and variables that are nobody's."""

import re
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any, NoReturn, TypeVar

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
