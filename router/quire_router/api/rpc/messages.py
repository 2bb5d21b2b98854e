"""Protobuf messages to the request schemas (``chat_request``, ``completion_request``, ...), and deltas, stored requests
and models to protobuf messages.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_proto.convert import (
    TASK_TO_PROTO,
    error_to_proto,
    finish_to_proto,
    logprobs_to_proto,
    stop_token_to_proto,
)
from quire_proto.errors import invalid
from quire_proto.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_TOKEN_IDS
from quire_proto.structured_output import MAX_OPTIONS

from quire_router.api.model_cards import ModelCard
from quire_router.api.output_parser import TOOL_CALLS, ParsedDelta
from quire_router.api.pooled_requests import PooledAnswer, vector_of
from quire_router.api.schemas.base import MAX_INPUTS, MAX_PROMPT_TOKENS, MAX_STOPS
from quire_router.api.schemas.conversation import MAX_CALLS, MAX_TOOLS, MAX_TOOLS_CHARACTERS, tools_too_large
from quire_router.api.schemas.openai import MAX_MESSAGES, ChatRequest, CompletionRequest
from quire_router.api.schemas.pooling import EmbeddingRequest, RerankRequest
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest, TokenizeResult
from quire_router.core.generation import Delta, GenerationRequest, Usage

_FUNCTION = "function:"


def message_fields(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    """Returns ``messages`` as fields, at most one more than are allowed."""
    return [_message(message) for message in messages[: MAX_MESSAGES + 1]]


def tool_fields(message: pb.ChatRequest) -> dict[str, Any]:
    """Returns the fields about tools and reasoning. Raises ``QuireError`` as the REST API would."""
    fields: dict[str, Any] = {"tools": _tools(message.tools)}
    if message.tool_choice:
        fields["tool_choice"] = _choice(message.tool_choice)
    if message.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = message.parallel_tool_calls
    if message.HasField("separate_reasoning"):
        fields["separate_reasoning"] = message.separate_reasoning
    return fields


def tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    """Returns the request. Raises ``QuireError`` as the REST API would for the same one."""
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


def tokenize_response(result: TokenizeResult) -> pb.TokenizeResponse:
    """Returns tokens as a message."""
    return pb.TokenizeResponse(
        token_ids=result.tokens, max_model_len=result.max_model_len, token_strs=result.token_strs or ()
    )


def detokenize_request(message: pb.DetokenizeRequest) -> DetokenizeRequest:
    """Returns the request. Raises ``QuireError`` as the REST API would for the same one."""
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
    if message.name:
        fields["name"] = message.name
    return fields


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(tools: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    if sum(len(tool.parameters_json) for tool in tools) > MAX_TOOLS_CHARACTERS:
        raise tools_too_large()
    return [_tool(tool, number) for number, tool in enumerate(tools[: MAX_TOOLS + 1])]


def _tool(tool: pb.Tool, number: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters_json:
        function["parameters"] = _parameters(tool.parameters_json, f"tools[{number}].function.parameters")
    return {"type": "function", "function": function}


def _parameters(text: str, param: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))  # a byte order mark
    except (ValueError, RecursionError):
        raise invalid(param, f"{param} is not a JSON Schema.") from None


def _choice(text: str) -> Any:
    if not text.startswith(_FUNCTION):
        return text
    return {"type": "function", "function": {"name": text.removeprefix(_FUNCTION)}}


def embed_request(message: pb.EmbedRequest) -> EmbeddingRequest:
    """Returns the request. Raises ``QuireError`` as the REST API would for the same one."""
    kinds = [each.WhichOneof("input") for each in message.inputs[: MAX_INPUTS + 1]]
    inputs: list[Any] = [
        each.text if kind == "text" else _first(each.token_ids.ids, MAX_PROMPT_TOKENS)
        for each, kind in zip(message.inputs, kinds, strict=False)
    ]
    fields: dict[str, Any] = {"model": message.model, "input": inputs, "priority": message.priority}
    if message.dimensions:
        fields["dimensions"] = message.dimensions
    return EmbeddingRequest.from_fields(
        fields | _given(message, "use_activation", "prompt_name", "truncate_prompt_tokens")
    )


def score_request(message: pb.ScoreRequest) -> RerankRequest:
    """Returns the request. Raises as ``embed_request``."""
    fields: dict[str, Any] = {"model": message.model, "query": message.query, "priority": message.priority}
    fields["documents"] = _first(message.documents, MAX_INPUTS)
    return RerankRequest.from_fields(fields | _given(message, "use_activation", "truncate_prompt_tokens"))


def embed_response(request_id: str, answer: PooledAnswer) -> pb.EmbedResponse:
    """Returns the embeddings of a request."""
    embeddings = [pb.Embedding(values=vector_of(pooled)) for pooled in answer.pooled]
    return pb.EmbedResponse(request_id=request_id, embeddings=embeddings, usage=_usage(answer.usage))


def score_response(request_id: str, scores: Sequence[float], answer: PooledAnswer) -> pb.ScoreResponse:
    """Returns the scores of a request."""
    return pb.ScoreResponse(request_id=request_id, scores=scores, usage=_usage(answer.usage))


def _given(message: Message, *names: str) -> dict[str, Any]:
    """Returns the optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


Item = TypeVar("Item")
_SCALARS = {
    "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "n", "best_of", "beam_width", "length_penalty",
    "prompt_logprobs",
}  # fmt: skip
_EARLY_STOPPING: Mapping[int, bool | str] = {
    types_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    types_pb2.EARLY_STOPPING_FIRST: True,
    types_pb2.EARLY_STOPPING_NEVER: "never",
}
_STATUS: Mapping[RequestStatus, pb.RequestStatus.ValueType] = {
    RequestStatus.RUNNING: pb.REQUEST_STATUS_RUNNING,
    RequestStatus.COMPLETED: pb.REQUEST_STATUS_COMPLETED,
    RequestStatus.CANCELLED: pb.REQUEST_STATUS_CANCELLED,
    RequestStatus.FAILED: pb.REQUEST_STATUS_FAILED,
}
_STRUCTURED = {"json_object": "json_object", "json_schema": "json", "regex": "regex", "grammar": "grammar"}


def completion_request(message: pb.GenerateRequest) -> CompletionRequest:
    """Returns the request. Raises ``QuireError`` as the REST API would for the same one."""
    fields = _common(message) | {"echo": message.echo}
    kind = message.WhichOneof("prompt")
    if kind == "text":
        fields["prompt"] = message.text
    elif kind == "token_ids":
        fields["prompt"] = _first(message.token_ids.ids, MAX_PROMPT_TOKENS)
    if message.sampling.HasField("logprobs"):
        fields["logprobs"] = message.sampling.logprobs
    return CompletionRequest.from_fields(fields)


def chat_request(message: pb.ChatRequest) -> ChatRequest:
    """Returns the request. Raises ``QuireError`` as the REST API would for the same one."""
    fields = _common(message) | tool_fields(message) | {"messages": message_fields(message.messages)}
    if message.sampling.HasField("logprobs"):
        fields |= {"logprobs": True, "top_logprobs": message.sampling.logprobs}
    return ChatRequest.from_fields(fields)


def generate_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.GenerateResponse:
    """Returns the message of a delta of a continued text."""
    return pb.GenerateResponse(request_id=generation.request_id, event_id=event_id, **_delta_fields(generation, delta))


def chat_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.ChatResponse:
    """Returns the message of a delta of a chat."""
    return pb.ChatResponse(request_id=generation.request_id, event_id=event_id, **_delta_fields(generation, delta))


def resume_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.ResumeResponse:
    """Returns the message of a delta within that of the request's own method."""
    if generation.operation == "chat":
        return pb.ResumeResponse(chat=chat_response(generation, delta, event_id))
    return pb.ResumeResponse(generate=generate_response(generation, delta, event_id))


def request_response(stored: StoredRequest) -> pb.GetRequestResponse:
    """Returns the state of a request."""
    return pb.GetRequestResponse(
        request_id=stored.first.request_id,
        status=_STATUS[stored.status],
        model=stored.first.model_name,
        created=int(stored.first.created),
        background=stored.first.background,
        error=None if stored.error is None else error_to_proto(stored.error),
        usage=_usage(stored.usage),
    )


def model(card: ModelCard) -> pb.Model:
    """Returns one configured model."""
    return pb.Model(
        name=card.name,
        created=card.created,
        ready_engines=card.ready_engines,
        max_model_len=card.max_model_len,
        parent=card.parent,
        supported_tasks=[TASK_TO_PROTO[task] for task in card.supported_tasks],
    )


def _common(message: pb.GenerateRequest | pb.ChatRequest) -> dict[str, Any]:
    sampling = message.sampling
    fields: dict[str, Any] = {field.name: value for field, value in sampling.ListFields() if field.name in _SCALARS}
    fields |= {
        "model": message.model,
        "stop": _first(message.stop, MAX_STOPS),
        "stop_token_ids": _first(sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
        "include_stop_str_in_output": message.include_stop_str_in_output,
        "logit_bias": dict(islice(sampling.logit_bias.items(), MAX_BIASES + 1)),
        "bad_words": _bad_words(message),
        "early_stopping": _EARLY_STOPPING.get(sampling.early_stopping, "unknown"),
        "structured_outputs": _structured(sampling.structured),
        "priority": message.priority,
        "stream": True,
        "background": message.background,
    }
    if message.HasField("skip_special_tokens"):
        fields["skip_special_tokens"] = message.skip_special_tokens
    return fields


def _bad_words(message: pb.GenerateRequest | pb.ChatRequest) -> list[str | list[int]]:
    as_tokens = _first(message.sampling.bad_words, MAX_BAD_WORDS)
    as_texts = _first(message.bad_words, MAX_BAD_WORDS)
    return [*as_texts, *(_first(word.ids, MAX_BAD_WORD_TOKENS) for word in as_tokens)]


def _structured(message: types_pb2.Structured) -> dict[str, Any]:
    kind = message.WhichOneof("kind")
    if kind is None:
        return {}
    if kind == "choice":
        return {"choice": _first(message.choice.options, MAX_OPTIONS)}
    return {_STRUCTURED[kind]: getattr(message, kind)}


def _first(values: Sequence[Item], limit: int) -> list[Item]:
    """Returns the values, but at most one more than are allowed: enough for the validator to refuse them."""
    return list(values[: limit + 1])


def _delta_fields(generation: GenerationRequest, delta: Delta) -> dict[str, Any]:
    """Leaves out log-probabilities that the client did not request: ``best_of`` needs them itself."""
    asked = generation.params.logprobs is not None
    return {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "finish_reason": finish_to_proto(delta.finish_reason),
        "usage": None if delta.usage is None else _usage(delta.usage),
        "index": delta.index,
        "logprobs": map(logprobs_to_proto, delta.logprobs) if asked else (),
        "prompt_logprobs": map(logprobs_to_proto, delta.prompt_logprobs),
        "score": delta.score,
        "stop_string": delta.stop_string,
        "stop_token": None if delta.stop_token is None else stop_token_to_proto(delta.stop_token),
    }


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def add_parsed(message: Message, parsed: ParsedDelta, reasoning_tokens: int) -> None:
    """Adds reasoning, tool calls and the number of ``reasoning_tokens`` (0 before the end) to the message of a delta,
    whose text is the content already.
    """
    chat = message.chat if isinstance(message, pb.ResumeResponse) else message
    assert isinstance(chat, pb.ChatResponse)
    chat.reasoning = parsed.reasoning
    if reasoning_tokens:
        chat.usage.reasoning_tokens = reasoning_tokens
    for call in parsed.calls:
        chat.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    if parsed.finish_reason == TOOL_CALLS:
        chat.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
