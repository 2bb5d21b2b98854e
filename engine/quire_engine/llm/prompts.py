"""What callers pass, in one form: prompts, conversations, and one value for each."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire_proto.errors import QuireError, invalid

T = TypeVar("T")

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """A text, a list of token ids, or a list of those, as a list of prompts. Raises ``QuireError`` INVALID."""
    if isinstance(prompts, str) or (len(prompts) > 0 and _is_token_id(prompts[0])):
        return [_read_prompt(prompts)]
    return [_read_prompt(prompt) for prompt in prompts]


def read_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, str]]]:
    """One conversation or a list of them, each of at least one message, as chat templates see them. Raises
    ``QuireError`` INVALID.
    """
    if len(messages) > 0 and isinstance(messages[0], Mapping):
        return [_read_conversation(messages)]
    return [_read_conversation(conversation) for conversation in messages]


def broadcast(name: str, given: T | Sequence[T] | None, default: T, count: int) -> list[T]:
    """One value for each of ``count`` prompts: the same for all, or a list of as many. Raises ``QuireError``
    INVALID.
    """
    if given is None:
        return [default] * count
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise invalid(name, f"{name} has {len(given)} entries for {count} prompts.")
    return list(given)


def with_prompt_index(index: int, count: int, error: QuireError) -> QuireError:
    """``error`` with the number of its prompt in the message."""
    if count == 1:
        return error
    return QuireError(error.code, f"Prompt {index}: {error.message}", param=error.param)


def _read_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(map(_is_token_id, prompt)):
        return list(prompt)
    raise invalid("prompts", "A prompt must be a string or a list of token ids.")


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_conversation(conversation: object) -> list[dict[str, str]]:
    if not isinstance(conversation, Sequence) or not conversation:
        raise invalid("messages", "A conversation must be a list of at least one message.")
    return [_read_message(message) for message in conversation]


def _read_message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping) or message.keys() - {"name"} != {"role", "content"}:
        raise invalid("messages", "A message must have a role and a content; beside them only a name is known.")
    role, content = message["role"], message["content"]
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(map(_text_part, content))
    if not (isinstance(role, str) and isinstance(content, str)):
        raise invalid("messages", "A message's role and content must be strings.")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text_part(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise invalid("messages", "A message's parts must be texts.")
