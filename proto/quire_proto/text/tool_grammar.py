"""Grammars, in llguidance's dialect of Lark, that constrain a model to tool calls which ``tool_parser`` can parse, or
to an answer of a form, after whatever it reasons.

``tool_call_grammar`` makes the grammar of a chat with tools from the data of their format, and ``answer_grammar`` that
of an answer alone. ``_Text`` writes marks as the tokens that they are.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_proto.structured_output import AVOID, MAX_TEXT, Structured, StructuredKind
from quire_proto.text.harmony import ENDS as HARMONY_ENDS
from quire_proto.text.reasoning import ReasoningFormat
from quire_proto.text.tool_arguments import STRING, SchemaTypes, is_bare_text
from quire_proto.text.tool_formats import (
    HARMONY,
    GemmaCall,
    JsonCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)

ANYTHING: Mapping[str, Any] = {"type": "object"}
FINAL = "<|channel|>final<|message|>"  # Harmony's header of an answer
_SCHEMA = re.compile(r"(?:reply|(?:arguments|value)_(\d+)(?:_\d+)?): %json (.*)")
_JSON_PIECE = re.compile(r'"\{number\}"|"[^"]*"|[{}\[\]:,]|\s+')
_LINES = re.compile(r"\n|[^\n]+")
_NUMBER, _NAME = "/[0-9]{1,3}/", "/[A-Za-z_][A-Za-z0-9_-]{0,63}/"
_PLAIN_NAME, _TAG_NAME = re.compile(r"[A-Za-z_]\w*"), re.compile(r'[^<>"\n]+')
_LANGUAGE = "%llguidance {}"
_TEXT = r"TEXT: /(.|\n)*/"
_OTHER_KEYWORDS = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "patternProperties", "propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas",
    "dependencies",
})  # fmt: skip
"""Keywords of objects that the rules of arguments one by one do not hold."""


class UnsupportedSchemaError(ValueError):
    """A schema of arguments that a format without JSON cannot be held to. ``tool`` is the tool's name."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"{reason} is not supported in the way that this model writes calls.")
        self.tool = tool


class GrammarTooLargeError(ValueError):
    """A grammar of more than ``MAX_TEXT`` characters."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that may be called, and the JSON schema of its arguments, which are an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """Reasoning before the answer: how the model marks it, None if it does not reason here, and whether the prompt has
    ``opened`` it.
    """

    marks: ReasoningFormat | None = None
    opened: bool = False


def tool_call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolSpec],
    *,
    forced: bool,
    parallel: bool,
    thinking: ReasoningState = ReasoningState(),
    tokens: Mapping[str, int] = {},
    reply: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an output. ``forced``: only calls of ``tools``. Otherwise calls, or JSON of the schema ``reply``;
    without ``reply``, text that may end in calls. One call, or several if ``parallel``. Raises ``RecursionError`` for a
    schema that is nested too deeply, ``UnsupportedSchemaError``, and ``GrammarTooLargeError``. ``tokens`` are those
    marks that are single tokens, and their ids.
    """
    text = _Text(tokens)
    calls = _Calls(tool_format, text)
    rules = calls.answer(parallel=parallel, only=forced, reply=reply)
    # Free text may hold reasoning anyway, unless its mark is a token.
    apart = forced or reply is not None or thinking.opened or tool_format is HARMONY
    if thinking.marks is not None and (apart or text.begins_with_token(thinking.marks.begin)):
        rules = [*_reasoning(thinking, thinking.marks, text), *rules]
    else:
        rules = ["start: answer", *rules]
    grammar = "\n".join([_LANGUAGE, *rules, *calls.bodies(tools), *text.rules()])
    if len(grammar) > MAX_TEXT:
        raise GrammarTooLargeError
    return grammar


def answer_grammar(structured: Structured, thinking: ReasoningState, *, tokens: Mapping[str, int] = {}) -> str | None:
    """The grammar of reasoning and then an answer of the form ``structured``; None where nothing comes before the
    answer, so that its own grammar is enough. Raises ``ValueError`` for what is no JSON.
    """
    if thinking.marks is None or structured.kind is StructuredKind.GRAMMAR:
        return None
    text = _Text(tokens)
    header = text.write(FINAL) if thinking.marks.is_harmony else ""
    if structured.kind is StructuredKind.REGEX:
        answer = ["reply: REPLY", f"REPLY: {_regex(structured.text)}"]
    elif structured.kind is StructuredKind.CHOICE:
        options = " | ".join(json.dumps(option) for option in structured.options)
        answer = ["reply: REPLY", f"REPLY: {options}"]
    else:
        is_any = structured.kind is StructuredKind.JSON_OBJECT
        answer = [f"reply: %json {_schema(ANYTHING if is_any else json.loads(structured.text))}"]
    rules = [*_reasoning(thinking, thinking.marks, text), f"answer: {header} reply", *answer]
    return "\n".join([_LANGUAGE, *rules, *text.rules()])


def schema_on_line(grammar: str, line: int) -> tuple[str | None, Any] | None:
    """The tool's name and the schema in line ``line``, counted from 1, of a grammar of this module; the name is None
    for the schema of the reply. Returns None if the line has no schema.
    """
    lines = grammar.split("\n")
    found = _SCHEMA.match(lines[line - 1]) if 0 < line <= len(lines) else None
    if found is None:
        return None
    comment = f"// tool {found[1]}: "
    name = next((each.removeprefix(comment) for each in lines if found[1] and each.startswith(comment)), None)
    return name, json.loads(found[2])


def _reasoning(thinking: ReasoningState, marks: ReasoningFormat, text: "_Text") -> list[str]:
    begin = "" if thinking.opened else f"{text.write(marks.begin)} "
    optional = f"({begin}thought GAP {text.write(marks.after)})" + ("" if thinking.opened else "?")
    return [f"start: {optional} answer", r"GAP: /\n{0,2}/", text.until("thought", marks.end)]


def _regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n") + "/"


def _schema(schema: Any, avoid: Sequence[str] = ()) -> str:
    """A schema, the strings of which must not contain the marks ``avoid``."""
    return json.dumps({**(schema if isinstance(schema, Mapping) else {}), AVOID: avoid} if avoid else schema)


@dataclass(slots=True)
class _Text:
    """Writes texts of a format in a grammar: marks that are tokens by their ids, everything else as text. ``rules`` are
    the terminals that were used.
    """

    tokens: Mapping[str, int]
    _terminals: dict[str, str] = field(default_factory=lambda: {"TEXT": _TEXT})

    def begins_with_token(self, text: str) -> bool:
        """Whether ``text`` begins with a mark that is a token."""
        return self._cut(text)[0] in self.tokens

    def write(self, text: str) -> str:
        """``text`` as a part of a rule. Line breaks are terminals of their own: none may be the beginning of another
        that could stand in its place.
        """
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else " ".join(map(_quoted, _LINES.findall(piece)))
            for piece in self._cut(text)
        )

    def until(self, rule: str, mark: str, text: str = "TEXT") -> str:
        """A rule for a text, the terminal ``text``, up to and including the first ``mark``."""
        first, *others = self._cut(mark)
        if first in self.tokens:
            return f"{rule}: {text} {self.write(mark)}"
        ended = self.terminal(f"{rule.upper()}_END", f"{text} {_quoted(first)}")
        return f"{rule}: {ended} {self.write(''.join(others))}" if others else f"{rule}[lazy]: {ended}"

    def _cut(self, text: str) -> list[str]:
        """``text`` cut at the tokens in it."""
        names = "|".join(re.escape(name) for name in sorted(self.tokens, key=len, reverse=True))
        return [piece for piece in re.split(f"({names})", text) if piece] if names else [text] * bool(text)

    def terminal(self, name: str, value: str) -> str:
        """Adds a terminal. Returns its name."""
        self._terminals[name] = f"{name}: {value}"
        return name

    def rules(self) -> list[str]:
        return [*self._terminals.values()]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class _Calls:
    """The rules of the calls of one format."""

    format: ToolFormat
    text: _Text

    def answer(self, *, parallel: bool, only: bool, reply: Mapping[str, Any] | None) -> list[str]:
        """The rule ``answer``: calls ``only``, or calls or JSON of the schema ``reply``, or text with calls."""
        form = self.format
        if form is HARMONY:
            return self._harmony_answer(only=only, reply=reply)
        write = self.text.write
        opening, closing = ("[", "]") if form.listed else ("", "")
        end = f"{write(closing + form.end)}"
        more = ""
        if parallel and form.between is not None:
            more = f"({write(form.between)} body)*"
        section = f"{write(opening)} body {more} {end}"
        calls = section if form.bare else f"{write(form.begin)} {section}"
        if parallel and form.between is None:
            calls += f" ({write(form.gap + form.begin)} {section})*"
        if only:
            return [f"answer: {calls}"]
        if reply is not None:
            return [f"answer: {calls} | {write(form.preface)} reply", f"reply: %json {_schema(reply)}"]
        if form.bare:
            return [f"answer: {self._plain()} | {calls}"]
        mark = form.begin.split()[0]
        section = f"opening {write(form.begin.removeprefix(mark))} {section}"
        answer = f"({section})* TEXT" if parallel else f"TEXT | {section}"
        return [f"answer: {answer}", self.text.until("opening", mark)]

    def _plain(self) -> str:
        """Text that no call can begin in."""
        if self.format.preface:
            mark = re.escape(self.format.begin)
            plain = self.text.terminal("PLAIN", rf"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/")
            return f"{self.text.write(self.format.preface)} {plain}"
        return self.text.terminal("PLAIN", r"/([^{\[< \t\r\n](.|\n)*)?/")

    def _harmony_answer(self, *, only: bool, reply: Mapping[str, Any] | None) -> list[str]:
        call = f"{self.text.write(HARMONY.begin)} body"
        if only:
            return [f"answer: {call}"]
        final = self.text.write(FINAL)
        if reply is None:
            return [f"answer: {call} | {final} TEXT"]
        return [f"answer: {call} | {final} reply", f"reply: %json {_schema(reply)}"]

    def bodies(self, tools: Sequence[ToolSpec]) -> Iterator[str]:
        """The rule ``body``, of one call, and those that it needs."""
        yield "body: " + " | ".join(f"tool_{number}" for number in range(len(tools)))
        for number, tool in enumerate(tools):
            yield f"// tool {number}: {tool.name}"
            yield from self._tool(number, tool)

    def _tool(self, number: int, tool: ToolSpec) -> Iterator[str]:
        call, rule = self.format.call, f"tool_{number}: "
        arguments = f"arguments_{number}"
        if isinstance(call, (JsonCall, NamedCall)):
            tail = "" if self.format is HARMONY else self._written(call, call.tail, tool.name)
            yield f"{rule}{self._written(call, call.head, tool.name)} {arguments} {tail}"
            # Harmony's parser does not look for quotes, so that its marks end a call even in a string.
            avoid = HARMONY_ENDS if self.format is HARMONY else ()
            yield f"{arguments}: %json {_schema({'type': 'object', **tool.schema}, avoid)}"
            return
        members = _Members(self.text, number, tool, call.value_marks)
        if isinstance(call, TaggedCall):
            head, tail = self._written(call, call.head, tool.name), self.text.write(call.tail)
            yield f"{rule}{head} {arguments} {tail}"
            yield from members.rules(lambda key, schema: self._tagged(call, members, key, schema), "")
        elif isinstance(call, PythonCall):
            yield f"{rule}{_quoted(tool.name + '(')} {arguments} {_quoted(')')}"
            yield from members.rules(
                lambda key, schema: f"{members.key(key)} {_quoted('=')} {members.json(schema)}", ", "
            )
        else:
            yield f"{rule}{_quoted(f'call:{tool.name}{{')} {arguments} {self.text.write('}' + call.tail)}"
            yield from members.rules(lambda key, schema: self._gemma(call, members, key, schema), ",")

    def _written(self, call: JsonCall | NamedCall | TaggedCall, text: str, name: str) -> str:
        """A head or a tail. JSON is written in one terminal for each of JSON's: a longer one would keep a reply in JSON
        from beginning like a call.
        """
        text = text.replace("{name}", name)
        if isinstance(call, JsonCall):
            pieces = _JSON_PIECE.findall(text)
            return " ".join('/"[0-9]{1,3}"/' if "{number}" in piece else _quoted(piece) for piece in pieces)
        return f" {_NUMBER} ".join(map(self.text.write, text.split("{number}")))

    def _tagged(self, call: TaggedCall, members: "_Members", key: str | None, schema: Any) -> str:
        is_text = members.is_text(schema)
        before, _, after = call.key.partition("{key}")
        after = after.replace("{kind}", "true" if is_text else "false")
        head = f"{self.text.write(before)} {members.tag(key)} {self.text.write(after)}"
        if not is_text:
            return f"{head} {members.tagged_json(schema)} {self.text.write(call.value_end)}"
        return f"{head} {members.until(schema, call.value_end)}"

    def _gemma(self, call: GemmaCall, members: "_Members", key: str | None, schema: Any) -> str:
        head = f"{members.key(key)} {_quoted(':')}"
        if not members.is_text(schema):
            return f"{head} {members.json(schema)}"
        return f"{head} {self.text.write(call.quote)} {members.until(schema, call.quote)}"


class _Members:
    """The rules of one tool's arguments, one after the other: in the order of the schema, those that are not required
    may be missing. ``number`` is the tool's; no value contains one of ``marks``. Raises ``UnsupportedSchemaError`` for
    a schema that asks for more.
    """

    def __init__(self, text: _Text, number: int, tool: ToolSpec, marks: Sequence[str]) -> None:
        self._text = text
        self._marks = marks
        self._number = number
        self._tool = tool
        self._rules: list[str] = []
        self._types = SchemaTypes(tool.schema)
        self._size = 0  # of the rules, which may each repeat the same definitions
        target = self._types.target(tool.schema)
        schema = target if isinstance(target, Mapping) else {}
        unknown = sorted(schema.keys() & _OTHER_KEYWORDS)
        if unknown:
            raise UnsupportedSchemaError(tool.name, unknown[0])
        declared, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(declared, Mapping) or not isinstance(required, list):
            raise UnsupportedSchemaError(tool.name, "such a value of properties or required")
        others = schema.get("additionalProperties", {})
        self._properties = {name: self._types.target(each) for name, each in declared.items()}
        self._required = [name for name in required if isinstance(name, str)]
        self._properties |= {name: others for name in self._required if name not in self._properties}
        missing = next((name for name in self._required if self._properties[name] is False), None)
        if missing is not None:
            raise UnsupportedSchemaError(tool.name, f"a value of the required {missing!r}")
        self._others = others if not self._properties else False
        self._check_counts(schema)

    def _check_counts(self, schema: Mapping[str, Any]) -> None:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        if not isinstance(least, int | float) or least > len(self._required):
            raise UnsupportedSchemaError(self._tool.name, "minProperties")
        possible = math.inf if self._others is not False else len(self._properties)
        if not isinstance(most, int | float) or most < possible:
            raise UnsupportedSchemaError(self._tool.name, "maxProperties")

    def rules(self, member: Callable[[str | None, Any], str], separator: str) -> Iterator[str]:
        """The rules, where ``member`` writes an argument; its name is None for any."""
        arguments, between = f"arguments_{self._number}", self._text.write(separator)
        if self._others is not False:
            one = member(None, {} if self._others is True else self._others)
            yield f"{arguments}: ({one} ({between} {one})*)?" if separator else f"{arguments}: ({one})*"
            yield from self._rules
            return
        names = [name for name, schema in self._properties.items() if schema is not False]
        # first_N: the arguments from the Nth on, of which none was written before; more_N: of which some were.
        for place, name in enumerate(names):
            one, after = member(name, self._properties[name]), place + 1
            optional = name not in self._required
            yield f"first_{self._number}_{place}: {one} more_{self._number}_{after}" + (
                f" | first_{self._number}_{after}" if optional else ""
            )
            yield f"more_{self._number}_{place}: {between} {one} more_{self._number}_{after}" + (
                f" | more_{self._number}_{after}" if optional else ""
            )
        yield f'first_{self._number}_{len(names)}: ""'
        yield f'more_{self._number}_{len(names)}: ""'
        yield f"{arguments}: first_{self._number}_0"
        yield from self._rules

    def key(self, name: str | None) -> str:
        """A name, or any; in quotes where it is not plain."""
        if name is None:
            return _NAME
        if any(mark in name for mark in self._marks):
            raise UnsupportedSchemaError(self._tool.name, f"the name {name!r}")
        return _quoted(name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False))

    def tag(self, name: str | None) -> str:
        """A name inside of a tag, or any."""
        if name is not None and not _TAG_NAME.fullmatch(name):
            raise UnsupportedSchemaError(self._tool.name, f"the name {name!r}")
        return _NAME if name is None else _quoted(name)

    def is_text(self, schema: Any) -> bool:
        """Whether a value of this schema is written as bare text."""
        return self._types.of(schema) <= {STRING} and is_bare_text(schema)

    def tagged_json(self, schema: Any) -> str:
        """The rule of a value in JSON between tags: a string where the schema does not say a type."""
        is_open = isinstance(schema, Mapping) and "type" not in schema and not self._types.of(schema)
        return self.json(schema, {"type": STRING} if is_open else {})

    def json(self, schema: Any, more: Mapping[str, Any] = {}) -> str:
        """The rule of a value in JSON, by a schema with ``more`` keywords."""
        own = self._types.references.standalone(schema) if "$ref" in json.dumps(schema) else schema
        own = {**own, **more} if more else own
        return self._rule(f"value_{self._number}_{len(self._rules)}", f"%json {_schema(own, self._marks)}")

    def until(self, schema: Any, mark: str) -> str:
        """The rule of a bare text and the mark behind it."""
        bounds = schema if isinstance(schema, Mapping) else {}
        values = [bounds["const"]] if "const" in bounds else bounds.get("enum")
        rule = f"value_{self._number}_{len(self._rules)}"
        least, most = bounds.get("minLength", 0), bounds.get("maxLength")
        if values is not None:
            texts = [each for each in values if _fits(each, bounds)]
            if not texts:
                raise UnsupportedSchemaError(self._tool.name, f"a string that is none of {str(values)[:60]}")
            return self._rule(rule, f"({' | '.join(map(_quoted, texts))}) {self._text.write(mark)}")
        length = f"{{{least},{'' if most is None else most}}}"
        without = " & ".join(f"~/(?s:.*){_escaped(each)}(?s:.*)/" for each in self._marks)
        text = self._text.terminal(f"TEXT_{self._number}_{len(self._rules)}", f"/(?s:.){length}/ & {without}")
        self._rules.append(self._text.until(rule, mark, text))
        return rule

    def _rule(self, name: str, value: str) -> str:
        self._rules.append(f"{name}: {value}")
        self._size += len(value)
        if self._size > MAX_TEXT:
            raise GrammarTooLargeError
        return name


def _fits(value: Any, bounds: Mapping[str, Any]) -> bool:
    """Whether a value is a string that other bounds of its schema allow."""
    if not isinstance(value, str) or ("enum" in bounds and value not in bounds["enum"]):
        return False
    return bool(bounds.get("minLength", 0) <= len(value) <= bounds.get("maxLength", math.inf))


def _escaped(text: str) -> str:
    """A text in a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")
