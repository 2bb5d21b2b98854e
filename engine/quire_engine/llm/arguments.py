"""Brings the arguments of ``LLM`` and ``AsyncLLM`` into one form: prompts, conversations, and the settings of each."""

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
    """Messages as chat templates see them, and what else a template is given: ``tools`` as in the OpenAI API, and
    ``template_kwargs`` by the names of its variables. With ``add_generation_prompt`` the prompt ends where the answer
    begins, else behind the last message. ``lost`` names what no template can show of them.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    lost: Sequence[str] = ()


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """A text, a list of token ids, a mapping with either as vLLM has it (``{"prompt": …}``, ``{"prompt_token_ids":
    …}``), or a list of those, as a list of prompts. Raises ``QuireError`` INVALID.
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
    """One conversation or a list of them, each of at least one message. Raises ``QuireError`` INVALID."""
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
    """One value for each of ``count`` prompts: the same for all, or a list of as many. Raises ``QuireError``
    INVALID.
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
    """``error`` with the number of its prompt in the message."""
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
