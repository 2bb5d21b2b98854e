"""Normalises the arguments of ``LLM`` and ``AsyncLLM``: prompts, conversations, and the settings of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire_proto.errors import QuireError, invalid
from quire_proto.text.conversation import read_conversation

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as chat templates see it: ``messages``, ``tools`` as in the OpenAI API, and ``template_kwargs`` by
    the names of the template's variables. With ``add_generation_prompt`` the prompt ends where the answer begins,
    otherwise after the last message. ``lost`` names parts of the messages that no template can show.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    lost: Sequence[str] = ()


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Returns a list of prompts from a text, a list of token ids, a dictionary with either as in vLLM (``{"prompt":
    …}``, ``{"prompt_token_ids": …}``), or a list of these. Raises ``QuireError`` INVALID.
    """
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and _is_token_id(prompts[0])):
        return [_read_prompt(prompts)]
    return [_read_prompt(prompt) for prompt in prompts]


def read_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    tools: Sequence[Message] | None,
    template_kwargs: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool,
) -> list[Conversation]:
    """Returns a list of conversations from one or several, each with at least one message. Raises ``QuireError``
    INVALID.
    """
    if not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise invalid("tools", "tools must be a list of dictionaries, as in the OpenAI API.")
    reserved = sorted({"messages", "tools", "documents", "add_generation_prompt"} & (template_kwargs or {}).keys())
    if reserved:
        raise invalid("chat_template_kwargs", f"{reserved[0]} is not a variable of chat_template_kwargs.")
    several = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
    return [_conversation(each, tools or (), template_kwargs or {}, add_generation_prompt) for each in several]


def _conversation(
    messages: object, tools: Sequence[Message], template_kwargs: Mapping[str, Any], add_generation_prompt: bool
) -> Conversation:
    read, lost = read_conversation(messages)
    return Conversation(read, tools, template_kwargs, add_generation_prompt, tuple(lost))


def broadcast(name: str, given: T | Sequence[T] | None, default: T, count: int) -> list[T]:
    """Returns one value for each of ``count`` prompts, from a single value or a list of that length. Raises
    ``QuireError`` INVALID.
    """
    if given is None:
        return [default] * count
    if isinstance(given, str):
        raise invalid(name, f"{name} cannot be a text.")
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise invalid(name, f"{name} has {len(given)} entries for {count} prompts.")
    return list(given)


def with_prompt_index(index: int, count: int, error: QuireError) -> QuireError:
    """Returns ``error`` with the number of its prompt in the message."""
    if count == 1:
        return error
    return error.about(error.param, f"Prompt {index}: {error.message}")


def _read_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        (name,) = prompt
        if name in ("prompt", "prompt_token_ids"):
            prompt = prompt[name]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(map(_is_token_id, prompt)):
        return list(prompt)
    raise invalid(
        "prompts",
        "A prompt must be a string or a list of token ids, or a dictionary with either as prompt or prompt_token_ids.",
    )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
