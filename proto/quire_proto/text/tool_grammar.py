"""Grammars, in llguidance's dialect of Lark, that constrain a model to tool calls which ``tool_formats`` can parse."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_proto.json_schema import simplify
from quire_proto.text.reasoning import THINK_BEGIN, THINK_END
from quire_proto.text.tool_formats import TOOL_CALL_BEGIN, TOOL_CALL_END, ToolFormat

ANYTHING: Mapping[str, Any] = {"type": "object"}
_WHITESPACE = r"( |\n[ \t]{0,32})"  # bounded, so that a model cannot write white space without end
_SCHEMA = re.compile(r"(?:reply|arguments_(\d+)): %json (.*)")
_NAME = re.compile(r'"\\"name\\"" ":" " " "\\"([^"\\]*)\\""')
_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that may be called, and the JSON schema of its arguments, which are an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """Reasoning before the calls: ``marked`` if the model reasons at all, ``opened`` if the prompt ends in
    ``<think>``.
    """

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
    """The grammar of an output. ``forced``: only calls of ``tools``. Otherwise calls, or JSON of the schema ``reply``;
    without ``reply``, text that may end in calls. One call, or several if ``parallel``. ``special`` are the markers
    that are special tokens of the tokenizer, which plain text cannot write. Raises ``RecursionError`` for a schema that
    is nested too deeply.
    """
    markers = _Markers(frozenset(special))
    if forced or reply is not None:
        rules = _calls_or(tool_format, parallel, None if forced else reply)
    else:
        rules = _free(tool_format, markers, parallel)
    # Free text may hold reasoning anyway, unless its marker is a special token.
    apart = forced or reply is not None or thinking.opened or markers.is_token(THINK_BEGIN)
    rules += _reasoning(thinking, markers) if thinking.marked and apart else ["start: answer"]
    return "\n".join(["%llguidance {}", *rules, _TEXT, *_calls(tool_format, tools, markers)])


def schema_on_line(grammar: str, line: int) -> tuple[str | None, Any] | None:
    """The tool's name and the schema in line ``line``, counted from 1, of a grammar of ``tool_call_grammar``; the name
    is None for the schema of the reply. Returns None if the line has no schema.
    """
    lines = grammar.split("\n")
    found = _SCHEMA.match(lines[line - 1]) if 0 < line <= len(lines) else None
    if found is None:
        return None
    head = next((each for each in lines if found[1] and each.startswith(f"tool_{found[1]}: ")), "")
    named = _NAME.search(head)
    return None if named is None else named[1], json.loads(found[2])


class _Markers:
    """Writes markers in the grammar: special tokens by name, others as text."""

    def __init__(self, special: frozenset[str]) -> None:
        self._special = special

    def is_token(self, marker: str) -> bool:
        return marker in self._special

    def write(self, marker: str) -> str:
        return marker if marker in self._special else json.dumps(marker)

    def until(self, rule: str, marker: str) -> str:
        """A rule for any text up to and including the first ``marker``."""
        lazy = "" if marker in self._special else "[lazy]"
        return f"{rule}{lazy}: TEXT {self.write(marker)}"


def _calls_or(tool_format: ToolFormat, parallel: bool, reply: Mapping[str, Any] | None) -> list[str]:
    gap = json.dumps("\n" if tool_format is ToolFormat.HERMES else "; ")
    calls = f"call ({gap} call)*" if parallel else "call"
    return [f"answer: {calls}"] if reply is None else [f"answer: {calls} | reply", f"reply: %json {_schema(reply)}"]


def _free(tool_format: ToolFormat, markers: _Markers, parallel: bool) -> list[str]:
    if tool_format is ToolFormat.HERMES:
        answer = "answer: (opening body)* TEXT" if parallel else "answer: TEXT | opening body"
        return [answer, markers.until("opening", TOOL_CALL_BEGIN)]
    calls = 'call ("; " call)*' if parallel else "call"
    return [f"answer: PLAIN | {calls}", r"PLAIN: /([^{< \t\r\n](.|\n)*)?/"]


def _reasoning(thinking: ReasoningState, markers: _Markers) -> list[str]:
    begin = "" if thinking.opened else f"{markers.write(THINK_BEGIN)} "
    optional = f"({begin}thought GAP)" + ("" if thinking.opened else "?")
    return [f"start: {optional} answer", r"GAP: /\n{0,2}/", markers.until("thought", THINK_END)]


def _calls(tool_format: ToolFormat, tools: Sequence[ToolSpec], markers: _Markers) -> list[str]:
    numbers = range(len(tools))
    bodies = "body: " + " | ".join(f"tool_{number}" for number in numbers)
    if tool_format is ToolFormat.HERMES:
        rules = [f"call: {markers.write(TOOL_CALL_BEGIN)} body", bodies]
        before, key, after = "\n", "arguments", f'"}}\\n" {markers.write(TOOL_CALL_END)}'
    else:
        rules, before, key, after = ["call: body", bodies], "", "parameters", '"}"'
    for number, tool in zip(numbers, tools, strict=True):
        # One terminal for each of JSON's: a longer one would keep a JSON reply from beginning like a call.
        parts = [before, "{", '"name"', ":", " ", f'"{tool.name}"', ",", " ", f'"{key}"', ":", " "]
        head = " ".join(json.dumps(part) for part in parts if part)
        rules += [f"tool_{number}: {head} arguments_{number} {after}"]
        rules += [f"arguments_{number}: %json {_schema({'type': 'object', **tool.schema})}"]
    return rules


def _schema(schema: Mapping[str, Any]) -> str:
    settings = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return json.dumps({**simplify(schema), "x-guidance": settings})
