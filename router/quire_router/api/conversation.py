"""The messages of a chat: what one may say, and that calls and their answers belong together."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from quire_proto.errors import QuireError, invalid

from quire_router.api.fields import Content, Label
from quire_router.api.strict import LenientModel
from quire_router.api.tools import MAX_CALLS, CallId, ToolCall

_MESSAGE, _CALL = 64, 128  # what a template makes of an empty message and of a call without arguments, in characters

MAX_ARGUMENTS_CHARACTERS = 2**20  # of all calls: they are parsed, which holds up everything else


def _text_or_nothing(value: object) -> str | None:
    return value if isinstance(value, str) else None


class ChatMessage(LenientModel):
    """One message of a conversation. Its ``reasoning_content``, or ``reasoning``, is what an assistant thought, and its
    ``refusal`` what it said in the place of an answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Label = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[str | None, BeforeValidator(_text_or_nothing)] = None

    @property
    def size(self) -> int:
        """Characters that a template makes of it, about."""
        calls = sum(len(call.function.arguments) + _CALL for call in self.tool_calls or ())
        return _MESSAGE + len(self.text) + len(self.thoughts) + calls

    @property
    def text(self) -> str:
        """What it says."""
        return self.content or (self.refusal if self.role == "assistant" and self.refusal else "")

    @property
    def thoughts(self) -> str:
        """What the assistant thought; empty where nothing is said of it."""
        return self.reasoning_content or self.reasoning or ""

    def as_template_sees_it(self, names: Mapping[str, str] = {}) -> dict[str, Any]:
        """What templates read; ``developer`` is the newer word for the system's role, which they know. ``names`` are
        those of the tools that were called, by the ids of the calls.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_sees_it() for call in self.tool_calls]
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.tool_call_id is not None:
            message |= {"tool_call_id": self.tool_call_id, "name": names[self.tool_call_id]}
        return message


def as_template_sees_them(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation that was checked."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return [message.as_template_sees_it(names) for message in messages]


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises ``QuireError`` where something is missing, stands in a message of another role or is too much, or where
    a message answers a call that was not made.
    """
    arguments = sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    if arguments > MAX_ARGUMENTS_CHARACTERS:
        raise invalid("messages", f"The calls in messages have more than {MAX_ARGUMENTS_CHARACTERS} characters in all.")
    called: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        _check_parts(message, where)
        if message.role == "tool" and message.tool_call_id not in called:
            raise _wrong(f"{where}.tool_call_id", "answers no call of an earlier message")
        called.update(_checked_calls(message, where))


def _check_parts(message: ChatMessage, where: str) -> None:
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content", f"{where}.content is missing.")
    if message.tool_calls and message.role != "assistant":
        raise _wrong(f"{where}.tool_calls", "belongs to messages of the assistant")
    if message.thoughts and message.role != "assistant":
        raise _wrong(f"{where}.reasoning_content", "belongs to messages of the assistant")
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id is missing.")
    if message.role != "tool" and message.tool_call_id is not None:
        raise _wrong(f"{where}.tool_call_id", "belongs to messages of the role tool")


def _checked_calls(message: ChatMessage, where: str) -> set[str]:
    ids: set[str] = set()
    for number, call in enumerate(message.tool_calls or ()):
        if call.id in ids:
            raise _wrong(f"{where}.tool_calls[{number}].id", "is that of another call of this message")
        ids.add(call.id)
    return ids


def _wrong(param: str, problem: str) -> QuireError:
    return invalid(param, f"{param} {problem}.")
