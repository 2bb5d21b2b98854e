"""The messages of a conversation as clients send them back, in the one form that templates read (``read_message``).

A conversation may have begun elsewhere. Reasoning has several names, old calls of functions are ``function_call``, and
an answer of another server has parts that no template can show. REST, gRPC and the offline API read all of it here, so
the same message is the same prompt in each.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire_proto.errors import invalid

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""The names of an assistant's reasoning: the first is the one that most templates read."""

OMITTED_PART = "[{} omitted: this model reads text only]"
"""What stands in a prompt for a part of a tool's output that is no text; in it the type of the part."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")
_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", *REASONING_NAMES}
)
_OF_ASSISTANTS = ("function_call", "refusal")
_BLOCKS = ("thinking_blocks", "reasoning_details")
_REPEATED = frozenset({"parsed", *_BLOCKS})  # what other fields of the message say
_ADDED_BY_CLIENTS = frozenset({
    "cache_control", "created_at", "id", "index", "logprobs", "metadata", "model", "object", "phase",
    "provider_specific_fields", "role", "signature", "status", "stop_reason", "tool_name", "type",
})  # fmt: skip
"""Fields that client libraries add to messages and parts, in which there is nothing for a model to read."""
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_KIND, _MAX_NAME = 32, 48  # characters: in a sentence, and in a header


def read_message(message: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a message with the fields that are known here, each under one name, and the names of what it has lost: no
    template can show that. Fields of a wrong type are left as they are, and parts that only a user can send. Raises
    ``ValueError`` for parts of a tool's output that are none.
    """
    read = {name: value for name, value in message.items() if name in _FIELDS}
    lost = [name for name in message.keys() - _FIELDS - _ADDED_BY_CLIENTS - _REPEATED if message[name]]
    role = message.get("role")
    if isinstance(parts := message.get("content"), list):
        lost += _lost_of_parts(parts)
    if role == "assistant":
        lost += _read_assistant(message, read)
        return read, tuple(sorted(lost))
    lost += (name for name in _OF_ASSISTANTS if read.get(name))
    if role in ("tool", "function"):
        _read_result(message, read)
    return read, tuple(sorted(lost))


def _read_assistant(message: Mapping[str, Any], read: dict[str, Any]) -> Iterator[str]:
    """Brings an assistant's message into one form, and yields what it loses."""
    parts, thoughts = read.get("content"), ""
    if isinstance(parts, list):
        thoughts = "".join(_thought(part) for part in parts if _kind(part) in _REASONING_PARTS)
        yield from (
            part_name("content", number, kind)
            for number, part in enumerate(parts)
            if (kind := _kind(part)) and kind not in _TEXT_PARTS and kind not in _REASONING_PARTS
        )
        read["content"] = [part for part in parts if not _kind(part) or _kind(part) in _TEXT_PARTS]
    given = {name: read[name] for name in REASONING_NAMES if read.get(name)}
    reasoning = next(iter(given.values()), None) or thoughts or _thoughts_elsewhere(message)
    yield from (name for name, value in given.items() if value != reasoning and isinstance(value, str))
    if isinstance(reasoning, str) and reasoning:
        read["reasoning_content"] = reasoning
    yield from _encrypted(message)
    if not isinstance(read.get("thinking") or "", str):
        del read["thinking"]
        yield "thinking"
    if read.get("refusal") and read.get("content"):
        yield "refusal"
    yield from _read_calls(read)


def _read_calls(read: dict[str, Any]) -> Iterator[str]:
    """Makes a call of OpenAI's former ``function_call``, and functions of custom tools. Yields what is lost."""
    old, calls = read.get("function_call"), read.get("tool_calls")
    if old and calls:
        yield "function_call"
    elif isinstance(old, Mapping):
        read["tool_calls"] = [{"id": old.get("name"), "type": "function", "function": old}]
    if not isinstance(calls, list):
        return
    yield from (
        part_name("tool_calls", number, kind)
        for number, call in enumerate(calls)
        if (kind := _kind(call)) and kind not in ("function", "custom")
    )
    read["tool_calls"] = [_function_call(call) for call in calls if _kind(call) in ("", "function", "custom")]


def _function_call(call: Any) -> Any:
    """Returns a call of a custom tool, which has a text instead of arguments, as that of a function; and one without an
    id with its function's name as its id.
    """
    if not isinstance(call, Mapping):
        return call
    custom = call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, Mapping):
        called = {"name": custom.get("name"), "arguments": arguments_of_text(custom.get("input"))}
        return {"id": call.get("id"), "type": "function", "function": called}
    function = call.get("function")
    if call.get("id") in (None, "") and isinstance(function, Mapping) and function.get("name"):
        return {**call, "id": function["name"]}
    return call


def arguments_of_text(text: object) -> str:
    """Returns the text that a custom tool was called with, as a function's arguments."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _read_result(message: Mapping[str, Any], read: dict[str, Any]) -> None:
    """Brings a tool's output into one form: that of a call without an id answers the name of its function."""
    name = read.get("name") or message.get("tool_name")
    if read.get("tool_call_id") in (None, "") and isinstance(name, str):
        read["tool_call_id"] = name
    if read["role"] == "function" and isinstance(name, str):
        read |= {"role": "tool", "content": "" if read.get("content", 0) is None else read.get("content")}
    if isinstance(read.get("content"), list):
        read["content"] = tool_output(read["content"])


def _lost_of_parts(parts: Sequence[Any]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if isinstance(part, Mapping) and len(part) > 2 and _kind(part) in _TEXT_PARTS:
            names = part.keys() - _ADDED_BY_CLIENTS - {"text", "refusal"}
            yield from (part_name("content", number, name) for name in names if part[name])


def part_name(field: str, number: int, kind: str) -> str:
    """Returns the name under which a part of a message is named where it is ignored."""
    return f"{field}[{number}].{_UNPRINTABLE.sub('?', kind[:_MAX_NAME])}"


def _kind(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _thought(part: Mapping[str, Any]) -> str:
    """The text of a part of reasoning, in the forms of Anthropic, Mistral and the AI SDK."""
    for name in ("thinking", "text", "reasoning", "summary"):
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "".join(_thought(each) for each in value if isinstance(each, Mapping))
    return ""


def _thoughts_elsewhere(message: Mapping[str, Any]) -> str:
    """The reasoning of LiteLLM's ``thinking_blocks`` or OpenRouter's ``reasoning_details``."""
    for name in _BLOCKS:
        if isinstance(blocks := message.get(name), list):
            return "".join(_thought(block) for block in blocks if isinstance(block, Mapping))
    return ""


def _encrypted(message: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of blocks of reasoning that only the server could read that wrote them."""
    for name in _BLOCKS:
        blocks = message.get(name)
        for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(block, Mapping) and block.get("data") and not _thought(block):
                yield part_name(name, number, _kind(block))


def text_content(value: object) -> object:
    """Returns a message's text, joined where it is a list of text parts. Raises ``ValueError`` for other parts."""
    return "".join(map(_text_part, value)) if isinstance(value, list | tuple) else value


def _text_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise ValueError("each part must be an object with a type")
    field = _TEXT_PARTS.get(kind)
    if field is None:
        raise unsupported_part(kind)
    if not isinstance(part.get(field), str):
        raise ValueError(f"a part of type {kind} has the field {field}, which must be a string")
    return str(part[field])


def tool_output(value: object) -> object:
    """Returns the output of a tool as text. What is no text, such as an image that it read, is replaced by words: its
    client did not choose it, and would send it again with each turn of the conversation.
    """
    return "".join(map(_tool_output_part, value)) if isinstance(value, list | tuple) else value


def _tool_output_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind in _TEXT_PARTS:
        return _text_part(part)
    if kind == "search_result":  # Anthropic's: texts under a title
        texts = part.get("content")
        head = [part[name] for name in ("title", "source") if isinstance(part.get(name), str)]
        return "\n".join([*head, str(tool_output(texts))] if isinstance(texts, list) else head)
    source = part.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return str(source.get("data", ""))
    return OMITTED_PART.format(_UNPRINTABLE.sub("?", kind[:_MAX_KIND]))


def unsupported_part(kind: str) -> ValueError:
    """Returns the error of a part that is no text."""
    return ValueError(f"parts of type {kind[:_MAX_KIND]!r} are not supported; only text is")


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """Returns the arguments of a call by name; None where they are no JSON object, or hold half of a surrogate pair.
    A number that no float can hold, and ``NaN``, stay the text that the model wrote.
    """
    try:
        arguments = json.loads(text, parse_float=_number, parse_constant=str)
        if isinstance(arguments, dict) and "\\u" in text:
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


Hidden = Callable[[str, frozenset[str]], frozenset[str]]
"""Which fields of a message with these fields a template does not show; see ``ChatTemplate.hidden``."""


def hidden_fields(messages: Sequence[Mapping[str, Any]], hidden: Hidden) -> Iterator[str]:
    """Yields the fields of a conversation, as templates read it, that its template does not show."""
    for number, message in enumerate(messages):
        fields = frozenset(name for name in ("content", "name", "reasoning_content", "tool_calls") if message.get(name))
        if message["role"] == "tool":
            fields -= {"name"}  # that of the function
        yield from (f"messages[{number}].{name}" for name in sorted(hidden(message["role"], fields)))


def read_conversation(conversation: object) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages of a Python program as templates read them, and the names of what no template can show.
    Raises ``QuireError`` INVALID.
    """
    if not isinstance(conversation, Sequence) or not conversation:
        raise invalid("messages", "A conversation must be a list of at least one message.")
    messages: list[dict[str, Any]] = []
    lost: list[str] = []
    called: dict[str, str] = {}
    for number, given in enumerate(conversation):
        message, more = _template_message(given)
        lost += (f"messages[{number}].{name}" for name in more)
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message.get("tool_call_id") in called:
            message["name"] = called[message["tool_call_id"]]
        messages.append(message)
    return messages, lost


def _template_message(given: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not isinstance(given, Mapping):
        raise invalid("messages", "A message must be a dictionary with a role and a content.")
    try:
        read, lost = read_message(given)
        content = text_content(read.get("content"))
    except ValueError as error:
        raise invalid("messages", f"A message's content: {error}.") from None
    role, calls = read.get("role"), read.get("tool_calls") or ()
    if role == "assistant":
        content = content or read.get("refusal") or ""
    if not (isinstance(role, str) and isinstance(content, str)):
        raise invalid("messages", "A message's role and content must be strings.")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    texts = {name: _text(read, name) for name in ("name", "tool_call_id", *REASONING_NAMES) if read.get(name)}
    message |= {name: text for name, text in texts.items() if name not in REASONING_NAMES[1:]}
    if not calls:
        return message, lost
    message["tool_calls"], unread = _template_calls(calls)
    return message, lost + unread


def _text(message: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := message[name], str):
        raise invalid("messages", f"A message's {name} must be a string.")
    return value


def _template_calls(calls: object) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    if not isinstance(calls, Sequence):
        raise invalid("messages", "A message's tool_calls must be a list.")
    read = [_template_call(call) for call in calls]
    lost = (f"tool_calls[{number}].function.arguments" for number, (_, whole) in enumerate(read) if not whole)
    return [call for call, _ in read], tuple(lost)


def _template_call(call: object) -> tuple[dict[str, Any], bool]:
    """Returns a call as templates expect it, with arguments as an object, and whether it has all of its arguments:
    empty ones stand for what is no object.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(call, Mapping) and isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise invalid("messages", "Each of a message's tool_calls must have a function with a name.")
    if not isinstance(call_id := call.get("id") or "", str):
        raise invalid("messages", "The id of each of a message's tool_calls must be a string.")
    given = function.get("arguments")
    arguments = parsed_arguments(given) if isinstance(given, str) else given
    whole = not given or isinstance(arguments, Mapping)
    arguments = arguments if isinstance(arguments, Mapping) else {}
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}, whole
