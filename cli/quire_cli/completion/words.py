"""What can be typed behind ``quire``: the commands of the table, with the flags of their parsers."""

import re
from argparse import SUPPRESS, Action
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire_cli.commands import COMMANDS, Command, parser_of

Value = Literal["none", "words", "file", "other"]
_FILES = ("FILE", "FOLDER", "PATH", "MODEL")  # placeholders, or their ends, of what may be a path
_CHOICES = re.compile(r"\{(.+)\}")


@dataclass(frozen=True, slots=True)
class Flag:
    """``names`` are as they are typed; ``value`` is what follows, one of ``words`` if there are any."""

    names: Sequence[str]
    summary: str
    value: Value
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Typed:
    """A command with its flags. What else may follow is one of ``operands``, or a path if it ``takes_files``."""

    command: Command
    flags: Sequence[Flag]
    takes_files: bool
    operands: Sequence[str] = ()


def typed_commands() -> list[Typed]:
    """Returns all commands, in the order of the table."""
    return [_typed(command) for command in COMMANDS]


def first_words() -> dict[str, str]:
    """Returns what may follow ``quire``, each with what it does."""
    found: dict[str, str] = {}
    for command in COMMANDS:
        first, _, second = command.name.partition(" ")
        found[first] = f"{found[first]}, {second}" if first in found else second or command.summary
    return {**found, "help": "show the flags of a command"}


def second_words() -> dict[str, list[str]]:
    """Returns the commands of two words, by the first."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        first, _, second = command.name.partition(" ")
        if second:
            found.setdefault(first, []).append(second)
    return found


def _typed(command: Command) -> Typed:
    actions = parser_of(command)._actions
    flags = [_flag(each) for each in actions if each.option_strings and each.help != SUPPRESS]
    operands = [each for each in actions if not each.option_strings]
    words = [word for each in operands for word in each.choices or ()]
    return Typed(command, flags, any(str(each.metavar) in _FILES for each in operands), words)


def _flag(action: Action) -> Flag:
    summary = re.split(r"[.;:] |\.$| \(default", " ".join((action.help or "").replace("%%", "%").split()))[0]
    placeholder = str(action.metavar or "")
    words = action.choices or ((found := _CHOICES.fullmatch(placeholder)) and found[1].split(",")) or ()
    value: Value = "words" if words else "file" if placeholder.endswith(_FILES) else "other"
    return Flag(action.option_strings, summary, "none" if action.nargs == 0 else value, [str(word) for word in words])
