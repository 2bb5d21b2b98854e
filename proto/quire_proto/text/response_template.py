"""``response_template`` of ``tokenizer_config.json``, transformers' description of what a model writes, as formats.

It names fields (``content``, ``reasoning_content``, ``tool_calls``), each with the literal or the pattern that opens
and closes it and what is between them. Patterns are read if they are literals with white space (``\\s*``) and named
groups; tool calls if they are JSON, alone, in a list or after a name, or tags around each argument (``xml-inline``).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire_proto.text.reasoning import ReasoningFormat
from quire_proto.text.tool_formats import JsonCall, NamedCall, TaggedCall, ToolFormat

NAME = "response_template"
_PIECE = re.compile(
    r"""(?P<space>\\s[*+?])|\\(?P<control>[nt])|\\(?P<escaped>\W)
      | \(\?P<(?P<group>\w+)>(?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)
      | (?P<plain>[^\\.^$*+?{}\[\]|()])""",
    re.VERBOSE,
)
_CONTROLS = {"n": "\n", "t": "\t"}


def described_marks(response_template: Any) -> str:
    """The texts in a ``response_template``, from which ``detect_tool_format`` recognises a family."""
    return "\n".join(_literal(text) or text for text in _texts(response_template))


def described_reasoning(response_template: Any) -> ReasoningFormat | None:
    """The marks of reasoning. Returns None if none are described in a way that can be read."""
    field = _field(response_template, "reasoning_content") or _field(response_template, "thinking")
    begin, end = _anchor(field, "open").strip(), _anchor(field, "close").strip()
    return ReasoningFormat(begin, end) if begin and end and "{" not in begin + end else None


def described_format(response_template: Any) -> ToolFormat | None:
    """The format of tool calls. Returns None if none is described in a way that can be read."""
    field = _field(response_template, "tool_calls")
    begin, end = _anchor(field, "open").lstrip(), _anchor(field, "close")
    before, place, after = begin.partition("{name}")
    if not before.split() or not end.split():
        return None
    if field.get("content") == "json" and not place:
        listed = field.get("transform_each") is True
        return ToolFormat(NAME, (), begin, JsonCall(listed=listed), end, between=", " if listed else None)
    if field.get("content") == "json":
        return ToolFormat(NAME, (), before, NamedCall("{name}" + after, end))
    arguments = field.get("content_args")
    if field.get("content") != "xml-inline" or not place or not isinstance(arguments, Mapping):
        return None
    key, value, value_end = _literal(str(arguments.get("tag_pattern"))).partition("{value}")
    if not value or "{key}" not in key or not value_end.split():
        return None
    return ToolFormat(NAME, (), before, TaggedCall("{name}" + after, key, value_end, end))


def _field(response_template: Any, name: str) -> Mapping[str, Any]:
    fields = response_template.get("fields") if isinstance(response_template, Mapping) else None
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else {}


def _anchor(field: Mapping[str, Any], name: str) -> str:
    """What opens or closes a field, the first of several; empty if it cannot be read."""
    value = field.get(name)
    literal = value[0] if isinstance(value, list) and value else value
    return literal if isinstance(literal, str) else _literal(str(field.get(f"{name}_pattern", "")))


def _literal(pattern: str) -> str:
    """A pattern as the text that it matches, with line breaks for white space and names of groups in braces. Returns an
    empty text for a pattern that has more.
    """
    at, pieces = 0, list[str]()
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None:
            return ""
        at = found.end()
        if found["space"]:
            pieces.append("\n")
        elif found["group"]:
            pieces.append(f"{{{found['group']}}}")
        else:
            pieces.append(_CONTROLS.get(found["control"] or "", found["escaped"] or found["plain"] or ""))
    return "".join(pieces)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
