"""Protobuf messages to the request schemas, and answers to protobuf messages."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_proto.convert import error_to_proto, finish_to_proto, logprobs_to_proto
from quire_proto.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_TOKEN_IDS
from quire_proto.structured import MAX_OPTIONS

from quire_router.api.earlier import RequestStatus, StoredRequest
from quire_router.api.fields import MAX_PROMPT_TOKENS, MAX_STOPS
from quire_router.api.frontend import ModelCard
from quire_router.api.rpc.tools import message_fields, tool_fields
from quire_router.api.schemas import ChatRequest, CompletionRequest
from quire_router.generation import Delta, GenerationRequest, Usage

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
    """Raises ``QuireError`` as the REST API would for the same request."""
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
    """Raises ``QuireError`` as the REST API would for the same request."""
    fields = _common(message) | tool_fields(message) | {"messages": message_fields(message.messages)}
    if message.sampling.HasField("logprobs"):
        fields |= {"logprobs": True, "top_logprobs": message.sampling.logprobs}
    return ChatRequest.from_fields(fields)


def generate_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.GenerateResponse:
    """One piece of a continued text."""
    return pb.GenerateResponse(request_id=generation.request_id, event_id=event_id, **_piece(generation, delta))


def chat_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.ChatResponse:
    """One piece of the assistant's answer."""
    return pb.ChatResponse(request_id=generation.request_id, event_id=event_id, **_piece(generation, delta))


def resume_response(generation: GenerationRequest, delta: Delta, event_id: str) -> pb.ResumeResponse:
    """One piece in the message that the request is answered with."""
    if generation.operation == "chat":
        return pb.ResumeResponse(chat=chat_response(generation, delta, event_id))
    return pb.ResumeResponse(generate=generate_response(generation, delta, event_id))


def request_response(earlier: StoredRequest) -> pb.GetRequestResponse:
    """How it is with a request."""
    return pb.GetRequestResponse(
        request_id=earlier.first.request_id,
        status=_STATUS[earlier.status],
        model=earlier.first.model,
        created=int(earlier.first.created),
        background=earlier.first.background,
        error=None if earlier.error is None else error_to_proto(earlier.error),
        usage=_usage(earlier.usage),
    )


def model(card: ModelCard) -> pb.Model:
    """One configured model."""
    return pb.Model(
        name=card.name,
        created=card.created,
        ready_engines=card.ready_engines,
        max_model_len=card.max_model_len,
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
    """The values, or one more than are allowed: the validator refuses that, and the rest need not be copied for it."""
    return list(values[: limit + 1])


def _piece(generation: GenerationRequest, delta: Delta) -> dict[str, Any]:
    """``best_of`` needs log-probabilities of its own, which nobody asked for."""
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
    }


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
