"""Grammars, in llguidance's dialect of Lark, that make a model write calls which the parsers read without doubt."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_proto.json_schema import simplify
from quire_proto.text import tool_formats as hermes
from quire_proto.text.reasoning import THINK_BEGIN, THINK_END
from quire_proto.text.tool_formats import ToolFormat

ANYTHING: Mapping[str, Any] = {"type": "object"}
_WHITESPACE = r"( |\n[ \t]{0,32})"  # as in every other JSON: no room for an endless gap
_SCHEMA = re.compile(r"(?:reply|arguments_(\d+)): %json (.*)")
_NAME = re.compile(r'"\\"name\\"" ":" " " "\\"([^"\\]*)\\""')
_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that may be called, and the JSON schema of its arguments, an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """What a model may think before its calls: whether it does at all, and whether the prompt has begun it."""

    marked: bool = False
    opened: bool = False


def tool_call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolSpec],
    *,
    forced: bool,
    parallel: bool,
    thinking: ReasoningState = ReasoningState(),
    special: Collection[str] = (),
    reply: Mapping[str, Any] | None = None,
) -> str:
    """Calls of ``tools`` alone where they are ``forced``. Otherwise either those or JSON of the schema ``reply``, and
    without one text that may end in calls. One call, unless ``parallel``. ``special`` are the marks that the tokenizer
    has as special tokens, which no text can write. Raises ``RecursionError`` for a schema that is nested too deeply.
    """
    marks = _Marks(frozenset(special))
    if forced or reply is not None:
        rules = _calls_or(tool_format, parallel, None if forced else reply)
    else:
        rules = _free(tool_format, marks, parallel)
    # Where text is free it may hold thoughts anyway, unless their mark is no text.
    apart = forced or reply is not None or thinking.opened or marks.is_token(THINK_BEGIN)
    rules += _thoughts(thinking, marks) if thinking.marked and apart else ["start: answer"]
    return "\n".join(["%llguidance {}", *rules, _TEXT, *_calls(tool_format, tools, marks)])


def schema_on_line(grammar: str, line: int) -> tuple[str | None, Any] | None:
    """The schema that stands in a ``line``, counted from 1, of what ``tool_call_grammar`` returned, behind the name of
    its tool, which is None for that of the reply. None where there is no schema.
    """
    lines = grammar.split("\n")
    found = _SCHEMA.match(lines[line - 1]) if 0 < line <= len(lines) else None
    if found is None:
        return None
    head = next((each for each in lines if found[1] and each.startswith(f"tool_{found[1]}: ")), "")
    named = _NAME.search(head)
    return None if named is None else named[1], json.loads(found[2])


class _Marks:
    """Marks as the grammar writes them: special tokens by their names, others as text."""

    def __init__(self, special: frozenset[str]) -> None:
        self._special = special

    def is_token(self, mark: str) -> bool:
        return mark in self._special

    def write(self, mark: str) -> str:
        return mark if mark in self._special else json.dumps(mark)

    def until(self, rule: str, mark: str) -> str:
        """A rule for any text up to the first ``mark``, and that."""
        lazy = "" if mark in self._special else "[lazy]"
        return f"{rule}{lazy}: TEXT {self.write(mark)}"


def _calls_or(tool_format: ToolFormat, parallel: bool, reply: Mapping[str, Any] | None) -> list[str]:
    gap = json.dumps("\n" if tool_format is ToolFormat.HERMES else "; ")
    calls = f"call ({gap} call)*" if parallel else "call"
    return [f"answer: {calls}"] if reply is None else [f"answer: {calls} | reply", f"reply: %json {_schema(reply)}"]


def _free(tool_format: ToolFormat, marks: _Marks, parallel: bool) -> list[str]:
    if tool_format is ToolFormat.HERMES:
        answer = "answer: (begun body)* TEXT" if parallel else "answer: TEXT | begun body"
        return [answer, marks.until("begun", hermes.TOOL_CALL_BEGIN)]
    calls = 'call ("; " call)*' if parallel else "call"
    return [f"answer: PLAIN | {calls}", r"PLAIN: /([^{< \t\r\n](.|\n)*)?/"]


def _thoughts(thinking: ReasoningState, marks: _Marks) -> list[str]:
    begin = "" if thinking.opened else f"{marks.write(THINK_BEGIN)} "
    optional = f"({begin}thought GAP)" + ("" if thinking.opened else "?")
    return [f"start: {optional} answer", r"GAP: /\n{0,2}/", marks.until("thought", THINK_END)]


def _calls(tool_format: ToolFormat, tools: Sequence[ToolSpec], marks: _Marks) -> list[str]:
    numbers = range(len(tools))
    bodies = "body: " + " | ".join(f"tool_{number}" for number in numbers)
    if tool_format is ToolFormat.HERMES:
        rules = [f"call: {marks.write(hermes.TOOL_CALL_BEGIN)} body", bodies]
        before, key, after = "\n", "arguments", f'"}}\\n" {marks.write(hermes.TOOL_CALL_END)}'
    else:
        rules, before, key, after = ["call: body", bodies], "", "parameters", '"}"'
    for number, tool in zip(numbers, tools, strict=True):
        # A terminal for each of JSON's: a longer one would keep a reply in JSON from beginning as a call does.
        parts = [before, "{", '"name"', ":", " ", f'"{tool.name}"', ",", " ", f'"{key}"', ":", " "]
        head = " ".join(json.dumps(part) for part in parts if part)
        rules += [f"tool_{number}: {head} arguments_{number} {after}"]
        rules += [f"arguments_{number}: %json {_schema({'type': 'object', **tool.schema})}"]
    return rules


def _schema(schema: Mapping[str, Any]) -> str:
    settings = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return json.dumps({**simplify(schema), "x-guidance": settings})
