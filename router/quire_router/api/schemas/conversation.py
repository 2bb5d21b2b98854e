"""The messages and tools of a chat, as pydantic models of the OpenAI API, and the checks across them: each tool message
answers a call, and names are unique.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from quire_proto.errors import QuireError, invalid
from quire_proto.structured_output import MAX_TEXT
from quire_proto.text.conversation import REASONING_NAMES, Hidden, parsed_arguments, read_message

from quire_router.api.schemas import parameters
from quire_router.api.schemas.base import Content, Label, LenientModel, Parsed, StrictModel
from quire_router.api.schemas.parameters import RENDERED, Table

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_DESCRIPTION_CHARACTERS = MAX_TEXT
MAX_ID_CHARACTERS = 128
MAX_TOOLS_CHARACTERS = 4 * MAX_TEXT  # of all schemas and descriptions

MAX_NAME_CHARACTERS = 128  # as in Messages; in the OpenAI API 64

Name = Annotated[str, Field(pattern=f"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}$")]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class Function(StrictModel):
    """A tool's name and parameters. ``parameters`` is a JSON Schema of an object; without it there are none. ``strict``
    constrains calls to it also where none is required.
    """

    foreign: ClassVar[Table] = parameters.FUNCTION

    name: Name
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """``parameters``, or the schema of an empty object."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(StrictModel):
    """A function that the model may call."""

    foreign: ClassVar[Table] = parameters.TOOL

    type: Literal["function"]
    function: Function
    cache_control: Any = None  # Anthropic's mark of a prefix to keep: here prefixes are kept anyway

    @property
    def size(self) -> int:
        """The length of what a template renders of it, in characters, about."""
        return len(json.dumps(self.to_template(), ensure_ascii=False))

    def to_template(self) -> dict[str, Any]:
        """Returns it as templates expect it: always with parameters."""
        function = self.function
        described = {"description": function.description or "", "parameters": function.schema_of_arguments}
        return {"type": "function", "function": {"name": function.name, **described}}


class ChosenFunction(StrictModel):
    """The function that must be called."""

    name: Name


class ChosenTool(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(StrictModel):
    """Those of the tools that may be called now, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChatTools(StrictModel):
    """A choice of some tools. All stay in the prompt, which so remains the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedChatTools,
    Parsed(
        Literal["none", "auto", "required"] | ChosenTool | AllowedChatTools,
        'it must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    ),
]


def chosen_names(choice: "ToolChoice | None") -> frozenset[str] | None:
    """Returns the names of the tools that may be called; None for all."""
    if isinstance(choice, ChosenTool):
        return frozenset({choice.function.name})
    if isinstance(choice, AllowedChatTools):
        return frozenset(each.function.name for each in choice.allowed_tools.tools)
    return None


def requires_call(choice: "ToolChoice | None") -> bool:
    """Whether a tool must be called."""
    if isinstance(choice, AllowedChatTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ChosenTool)


def arguments_text(value: object) -> object:
    """Returns arguments as text, also where a client library has parsed them, or has none."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


class CalledFunction(LenientModel):
    """A called function, with arguments as the model wrote them, which need not be JSON."""

    name: Name
    arguments: Annotated[str, BeforeValidator(arguments_text)] = ""

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name, empty where they are no JSON object: templates iterate over them, and one mistake of
        the model must not end a conversation.
        """
        return parsed_arguments(self.arguments) or {}

    @property
    def is_readable(self) -> bool:
        """Whether ``parsed`` has all that was written."""
        return not self.arguments.strip() or parsed_arguments(self.arguments) is not None


class ToolCall(LenientModel):
    """A tool call in an earlier message of the assistant."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Returns it as templates expect it: with arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.parsed}
        return {"id": self.id, "type": "function", "function": function}


def check_tools(tools: Sequence[Tool], choice: "ToolChoice | None") -> None:
    """Raises ``QuireError`` for two tools of one name, schemas that are too large or of no object, and the choice of an
    unknown tool.
    """
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.function.name in names:
            raise invalid(f"tools[{number}].function.name", f"There are two tools named {tool.function.name}.")
        names.add(tool.function.name)
    if sum(_sizes(tools)) > MAX_TOOLS_CHARACTERS:
        raise tools_too_large()
    if choice == "required" and not names:
        raise invalid("tool_choice", "tool_choice needs tools.")
    for name in sorted((chosen_names(choice) or frozenset()) - names):
        raise invalid("tool_choice", f"tool_choice names {name}, which is not among the tools.")


def _sizes(tools: Sequence[Tool]) -> Iterator[int]:
    for number, tool in enumerate(tools):
        param, parameters = f"tools[{number}].function.parameters", tool.function.schema_of_arguments
        if parameters.get("type", "object") != "object":
            raise invalid(param, f"{param} must be a JSON Schema of an object.")
        try:
            size = len(schema_text(parameters))
        except (ValueError, RecursionError):
            raise invalid(param, f"{param} must be a JSON Schema.") from None
        if size > MAX_TEXT:
            raise invalid(param, f"{param} has {size} characters but must have at most {MAX_TEXT}.")
        yield size + len(tool.function.description or "")


def tools_too_large() -> QuireError:
    """Returns the error of tools that are too large to be validated."""
    return invalid("tools", f"The tools have more than {MAX_TOOLS_CHARACTERS} characters in all.")


def grammar_too_large() -> QuireError:
    """Returns the error of tools whose grammar is too large."""
    return invalid("tools", f"The grammar of the tools' schemas has more than {MAX_TEXT} characters.")


_MESSAGE, _CALL = 64, 128  # what a template makes of an empty message and of a call without arguments, in characters

MAX_ARGUMENTS_CHARACTERS = 2**20  # of all calls: they are parsed, which holds up everything else


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


_CONTINUED = ("prefix", "partial")  # what marks a message that the answer continues: DeepSeek's word, and Moonshot's


class ChatMessage(LenientModel):
    """One message of a conversation. The assistant's reasoning may have any of three names, ``function_call`` is the
    former form of a call and the role ``function`` that of its output, and ``refusal`` is the text of an assistant that
    refused. ``lost`` names what no template can show.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Label = None
    function_call: CalledFunction | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    prefix: bool | None = None
    partial: bool | None = None
    lost: SkipJsonSchema[tuple[str, ...]] = Field(default=(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Brings a message that began elsewhere into the one form that is known here."""
        if not isinstance(value, dict):
            return value
        read, lost = read_message(value)
        return {**read, **{name: value[name] for name in _CONTINUED if name in value}, "lost": lost}

    @property
    def size(self) -> int:
        """The length of what a template renders of it, in characters, about."""
        calls = sum(len(call.function.arguments) + _CALL for call in self.tool_calls or ())
        return _MESSAGE + len(self.text) + len(self.reasoning_text) + calls

    @property
    def text(self) -> str:
        """The content, or the assistant's refusal."""
        return self.content or (self.refusal if self.role == "assistant" and self.refusal else "")

    @property
    def reasoning_text(self) -> str:
        """The assistant's reasoning; empty for none."""
        return self.reasoning_content or ""

    def to_template(self, names: Mapping[str, str] = {}) -> dict[str, Any]:
        """Returns what templates read; ``developer`` is the newer name of the role ``system``, which they have.
        ``names`` are those of the tools that were called, by the ids of the calls.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.reasoning_text:
            message["reasoning_content"] = self.reasoning_text
        if self.tool_call_id is not None:
            message |= {"tool_call_id": self.tool_call_id, "name": names[self.tool_call_id]}
        elif self.name:
            message["name"] = self.name
        return message

    @property
    def fields(self) -> frozenset[str]:
        """The fields that a template may show or not, besides its role."""
        given = {
            "content": self.text,
            "name": self.role != "tool" and self.name,
            "reasoning_content": self.reasoning_text,
            "tool_calls": self.tool_calls,
        }
        return frozenset(name for name, value in given.items() if value)

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``; the fields have the names under which they were sent."""
        yield from self.lost
        for number, call in enumerate(self.tool_calls or ()):
            if not call.function.is_readable:
                yield "function_call.arguments" if self.function_call else f"tool_calls[{number}].function.arguments"
        for name in sorted(hidden("system" if self.role == "developer" else self.role, self.fields)):
            yield self._sent_as(name)

    def _sent_as(self, name: str) -> str:
        if name == "tool_calls" and self.function_call is not None:
            return "function_call"
        if name == "content" and not self.content:
            return "refusal"
        if name == "reasoning_content":
            return next((each for each in REASONING_NAMES[1:] if getattr(self, each)), name)
        return name


def unseen_in_messages(messages: Sequence[ChatMessage], hidden: Hidden) -> Iterator[str]:
    """Yields the paths of what a model does not see of a conversation; see ``StrictModel.unseen``."""
    for number, message in enumerate(messages):
        yield from (f"messages[{number}].{name}" for name in message.unseen(hidden))


def to_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns a checked conversation as templates read it."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return [message.to_template(names) for message in messages]


class CallChecker:
    """Checks the calls of a conversation in their order: those of one message have ids of their own, and each output
    answers a call of an earlier message. Raises ``QuireError`` INVALID, with the ``param`` at fault.
    """

    def __init__(self) -> None:
        self._of_message: set[str | None] = set()
        self._earlier: set[str | None] = set()

    def call(self, call_id: str | None, param: str) -> None:
        """Checks a call."""
        if call_id in self._of_message:
            raise _misplaced(param, "is that of another call of this message")
        self._of_message.add(call_id)
        if len(self._of_message) > MAX_CALLS:
            raise invalid(param, f"A message may have at most {MAX_CALLS} calls.")

    def output(self, call_id: str | None, param: str) -> None:
        """Checks the output of a tool."""
        if call_id not in self._earlier:
            raise _misplaced(param, "answers no call of an earlier message")

    def end_message(self) -> None:
        """Begins the next message."""
        self._earlier |= self._of_message
        self._of_message.clear()


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises ``QuireError`` for fields that are missing, too large or in a message of the wrong role, and for a message
    that answers no call.
    """
    arguments = sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    if arguments > MAX_ARGUMENTS_CHARACTERS:
        raise invalid("messages", f"The calls in messages have more than {MAX_ARGUMENTS_CHARACTERS} characters in all.")
    calls = CallChecker()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        _check_parts(message, where)
        if message.role == "tool":
            is_named = message.tool_call_id == message.name  # the output of a call without an id
            calls.output(message.tool_call_id, f"{where}.{'name' if is_named else 'tool_call_id'}")
        for place, call in enumerate(message.tool_calls or ()):
            calls.call(call.id, f"{where}.tool_calls[{place}].id")
        calls.end_message()


def _check_parts(message: ChatMessage, where: str) -> None:
    if message.role == "function":
        raise invalid(f"{where}.name", f"{where}.name is missing.")  # with it the message is a tool's
    for name in _CONTINUED:
        if getattr(message, name):
            raise invalid(f"{where}.{name}", f"{where}.{name} is not supported here: {RENDERED}.")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content", f"{where}.content is missing.")
    if message.tool_calls and message.role != "assistant":
        raise _misplaced(f"{where}.tool_calls", "belongs to messages of the assistant")
    for name in REASONING_NAMES if message.role != "assistant" else ():
        if getattr(message, name):
            raise _misplaced(f"{where}.{name}", "belongs to messages of the assistant")
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id is missing.")
    if message.role != "tool" and message.tool_call_id is not None:
        raise _misplaced(f"{where}.tool_call_id", "belongs to messages of the role tool")


def _misplaced(param: str, problem: str) -> QuireError:
    return invalid(param, f"{param} {problem}.")


def schema_text(schema: Mapping[str, Any]) -> str:
    """Returns a JSON Schema as compact text, in its order. Raises ``ValueError`` for a number that JSON has not, and
    ``RecursionError``.
    """
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
