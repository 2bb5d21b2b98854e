"""The form in which a chat template takes messages, and the fields of a message that it shows; both found by trial.

Some templates take the arguments of calls only as text, ids of calls only of nine letters, calls only in a message
whose content is none, or either a text or reasoning beside calls. Some read no content but a list of parts, as those of
models that see. Each reads reasoning under one name or another.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import product
from typing import Any

from quire_proto.errors import QuireError
from quire_proto.text.conversation import REASONING_NAMES

Render = Callable[..., str]
"""``ChatTemplate.render``."""

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # the only ids of calls that Mistral's templates take
_NAME, _CALL_ID = "look_up", "call_0123456789abcdef"
_TOOL = {"name": _NAME, "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = ({"type": "function", "function": _TOOL},)
_USER = {"role": "user", "content": "Hello"}
_ROLES = ("system", "user", "assistant", "tool")
_THINKING = {"enable_thinking": True, "thinking": True}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How one template takes messages, beyond the form of the OpenAI API with arguments as objects."""

    arguments_as_text: bool = False
    short_ids: bool = False
    none_beside_calls: bool = False  # an empty content is none
    reasoning_excludes_text: bool = False  # of a message with calls
    reasoning_names: tuple[str, ...] = REASONING_NAMES[:1]
    roles_in_parts: frozenset[str] = frozenset()  # whose content is a list of parts

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message as the template takes it."""
        adapted = dict(message)
        if reasoning := message.get("reasoning_content"):
            adapted |= {name: reasoning for name in self.reasoning_names if not adapted.get(name)}
        if calls := message.get("tool_calls"):
            adapted["tool_calls"] = [self._call(call) for call in calls]
            if reasoning and self.reasoning_excludes_text:
                adapted["content"] = ""
            if self.none_beside_calls and not adapted.get("content"):
                adapted["content"] = None
        if isinstance(adapted.get("content"), str) and message.get("role") in self.roles_in_parts:
            adapted["content"] = [{"type": "text", "text": adapted["content"]}]
        if self.short_ids and "tool_call_id" in message:
            adapted["tool_call_id"] = _short_id(message["tool_call_id"])
        return adapted

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "id": _short_id(call["id"]) if self.short_ids else call["id"], "function": function}


def _short_id(call_id: str) -> str:
    """Returns an id of nine letters in place of another one, always the same."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=8, person=b"quire call").hexdigest()[:9]


def find_form(source: str, render: Callable[[MessageForm], Render]) -> tuple[MessageForm, str]:
    """Returns the form that a template takes, and what it writes of a conversation with a call, empty if it takes none.
    ``render`` returns the function that renders messages of a form. A form that shows the call is better than one that
    the template only takes.
    """
    # transformers has ``thinking`` too; a template that reads ``reasoning`` alone would have none without it.
    names = [name for name in REASONING_NAMES if name != "reasoning" or re.search(r"\breasoning\b", source)]
    form = MessageForm(reasoning_names=tuple(names))
    form = replace(form, roles_in_parts=_roles_in_parts(form, render) if "type" in source else frozenset())
    if "tool_calls" not in source:
        return form, ""
    taken: list[tuple[MessageForm, str]] = []
    for none, short, text in product((False, True), repeat=3):
        tried = replace(form, arguments_as_text=text, short_ids=short, none_beside_calls=none)
        written = _rendered(render(tried), [_USER, _assistant(frozenset({"tool_calls"}))], False)
        if written is not None and _mark("tool_calls") in written:
            taken = [(tried, written)]
            break
        taken += () if written is None else [(tried, written)]
    form, written = taken[0] if taken else (form, "")
    whole = frozenset({"content", "reasoning_content", "tool_calls"})
    if shown_fields(render(form), "assistant", whole) is None:
        alone = replace(form, reasoning_excludes_text=True)
        form = form if shown_fields(render(alone), "assistant", whole) is None else alone
    return form, written


def _roles_in_parts(form: MessageForm, render: Callable[[MessageForm], Render]) -> frozenset[str]:
    """Returns the roles whose content a template shows in parts, and not as a text."""
    text, parts = render(form), render(replace(form, roles_in_parts=frozenset(_ROLES)))
    content = frozenset({"content"})
    lacking = (role for role in _ROLES if shown_fields(text, role, content) != content)
    return frozenset(role for role in lacking if shown_fields(parts, role, content) == content)


def shown_fields(render: Render, role: str, fields: frozenset[str]) -> frozenset[str] | None:
    """Returns those ``fields`` that a template shows of a message of this role that has just them, wherever the message
    stands; None if the template refuses such messages.
    """
    written = [
        text
        for options in ({}, _THINKING if "reasoning_content" in fields else {})
        for each in _conversations(role, fields)
        if (text := _rendered(partial(render, options=options), *each)) is not None
    ]
    return frozenset(name for name in fields if any(_mark(name) in text for text in written)) if written else None


def _conversations(role: str, fields: frozenset[str]) -> Iterator[tuple[Sequence[Mapping[str, Any]], bool]]:
    """Yields conversations with such a message at their ends and before them, and whether an answer is to follow."""
    if role == "tool":
        call = _assistant(frozenset({"tool_calls"}))
        yield [_USER, call, _result(_mark("content"))], True
        return
    if role != "assistant":
        message = {"role": role, **{name: _mark(name) for name in fields}}
        yield [message] if role == "user" else [message, _USER], True
        return
    message = _assistant(fields)
    yield [_USER, message], False
    yield [_USER, message], True
    yield [_USER, message, _result("found") if "tool_calls" in fields else _USER], True


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str | None:
    for tools in (_TOOLS, ()):
        try:
            return render(messages, tools, add_generation_prompt=add_generation_prompt)
        except QuireError:
            continue
    return None


def _mark(field: str) -> str:
    """Returns a word that no template has, which stands for a field."""
    return f"quired{field.replace('_', '')}"


def _assistant(fields: frozenset[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    message |= {name: _mark(name) for name in fields if name != "tool_calls"}
    if "tool_calls" in fields:
        function = {"name": _NAME, "arguments": {"word": _mark("tool_calls")}}
        message["tool_calls"] = [{"id": _CALL_ID, "type": "function", "function": function}]
    return message


def _result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": content}
