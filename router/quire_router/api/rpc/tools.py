"""Conversations, tools and tokens in protobuf messages, as the fields that the request schemas read."""

import json
from collections.abc import Sequence
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire_proto.errors import invalid

from quire_router.api.fields import MAX_PROMPT_TOKENS
from quire_router.api.schemas import MAX_MESSAGES
from quire_router.api.tokens import DetokenizeRequest, TokenizeRequest, TokenizeResult
from quire_router.api.tools import MAX_CALLS, MAX_TOOLS, MAX_TOOLS_CHARACTERS, too_many_characters

_FUNCTION = "function:"


def message_fields(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    """``messages``, at most one more than are allowed."""
    return [_message(message) for message in messages[: MAX_MESSAGES + 1]]


def tool_fields(message: pb.ChatRequest) -> dict[str, Any]:
    """What a request says of tools and thoughts. Raises ``QuireError`` as the REST API would."""
    fields: dict[str, Any] = {"tools": _tools(message.tools)}
    if message.tool_choice:
        fields["tool_choice"] = _choice(message.tool_choice)
    if message.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = message.parallel_tool_calls
    if message.HasField("separate_reasoning"):
        fields["separate_reasoning"] = message.separate_reasoning
    return fields


def tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    """Raises ``QuireError`` as the REST API would for the same request."""
    fields: dict[str, Any] = {"model": message.model, "return_token_strs": message.return_token_strs}
    if message.messages:
        fields["messages"] = message_fields(message.messages)
        fields["prompt"] = message.text or None
    else:
        fields["prompt"] = message.text
    if message.tools:
        fields["tools"] = _tools(message.tools)
    for name in ("add_special_tokens", "add_generation_prompt"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    return TokenizeRequest.from_fields(fields)


def tokenize_response(told: TokenizeResult) -> pb.TokenizeResponse:
    """Tokens as a message."""
    return pb.TokenizeResponse(
        token_ids=told.tokens, max_model_len=told.max_model_len, token_strs=told.token_strs or ()
    )


def detokenize_request(message: pb.DetokenizeRequest) -> DetokenizeRequest:
    """Raises ``QuireError`` as the REST API would for the same request."""
    tokens = list(message.token_ids[: MAX_PROMPT_TOKENS + 1])
    return DetokenizeRequest.from_fields({"model": message.model, "tokens": tokens})


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls[: MAX_CALLS + 1]]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields["reasoning"] = message.reasoning
    return fields


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(tools: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    if sum(len(tool.parameters_json) for tool in tools) > MAX_TOOLS_CHARACTERS:
        raise too_many_characters()
    return [_tool(tool, number) for number, tool in enumerate(tools[: MAX_TOOLS + 1])]


def _tool(tool: pb.Tool, number: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters_json:
        function["parameters"] = _parameters(tool.parameters_json, f"tools[{number}].function.parameters")
    return {"type": "function", "function": function}


def _parameters(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(param, f"{param} is not a JSON Schema.") from None


def _choice(text: str) -> Any:
    if not text.startswith(_FUNCTION):
        return text
    return {"type": "function", "function": {"name": text.removeprefix(_FUNCTION)}}
