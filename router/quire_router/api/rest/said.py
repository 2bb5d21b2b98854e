"""What a chat's choice says beside plain content, as the OpenAI API writes it. Does no I/O."""

import json
from collections.abc import Sequence
from typing import Any

from quire_router.api.reading import ParsedDelta, ToolCallDelta

_encode = json.JSONEncoder(separators=(",", ":")).encode


def delta_json(said: ParsedDelta) -> str:
    """``choices[].delta`` of one event. Thoughts have both names that clients look for."""
    parts = []
    if said.reasoning:
        thoughts = _encode(said.reasoning)
        parts.append(f'"reasoning_content":{thoughts},"reasoning":{thoughts}')
    if said.content:
        parts.append(f'"content":{_encode(said.content)}')
    if said.calls:
        parts.append(f'"tool_calls":[{",".join(map(_part, said.calls))}]')
    return f"{{{','.join(parts)}}}"


def message_object(parts: Sequence[ParsedDelta]) -> dict[str, Any]:
    """``choices[].message`` of a whole answer. There is no content where there are only calls."""
    content = "".join(said.content for said in parts)
    reasoning = "".join(said.reasoning for said in parts)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for said in parts for call in said.calls):
        if call.index in calls:
            calls[call.index]["function"]["arguments"] += call.arguments
        else:
            calls[call.index] = _begun(call)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return {**message, "tool_calls": list(calls.values())} if calls else message


def _part(call: ToolCallDelta) -> str:
    if call.id:
        return _encode({"index": call.index, **_begun(call)})
    return f'{{"index":{call.index},"function":{{"arguments":{_encode(call.arguments)}}}}}'


def _begun(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
