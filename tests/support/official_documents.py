"""The official documents as the oracle of answers: the models of the ``openai`` and ``anthropic`` packages, in strict
mode. No field is unknown, none that is required is missing, types and enums are exact. ``EXTRA_FIELDS`` lists what
answers have beyond the documents.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Generic, Literal, TypeVar

from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorObject as MessagesErrorObject
from openai.types import (
    Batch,
    Completion,
    CompletionChoice,
    CreateEmbeddingResponse,
    Embedding,
    ErrorObject,
    FileDeleted,
    FileObject,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
)
from openai.types.responses import InputTokenCountResponse, Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError

DONE = "[DONE]"


Item = TypeVar("Item")


class OpenAIError(BaseModel):
    """OpenAI's document has it in the body of each error; the package only what is in it."""

    error: ErrorObject


class RequestTooLarge(BaseModel):
    """In Anthropic's list of errors; of the package it is an exception alone."""

    type: Literal["request_too_large"]
    message: str


class MessagesError(BaseModel):
    """``ErrorResponse`` of Anthropic's package, whose ``request_id`` the document has in each."""

    type: Literal["error"]
    error: MessagesErrorObject | RequestTooLarge
    request_id: str


class Ping(BaseModel):
    """In Anthropic's document of streams; the package reads over it."""

    type: Literal["ping"]


class Logprobs(BaseModel):
    """Those of completions, as OpenAI's server and vLLM send them: the first token of a prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class WholeChoice(CompletionChoice):
    """A choice of a whole completion."""

    logprobs: Logprobs | None  # type: ignore[assignment]


class ChunkChoice(WholeChoice):
    """That of a chunk, whose end is null until there is one, as OpenAI's server and vLLM send it."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class WholeCompletion(Completion):
    """The package has one model for completions, whole and streamed."""

    choices: list[WholeChoice]  # type: ignore[assignment]


class CompletionChunk(Completion):
    """A chunk of a completion."""

    choices: list[ChunkChoice]  # type: ignore[assignment]


class EmbeddingText(BaseModel):
    """An embedding in the form that ``encoding_format: base64`` asks for, which the package decodes."""

    object: Literal["embedding"]
    index: int
    embedding: str


class EmbeddingList(CreateEmbeddingResponse):
    """Embeddings as lists or as text."""

    data: list[Embedding | EmbeddingText]  # type: ignore[assignment]


class ModelList(BaseModel):
    """OpenAI's list of models, which the package knows as a page."""

    object: Literal["list"]
    data: list[Model]


class Listed(BaseModel, Generic[Item]):
    """A page of OpenAI's lists."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelInfos(BaseModel):
    """Anthropic's list of models, which the package knows as a page."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


MESSAGES_EVENT = RawMessageStreamEvent | Ping | MessagesError

_NULL = "vLLM: null unless a request asks for it"
_CHOICE = {
    "choices.*.token_ids": _NULL,
    "choices.*.score": "ours: what beam search ranks by",
    "choices.*.stop_reason": "vLLM: which stop string or stop token ended the choice",
}
_WHOLE_CHOICE = {**_CHOICE, "choices.*.routed_experts": _NULL, "choices.*.weight_versions": _NULL}
_WHOLE = {"kv_transfer_params": _NULL, "ec_transfer_params": _NULL, "metrics": _NULL}
_PROMPT = {"prompt_token_ids": _NULL, "prompt_text": _NULL}
_REASONING_CONTENT = "DeepSeek: the reasoning, by the name that many clients look for"
_JOURNAL = "ours: the end of a stored answer could not be written in time"
_STORE = "OpenAI's server and Open Responses: whether it is stored"

EXTRA_FIELDS: Mapping[object, Mapping[str, str]] = {
    ChatCompletion: {
        **_WHOLE_CHOICE,
        **_WHOLE,
        **_PROMPT,
        "choices.*.message.reasoning": "vLLM: the reasoning",
        "choices.*.message.reasoning_content": _REASONING_CONTENT,
        "prompt_logprobs": "vLLM: log-probabilities of the prompt",
    },
    ChatCompletionChunk: {
        **_CHOICE,
        **_PROMPT,
        "choices.*.delta.reasoning": "vLLM: the reasoning",
        "choices.*.delta.reasoning_content": _REASONING_CONTENT,
        "kv_transfer_params": _NULL,
        "quire_journal": _JOURNAL,
    },
    WholeCompletion: {
        **_WHOLE_CHOICE,
        **_WHOLE,
        "choices.*.prompt_token_ids": _NULL,
        "choices.*.prompt_logprobs": "vLLM: log-probabilities of the prompt",
        "service_tier": "vLLM: as in chats",
    },
    CompletionChunk: {**_CHOICE, "choices.*.prompt_token_ids": _NULL, "quire_journal": _JOURNAL},
    EmbeddingList: {"id": "vLLM: as other answers", "created": "vLLM: as other answers"},
    Response: {"store": _STORE},
    ResponseStreamEvent: {
        "response.store": _STORE,
        "quire_journal": _JOURNAL,
        "error": "ours: the error as other answers have it, which clients of chats look for",
        "name": "earlier versions of the document: the function of arguments that are complete",
    },
    Model: (
        _MODEL := {
            "max_model_len": "vLLM: tokens of prompt and answer together",
            "parent": "vLLM: the model of an adapter",
            "root": "vLLM: the model itself, or that of an adapter",
            "supported_tasks": "ours: what the model can do",
        }
    ),
    ModelList: {f"data.*.{name}": reason for name, reason in _MODEL.items()},
    OpenAIError: {
        "error.request_id": "ours: the id to look for in logs",
        "error.resumable": "ours: whether the stream can be read on",
    },
    MESSAGES_EVENT: {"quire_journal": _JOURNAL},
    MessagesError: {"error.details": "ours: the field that is wrong, and the code that OpenAI's API has"},
}
"""Fields of answers that are in no official document, with the reason for each. A path leads to them from the whole
answer or event; ``*`` is every entry of a list.
"""

_PRESENT = ("choices.*.logprobs", "choices.*.finish_reason")
REQUIRED_FIELDS: Mapping[object, Collection[str]] = {
    ChatCompletion: (
        *_PRESENT,
        *(path for path in EXTRA_FIELDS[ChatCompletion] if path != "choices.*.score"),
        *(f"choices.*.message.{name}" for name in ("content", "refusal", "annotations", "audio", "function_call")),
        *("service_tier", "system_fingerprint", "usage"),
    ),
    ChatCompletionChunk: ("choices.*.finish_reason",),
    WholeCompletion: (
        *_PRESENT,
        *(path for path in EXTRA_FIELDS[WholeCompletion] if path != "choices.*.score"),
        *("system_fingerprint", "usage"),
    ),
    CompletionChunk: (*_PRESENT, "choices.*.token_ids", "choices.*.prompt_token_ids"),
    Response: ("error", "incomplete_details", "instructions", "metadata", "temperature", "top_p", "usage"),
    Message: ("stop_sequence",),
}
"""Fields that are always there, if with null, and that the packages fill in where they are missing: the documents
require them, or vLLM sends them.
"""
_LISTS = {"output_text": ("annotations", "logprobs"), "reasoning": ("summary",)}
"""The lists that an object of a type always has, by the documents, wherever it stands."""

ANSWERS: Mapping[tuple[str, str], tuple[Any, Any]] = {
    ("POST", "/v1/chat/completions"): (ChatCompletion, ChatCompletionChunk | OpenAIError),
    ("POST", "/v1/completions"): (WholeCompletion, CompletionChunk | OpenAIError),
    ("POST", "/v1/messages"): (Message, MESSAGES_EVENT),
    ("POST", "/v1/messages/count_tokens"): (MessageTokensCount, None),
    ("POST", "/v1/responses"): (Response, ResponseStreamEvent),
    ("GET", "/v1/responses/{}"): (Response, ResponseStreamEvent),
    ("POST", "/v1/responses/{}/cancel"): (Response, None),
    ("POST", "/v1/responses/input_tokens"): (InputTokenCountResponse, None),
    ("GET", "/v1/responses/{}/input_items"): (ResponseItemList, None),
    ("POST", "/v1/conversations"): (Conversation, None),
    ("GET", "/v1/conversations/{}"): (Conversation, None),
    ("POST", "/v1/conversations/{}"): (Conversation, None),
    ("DELETE", "/v1/conversations/{}"): (ConversationDeletedResource, None),
    ("GET", "/v1/conversations/{}/items"): (ConversationItemList, None),
    ("POST", "/v1/conversations/{}/items"): (ConversationItemList, None),
    ("GET", "/v1/conversations/{}/items/{}"): (ConversationItem, None),
    ("DELETE", "/v1/conversations/{}/items/{}"): (Conversation, None),
    ("POST", "/v1/embeddings"): (EmbeddingList, None),
    ("GET", "/v1/files"): (Listed[FileObject], None),
    ("POST", "/v1/files"): (FileObject, None),
    ("GET", "/v1/files/{}"): (FileObject, None),
    ("DELETE", "/v1/files/{}"): (FileDeleted, None),
    ("GET", "/v1/batches"): (Listed[Batch], None),
    ("POST", "/v1/batches"): (Batch, None),
    ("GET", "/v1/batches/{}"): (Batch, None),
    ("POST", "/v1/batches/{}/cancel"): (Batch, None),
    ("GET", "/v1/models"): (ModelList, None),
    ("GET", "/v1/models/{}"): (Model, None),
}
"""The models of whole answers and of events, by method and path."""

_BY_OBJECT: Mapping[str, Any] = {
    "chat.completion": ChatCompletion,
    "text_completion": WholeCompletion,
    "message": Message,
    "response": Response,
}
"""Whole answers by what they call themselves, where the address does not say of which API they are."""
_OWN = ("/v1/requests/", "/v1/usage", "/v1/fleet/")
_TAGS = ("type", "object", "role")
_SHOWN = 6  # problems of one answer


def problems_of_answer(method: str, path: str, status: int, content_type: str, body: bytes) -> list[str]:
    """Returns where an answer differs from the documents; nothing for routes that are in none."""
    path = path.partition("?")[0]
    if not path.startswith("/v1/") or status in (202, 204):
        return []
    if content_type.startswith("text/event-stream"):
        found = [each for data in event_data(body) for each in _problems_of_event(method, path, data)]
    elif content_type.startswith("application/json"):
        found = _problems_of_body(method, path, status, json.loads(body))
    elif path.endswith("/content"):
        found = [each for line in body.splitlines() for each in _problems_of_line(json.loads(line))]
    else:
        found = []
    return [f"{method} {path}: {each}" for each in found]


def event_data(body: bytes) -> Iterator[str]:
    """Yields the data of the complete events of a stream, without its end mark."""
    for block in body.decode().split("\n\n")[:-1]:
        lines = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        if lines and lines != [DONE]:
            yield "\n".join(lines)


def problems(model: Any, value: Any) -> list[str]:
    """Returns where ``value`` is not as strict mode has the ``model``, apart from ``EXTRA_FIELDS``."""
    kinds = (model, *getattr(model, "__args__", ()))
    required = (
        path for kind in kinds if kind is Response or "error" not in value for path in REQUIRED_FIELDS.get(kind, ())
    )
    missing = [f"{path}: it is missing" for path in required if not _has(value, path.split("."))]
    missing += _missing_lists(value)
    for path in (path for kind in kinds for path in EXTRA_FIELDS.get(kind, ())):
        value = _without(value, path.split("."))
    try:
        _adapter(model).validate_json(json.dumps(value), strict=True, extra="forbid")
    except ValidationError as error:
        return missing + _described(error)
    return missing


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _model_of(method: str, path: str) -> tuple[Any, Any]:
    for (known, template), models in ANSWERS.items():
        if known == method and re.fullmatch(template.replace("{}", "[^/]+"), path):
            return models
    return None, None


def _error_model(path: str, value: Any) -> Any:
    """Returns the model of an error. What was stored has those of the API that it came by."""
    is_message = (
        "type" in value if path.startswith(("/v1/requests/", "/v1/models")) else f"{path}/".startswith("/v1/messages/")
    )
    return MessagesError if is_message else OpenAIError


def _problems_of_event(method: str, path: str, data: str) -> list[str]:
    _, model = _model_of(method, path)
    value = json.loads(data)
    if model is None and not path.startswith(_OWN):
        return [f"no document has a stream here: {data[:80]}"]
    return problems(model or _event_model(value), value) if not path.startswith("/v1/fleet/") else []


def _event_model(value: dict[str, Any]) -> Any:
    """Returns the model of an event of ``/v1/requests/{id}/events``, whose API only the event says."""
    if "object" in value:
        return CompletionChunk if value["object"] == "text_completion" else ChatCompletionChunk
    if "type" in value:
        return ResponseStreamEvent if "sequence_number" in value else MESSAGES_EVENT
    return OpenAIError


def _problems_of_body(method: str, path: str, status: int, value: Any) -> list[str]:
    if status >= 400:
        return problems(_error_model(path, value), value)
    model, _ = _model_of(method, path)
    if path.startswith("/v1/models") and "object" not in value:  # for a client of Anthropic's API
        model = ModelInfos if "data" in value else ModelInfo
    if model is not None:
        return problems(model, value)
    answer = value.get("response") if path.startswith("/v1/requests/") else None
    return [] if answer is None else problems(_BY_OBJECT[answer.get("object") or answer["type"]], answer)


def _problems_of_line(line: dict[str, Any]) -> list[str]:
    """Returns those of a line of a batch's result; other files are the caller's."""
    body = (line.get("response") or {}).get("body")
    if not isinstance(body, dict):
        return []
    if "error" in body and "object" not in body:
        return problems(MessagesError if "type" in body else OpenAIError, body)
    return problems(EmbeddingList if body["object"] == "list" else _BY_OBJECT[body["object"]], body)


def _without(value: Any, path: list[str]) -> Any:
    """Returns a copy of ``value`` without the field at ``path``."""
    name, *rest = path
    if name == "*":
        return [_without(each, rest) for each in value] if isinstance(value, list) else value
    if not isinstance(value, dict) or name not in value:
        return value
    if rest:
        return {**value, name: _without(value[name], rest)}
    return {key: each for key, each in value.items() if key != name}


def _has(value: Any, path: list[str]) -> bool:
    """Whether there is a field at ``path``, in every entry of a list."""
    if not path:
        return True
    name, *rest = path
    if name == "*":
        return all(_has(each, rest) for each in value)
    return name in value and _has(value[name], rest)


def _missing_lists(value: Any) -> list[str]:
    """Returns which of the ``_LISTS`` are missing in an answer."""
    if isinstance(value, list):
        return [each for entry in value for each in _missing_lists(entry)]
    if not isinstance(value, dict):
        return []
    names = _LISTS.get(value["type"], ()) if isinstance(value.get("type"), str) else ()
    missing = [f"{value['type']}.{name}: it is missing" for name in names if not isinstance(value.get(name), list)]
    return missing + [each for entry in value.values() for each in _missing_lists(entry)]


def _described(error: ValidationError) -> list[str]:
    """Returns a line for each problem: of a union, only those of the kinds that the value says it is."""
    errors = error.errors(include_url=False)
    others = {each["loc"][:-1] for each in errors if each["type"] == "literal_error" and each["loc"][-1] in _TAGS}
    others |= {("OpenAIError",)}  # an event that is one has no other problems
    likely = [each for each in errors if not any(each["loc"][: len(other)] == other for other in others if other)]
    return [
        f"{'.'.join(map(str, each['loc']))}: {each['msg']} ({str(each['input'])[:80]})"
        for each in (likely or errors)[:_SHOWN]
    ]
