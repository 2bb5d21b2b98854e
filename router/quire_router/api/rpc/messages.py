"""Protobuf messages to the request schemas, and answers to protobuf messages."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_proto.convert import finish_to_proto
from quire_proto.sampling import MAX_STOP_TOKEN_IDS

from quire_router.api.fields import MAX_PROMPT_TOKENS, MAX_STOPS
from quire_router.api.frontend import ModelCard
from quire_router.api.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest
from quire_router.generation import Delta, Usage

Item = TypeVar("Item")
_Optional: TypeAlias = Literal["temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos"]
_OPTIONAL: tuple[_Optional, ...] = ("temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos")


def completion_request(message: pb.GenerateRequest) -> CompletionRequest:
    """Raises ``QuireError`` as the REST API would for the same request."""
    fields = _common(message.model, message.sampling, message.stop)
    kind = message.WhichOneof("prompt")
    if kind == "text":
        fields["prompt"] = message.text
    elif kind == "token_ids":
        fields["prompt"] = _first(message.token_ids.ids, MAX_PROMPT_TOKENS)
    return CompletionRequest.from_fields(fields)


def chat_request(message: pb.ChatRequest) -> ChatRequest:
    """Raises ``QuireError`` as the REST API would for the same request."""
    fields = _common(message.model, message.sampling, message.stop)
    messages = _first(message.messages, MAX_MESSAGES)
    fields["messages"] = [{"role": each.role, "content": each.content} for each in messages]
    return ChatRequest.from_fields(fields)


def generate_response(request_id: str, delta: Delta) -> pb.GenerateResponse:
    """One piece of a continued text."""
    return pb.GenerateResponse(request_id=request_id, **_piece(delta))


def chat_response(request_id: str, delta: Delta) -> pb.ChatResponse:
    """One piece of the assistant's answer."""
    return pb.ChatResponse(request_id=request_id, **_piece(delta))


def model(card: ModelCard) -> pb.Model:
    """One configured model."""
    return pb.Model(
        name=card.name,
        created=card.created,
        ready_engines=card.ready_engines,
        max_model_len=card.max_model_len,
    )


def _common(name: str, sampling: types_pb2.SamplingParams, stop: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": name, "stop": _first(stop, MAX_STOPS), "stream": True}
    fields |= {field: getattr(sampling, field) for field in _OPTIONAL if sampling.HasField(field)}
    return fields | {"stop_token_ids": _first(sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)}


def _first(values: Sequence[Item], limit: int) -> list[Item]:
    """The values, or one more than are allowed: the validator refuses that, and the rest need not be copied for it."""
    return list(values[: limit + 1])


def _piece(delta: Delta) -> dict[str, Any]:
    return {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "finish_reason": finish_to_proto(delta.finish_reason),
        "usage": None if delta.usage is None else _usage(delta.usage),
    }


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
