"""The items of a conversation of OpenAI's Responses API: messages, reasoning, calls of functions and their outputs.
What a model wrote in one answer are several of them, and one message of a chat (``to_messages``).
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema
from quire_proto.text.conversation import Hidden, arguments_of_text, read_message

from quire_router.api.schemas.base import Content, LenientModel, ToolOutput
from quire_router.api.schemas.conversation import (
    MAX_NAME_CHARACTERS,
    CallChecker,
    CalledFunction,
    CallId,
    ChatMessage,
    Name,
    ToolCall,
    arguments_text,
)

MAX_ITEM_ID_CHARACTERS = 160
_ENCODED = "quire-reasoning-1."
ItemId = Annotated[str, Field(max_length=MAX_ITEM_ID_CHARACTERS)]

MESSAGE, REASONING, CALL, OUTPUT = "message", "reasoning", "function_call", "function_call_output"
REFERENCE = "item_reference"
_CUSTOM_CALL, _CUSTOM_OUTPUT = "custom_tool_call", "custom_tool_call_output"
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    MESSAGE: ("role", "content"),
    REASONING: (),
    CALL: ("call_id", "name"),
    OUTPUT: ("call_id", "output"),
    REFERENCE: ("id",),
    _CUSTOM_CALL: ("call_id", "name", "input"),
    _CUSTOM_OUTPUT: ("call_id", "output"),
}
"""The items of a conversation by their types, with the fields that each must have."""


_OF_CHATS: Final = ("name", "reasoning_content", "tool_calls")
"""What is a field of a message in chats, and an item of its own, or nothing, in a response."""


class ReasoningText(LenientModel):
    """A part of reasoning, or of its summary."""

    text: str


def _item_type(kind: object) -> str:
    if kind is None:
        return MESSAGE
    if not isinstance(kind, str):
        raise ValueError("it must be a string")
    return kind


class InputItem(LenientModel):
    """An item of a conversation, with the fields of its ``type``; one without a type is a message. What clients give
    back of an answer has more fields, such as ``status``, which change nothing. An item of another type is what a
    server did: it is kept in ``other`` as it was sent, and no template shows it.
    """

    type: Annotated[str, BeforeValidator(_item_type, json_schema_input_type=str | None)] = MESSAGE
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    reasoning_content: list[ReasoningText] | None = None  # the content of an item of reasoning
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    call_id: CallId | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Annotated[str, BeforeValidator(arguments_text)] = ""
    input: str | None = None  # of a custom tool
    output: ToolOutput | None = None
    other: SkipJsonSchema[dict[str, Any] | None] = None
    lost: SkipJsonSchema[tuple[str, ...]] = Field(default=(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Lets the type say what the content is: text of a message, or parts of reasoning."""
        if not isinstance(value, dict):
            return value
        kind, value = value.get("type"), {name: each for name, each in value.items() if name not in ("other", "lost")}
        if kind == REASONING:
            return {**value, "content": None, "reasoning_content": value.get("content")}
        if isinstance(kind, str) and kind not in _FIELDS:
            return {"type": kind, "id": value.get("id"), "other": value}
        if kind not in (None, MESSAGE):
            return value
        read, lost = read_message(value)
        more = (name for name in _OF_CHATS if read.get(name))
        return {**value, "content": read.get("content"), "reasoning_content": None, "lost": (*lost, *more)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _FIELDS.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} has the field {name}, which is missing")
        if self.other is not None and "role" in self.other:
            raise ValueError(f"items of type {self.type[:32]!r} have no role; the type of a message is {MESSAGE!r}")
        if self.is_call:
            name_in_template(self.namespace, self.name or "")
        return self

    @property
    def part(self) -> str:
        """The type of what it is in a message of the assistant."""
        return CALL if self.is_call else self.type

    @property
    def is_call(self) -> bool:
        """Whether the model calls a tool of its client."""
        return self.type in (CALL, _CUSTOM_CALL)

    @property
    def is_output(self) -> bool:
        """Whether it is what such a call returned."""
        return self.type in (OUTPUT, _CUSTOM_OUTPUT)

    @property
    def called(self) -> ToolCall:
        """The call that it is."""
        arguments = self.arguments if self.input is None else arguments_of_text(self.input)
        function = CalledFunction(name=name_in_template(self.namespace, self.name or ""), arguments=arguments)
        return ToolCall(id=self.call_id or "", function=function)

    def names_of_lost(self) -> Iterator[str]:
        """Yields the names of what no template can show."""
        yield from self.lost
        if self.other is not None:
            yield self.type
        encrypted = "" if self.reasoning_content else self.encrypted_content or ""
        if encrypted and not decode_encrypted_content(encrypted):
            yield "encrypted_content"
        if self.is_call and not self.called.function.is_readable:
            yield "arguments"

    @property
    def reasoning(self) -> str:
        """The reasoning that it holds: its text, or else its encrypted content, or else its summary."""
        if self.reasoning_content:
            return "".join(part.text for part in self.reasoning_content)
        return decode_encrypted_content(self.encrypted_content or "") or "".join(
            part.text for part in self.summary or ()
        )

    @property
    def size(self) -> int:
        """Its characters, about."""
        texts = (self.content or self.reasoning, self.arguments, self.input or "", self.output or "")
        return sum(map(len, texts)) + 64

    def to_json(self, item_id: str) -> dict[str, Any]:
        """Returns it as a response lists it."""
        known: dict[str, Any] = {"id": item_id, "type": self.type}
        if self.other is not None:
            return self.other | known
        if self.type == MESSAGE:
            kind = "output_text" if self.role == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": self.content}
            if self.role == "assistant":
                part |= {"annotations": [], "logprobs": []}
            return {**known, "role": self.role, "status": "completed", "content": [part]}
        if self.type == REASONING:
            return {**known, "summary": [], "content": [{"type": "reasoning_text", "text": self.reasoning}]}
        if self.is_call:
            text = {"arguments": self.arguments} if self.input is None else {"input": self.input}
            called = {"call_id": self.call_id, "name": self.name, **text}
            space = {"namespace": self.namespace} if self.namespace else {}
            return {**known, **called, **space, "status": "completed"}
        return {**known, "call_id": self.call_id, "output": self.output, "status": "completed"}


_PREFIXES: Final = {MESSAGE: "msg", REASONING: "rs", CALL: "fc", OUTPUT: "fco"}


def list_items(items: Sequence[InputItem], request_id: str, kept: int | None = None) -> list[dict[str, Any]]:
    """Returns the items of a request as its response lists them, each with an id of its own: that which it has, unless
    an item before has that, or else one that follows from the request's. Where only the first ``kept`` items keep
    theirs, the others have ids that no item of another request has, whatever clients send at once.
    """
    taken: set[str] = set()
    listed = []
    for number, item in enumerate(items):
        own = f"{_PREFIXES.get(item.type, 'item')}_{request_id}_in{number}"
        keeps = (kept is None or number < kept) and item.id not in taken
        item_id = item.id if keeps and item.id is not None else own
        taken.add(item_id)
        listed.append(item.to_json(item_id))
    return listed


def name_in_template(namespace: str | None, name: str) -> str:
    """Returns the name that a function of a namespace has in a template. Raises ``ValueError`` if it is too long."""
    joined = f"{namespace}__{name}" if namespace else name
    if len(joined) > MAX_NAME_CHARACTERS:
        raise ValueError(
            f"the names of a namespace and of its function have at most {MAX_NAME_CHARACTERS - 2} characters"
        )
    return joined


def encode_encrypted_content(reasoning: str) -> str:
    """Returns reasoning as the ``encrypted_content`` of an item, which a client that stores nothing here gives back.
    It is not secret: the same item has it as text.
    """
    return _ENCODED + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode("ascii")


def decode_encrypted_content(content: str) -> str:
    """Returns what ``encode_encrypted_content`` was given; empty for what another server has encrypted."""
    if not content.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_ENCODED), altchars="-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def to_messages(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    """Yields the messages of a chat that say the same as ``items``."""
    return (_to_message([items[number] for number in numbers]) for numbers in _messages(items))


def unseen_in_items(items: Sequence[InputItem], hidden: Hidden) -> Iterator[str]:
    """Yields the paths of what a model does not see of ``items``; see ``StrictModel.unseen``."""
    for numbers in _messages(items):
        message = _to_message([items[number] for number in numbers])
        fields = hidden(message.role, message.fields)
        for number in numbers:
            if not fields.isdisjoint(_FIELDS_OF_MESSAGE.get(items[number].type, ("content",))):
                yield f"input[{number}]"
    for number, item in enumerate(items):
        yield from (f"input[{number}].{name}" for name in item.names_of_lost())


def _messages(items: Sequence[InputItem]) -> Iterator[list[int]]:
    """Yields the places of the items of each message: reasoning, text and calls that follow each other are one message
    of the assistant. Two texts are two, unless a call stands between them.
    """
    written: list[int] = []
    for number, item in enumerate(items):
        if item.other is not None:
            continue
        if item.type == REASONING or item.is_call or (item.type == MESSAGE and item.role == "assistant"):
            if written and (items[written[-1]].part, item.part) in _APART:
                yield written
                written = []
            written.append(number)
            continue
        if written:
            yield written
            written = []
        yield [number]
    if written:
        yield written


_APART = frozenset({(MESSAGE, MESSAGE), (MESSAGE, REASONING), (CALL, REASONING)})
"""The parts of two items that follow each other and are not of one message of the assistant."""
_FIELDS_OF_MESSAGE: Final = {REASONING: ("reasoning_content",), CALL: ("tool_calls",), _CUSTOM_CALL: ("tool_calls",)}


def _to_message(items: Sequence[InputItem]) -> ChatMessage:
    first = items[0]
    if first.is_output:
        return ChatMessage(role="tool", tool_call_id=first.call_id, content=first.output)
    if first.type == MESSAGE and first.role != "assistant":
        assert first.role is not None
        return ChatMessage(role=first.role, content=first.content)
    texts = [item.content or "" for item in items if item.type == MESSAGE]
    reasoning = "".join(item.reasoning for item in items if item.type == REASONING)
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=[item.called for item in items if item.is_call] or None,
        reasoning_content=reasoning or None,
    )


def check_conversation(items: Sequence[InputItem], known: int) -> None:
    """Raises ``QuireError`` for outputs of no call, and for two calls of one id that are made together. The first
    ``known`` items are those of an earlier response.
    """
    calls = CallChecker()
    for number, item in enumerate(items):
        param = f"input[{number - known}].call_id"
        if item.is_output or (item.type == MESSAGE and item.role != "assistant"):
            calls.end_message()
        if item.is_call:
            calls.call(item.call_id, param)
        elif item.is_output:
            calls.output(item.call_id, param)


@dataclass(frozen=True, slots=True)
class History:
    """What a request goes on from. ``items`` are the conversation of the response that it follows, ``token_ids`` the
    tokens of that one's prompt and answer, and ``referenced`` the items that it names, by their ids.
    """

    items: Sequence[InputItem] = ()
    token_ids: Sequence[int] = ()
    referenced: Mapping[str, InputItem] = field(default_factory=dict)


def read_items(items: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Returns items that were listed or written here. Raises ``ValueError`` for others."""
    try:
        return [InputItem.model_validate(item) for item in items]
    except ValidationError as error:
        raise ValueError("these are not items of a conversation") from error
