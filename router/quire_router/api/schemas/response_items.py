"""The items of a conversation of OpenAI's Responses API: messages, reasoning, calls of functions and their outputs.
What a model wrote in one answer are several of them, and one message of a chat (``to_messages``).
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

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
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    MESSAGE: ("role", "content"),
    REASONING: (),
    CALL: ("call_id", "name"),
    OUTPUT: ("call_id", "output"),
    REFERENCE: ("id",),
}
"""The items of a conversation by their types, with the fields that each must have."""


class ReasoningText(LenientModel):
    """A part of reasoning, or of its summary."""

    text: str


def _item_type(kind: object) -> str:
    if kind is None:
        return MESSAGE
    if not isinstance(kind, str):
        raise ValueError("it must be a string")
    if kind not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise ValueError(f"items of type {kind[:32]!r} are not supported; those of a conversation are {known}")
    return kind


class InputItem(LenientModel):
    """An item of a conversation, with the fields of its ``type``; one without a type is a message. What clients give
    back of an answer has more fields, such as ``status``, which change nothing.
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
    output: ToolOutput | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        """Lets the type say what the content is: text of a message, or parts of reasoning."""
        if not isinstance(value, dict) or value.get("type") != REASONING:
            return value
        return {**value, "content": None, "reasoning_content": value.get("content")}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _FIELDS[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} has the field {name}, which is missing")
        if self.type == CALL:
            name_in_template(self.namespace, self.name or "")
        return self

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
        return len(self.content or self.reasoning) + len(self.arguments) + len(self.output or "") + 64

    def to_json(self, item_id: str) -> dict[str, Any]:
        """Returns it as a response lists it."""
        known: dict[str, Any] = {"id": item_id, "type": self.type}
        if self.type == MESSAGE:
            kind = "output_text" if self.role == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": self.content}
            if self.role == "assistant":
                part |= {"annotations": [], "logprobs": []}
            return {**known, "role": self.role, "status": "completed", "content": [part]}
        if self.type == REASONING:
            return {**known, "summary": [], "content": [{"type": "reasoning_text", "text": self.reasoning}]}
        if self.type == CALL:
            called = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
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
        own = f"{_PREFIXES[item.type]}_{request_id}_in{number}"
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
    """Yields the messages of a chat that say the same as ``items``: reasoning, text and calls that follow each other
    are one message of the assistant. Two texts are two, unless a call stands between them.
    """
    written: list[InputItem] = []
    for item in items:
        if item.type in (REASONING, CALL) or (item.type == MESSAGE and item.role == "assistant"):
            if written and (written[-1].type, item.type) in _APART:
                yield _from_assistant(written)
                written = []
            written.append(item)
            continue
        if written:
            yield _from_assistant(written)
            written = []
        if item.type == OUTPUT:
            yield ChatMessage(role="tool", tool_call_id=item.call_id, content=item.output)
        else:
            assert item.role is not None
            yield ChatMessage(role=item.role, content=item.content)
    if written:
        yield _from_assistant(written)


_APART = frozenset({(MESSAGE, MESSAGE), (MESSAGE, REASONING), (CALL, REASONING)})
"""The types of two items that follow each other and are not of one message of the assistant."""


def _from_assistant(items: Sequence[InputItem]) -> ChatMessage:
    calls = [
        ToolCall(
            id=item.call_id or "",
            function=CalledFunction(name=name_in_template(item.namespace, item.name or ""), arguments=item.arguments),
        )
        for item in items
        if item.type == CALL
    ]
    texts = [item.content or "" for item in items if item.type == MESSAGE]
    reasoning = "".join(item.reasoning for item in items if item.type == REASONING)
    return ChatMessage(
        role="assistant", content="".join(texts), tool_calls=calls or None, reasoning_content=reasoning or None
    )


def check_conversation(items: Sequence[InputItem], known: int) -> None:
    """Raises ``QuireError`` for outputs of no call, and for two calls of one id that are made together. The first
    ``known`` items are those of an earlier response.
    """
    calls = CallChecker()
    for number, item in enumerate(items):
        param = f"input[{number - known}].call_id"
        if item.type == OUTPUT or (item.type == MESSAGE and item.role != "assistant"):
            calls.end_message()
        if item.type == CALL:
            calls.call(item.call_id, param)
        elif item.type == OUTPUT:
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
        raise ValueError("these are no items of a conversation") from error
