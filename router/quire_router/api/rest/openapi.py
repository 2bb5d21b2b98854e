"""``/openapi.json``: the routes of the REST API and the schemas of their bodies, for tools that read OpenAPI."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from quire_router.api.rest import answers
from quire_router.api.rest.batch_endpoints import BatchBody
from quire_router.api.rest.conversation_endpoints import (
    CONVERSATIONS,
    ConversationBody,
    ConversationUpdate,
    NewItems,
)
from quire_router.api.rest.item_list import MAX_LISTED
from quire_router.api.rest.loras import LoadLoRABody, UnloadLoRABody
from quire_router.api.rest.model_infos import ANTHROPIC_VERSION
from quire_router.api.rest.model_infos import MAX_LISTED as MOST_MODELS
from quire_router.api.rest.openapi_schemas import DescribedParameter, Schemas
from quire_router.api.rest.pooling_routes import EMBEDDINGS, RERANK, SCORE
from quire_router.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from quire_router.api.schemas.base import MAX_LABEL_CHARACTERS
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire_router.api.schemas.responses import InputTokensRequest, ResponsesRequest
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest
from quire_router.batches.files import MAX_TTL, MIN_TTL

_DESCRIPTION = "OpenAI's APIs and Anthropic's Messages, served by Quire's router."
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_BYTES, _FORM = "application/octet-stream", "multipart/form-data"
_EVENT: Final = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["data"],
}
_MESSAGES = "/v1/messages"
_BOTH_APIS: Final = ("/v1/requests/", "/v1/models")
"""Paths whose errors are in the form of the API that the request came by, or whose client asks."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path does, in one line. ``body`` is the model that reads its body, or ``form`` the schema
    of one that is a form. ``answer`` is the type of a 200 and ``accepted`` that of a 202; None where the answer is not
    JSON. ``others`` are the content types besides. ``parameters`` are those of its query and headers.
    """

    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    others: Sequence[str] = ()
    accepted: Any = None
    parameters: Sequence[DescribedParameter] = ()
    form: Mapping[str, Any] | None = None
    needs_body: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """A tag of the document: the ``paths`` that belong together, in the order in which a reader meets them."""

    name: str
    description: str
    paths: Mapping[str, Mapping[str, Operation]]


def _query(name: str, description: str, **schema: Any) -> DescribedParameter:
    return DescribedParameter(name, "query", schema, description)


def _header(name: str, description: str, **schema: Any) -> DescribedParameter:
    return DescribedParameter(name, "header", {"type": "string", **schema}, description)


_LABEL: Final = {"minLength": 1, "maxLength": MAX_LABEL_CHARACTERS, "pattern": "^[!-~]+$"}
_SESSION = _header("X-Session-Id", "The client's name for its session: where its prompts are cached.", **_LABEL)
_TIMEOUT = _header("X-Request-Timeout", "How long the answer may take.", pattern="^[1-9][0-9]{0,5}(ms|s|m|h)?$")
_KEY = _header("Idempotency-Key", "Two requests with one key have one answer.", **_LABEL)
_GENERATE: Final = (_KEY, _SESSION, _TIMEOUT)
_LAST_EVENT: Final = _header("Last-Event-ID", "The last event that the client has.", pattern="^[0-9]{1,15}$")
_AFTER = _query("after", "The id of the last entry that the client has.", type="string", minLength=1, maxLength=128)
_ORDER = _query("order", "The newest first, or the oldest.", enum=["asc", "desc"])


def _limit(most: int) -> DescribedParameter:
    return _query("limit", "The most entries.", type="integer", minimum=1, maximum=most)


_ITEMS: Final = (_AFTER, _ORDER, _limit(MAX_LISTED))
_SECONDS: Final = {"type": "integer", "minimum": 0, "maximum": 99_999_999_999}
_USAGE: Final = (
    DescribedParameter("start_time", "query", _SECONDS, "Seconds since 1970.", required=True),
    _query("end_time", "Seconds since 1970; now where it is absent.", **_SECONDS),
    _query("bucket_width", "An hour or a day.", enum=["1h", "1d"]),
    _query("limit", "The most buckets: 168 hours or 31 days.", type="integer", minimum=1, maximum=31),
    _query("page", "The next_page of the page before.", **_SECONDS),
)
_UPLOAD: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": _BYTES},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL, "maximum": MAX_TTL},
    },
    "dependentRequired": {"expires_after[seconds]": ["expires_after[anchor]"]},
}
_UP_TO_A_THOUSAND: Final = {"type": "integer", "minimum": 1, "maximum": MOST_MODELS}
_ANTHROPIC_VERSION = _header(ANTHROPIC_VERSION, "Asks for the answer in the form of Anthropic's API.")

CONVERSATION_PATHS: Final = frozenset(
    {
        CONVERSATIONS,
        f"{CONVERSATIONS}/{{id}}",
        f"{CONVERSATIONS}/{{id}}/items",
        f"{CONVERSATIONS}/{{id}}/items/{{item_id}}",
    }
)
FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
BATCH_PATHS: Final = frozenset(
    {
        FILES,
        f"{FILES}/{{id}}",
        f"{FILES}/{{id}}/content",
        BATCHES,
        f"{BATCHES}/{{id}}",
        f"{BATCHES}/{{id}}/cancel",
    }
)
FLEET: Final = "/v1/fleet/events"
LOAD_LORA: Final = "/v1/load_lora_adapter"
UNLOAD_LORA: Final = "/v1/unload_lora_adapter"
LORA_UPDATES: Final = frozenset({LOAD_LORA, UNLOAD_LORA})
_EVENT_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_ITEM_PAGE: Final = answers.ListPage[answers.ConversationItem]
_EMBEDDINGS: Final = answers.Pooled[answers.Embedding]
_SCORES: Final = answers.Pooled[answers.Score]
_RERANKS: Final = "Orders documents by their relevance to a query."


def _generating(summary: str, body: type[BaseModel], answer: Any) -> Operation:
    """Returns an operation that may be streamed, or started in the background."""
    return Operation(summary, body, answer, (_EVENTS,), answers.RequestObject, _GENERATE)


def _pooling(summary: str, body: type[BaseModel], answer: Any) -> Operation:
    return Operation(summary, body, answer, parameters=(_SESSION, _TIMEOUT))


_SECTIONS: Final = (
    Section(
        "Chat",
        "OpenAI's Chat Completions answer a conversation that the client keeps.",
        {
            "/v1/chat/completions": {
                "post": _generating("Answers a conversation.", ChatRequest, answers.ChatCompletion)
            },
        },
    ),
    Section(
        "Completions",
        "OpenAI's Completions continue a text without a chat template.",
        {
            "/v1/completions": {"post": _generating("Continues a text.", CompletionRequest, answers.Completion)},
        },
    ),
    Section(
        "Responses",
        "OpenAI's Responses answer a conversation that the server can keep.",
        {
            "/v1/responses": {
                "post": Operation(
                    "Answers a conversation of the Responses API.",
                    ResponsesRequest,
                    answers.ResponseObject,
                    (_EVENTS,),
                    None,
                    _GENERATE,
                )
            },
            "/v1/responses/input_tokens": {
                "post": Operation(
                    "Counts a conversation's tokens.", InputTokensRequest, answers.InputTokens, needs_body=False
                )
            },
            "/v1/responses/{id}": {
                "get": Operation(
                    "A stored response, or its events.",
                    answer=answers.ResponseObject,
                    others=(_EVENTS,),
                    parameters=(
                        _query("stream", "Whether to send its events.", type="boolean"),
                        _query("starting_after", "The number of the last event that the client has.", **_EVENT_NUMBER),
                        _LAST_EVENT,
                        _TIMEOUT,
                    ),
                ),
                "delete": Operation("Ends and forgets a response.", answer=answers.Deleted),
            },
            "/v1/responses/{id}/cancel": {"post": Operation("Ends a response.", answer=answers.ResponseObject)},
            "/v1/responses/{id}/input_items": {
                "get": Operation("The conversation that a response answers.", answer=_ITEM_PAGE, parameters=_ITEMS)
            },
        },
    ),
    Section(
        "Conversations",
        "The server keeps conversations for the Responses API.",
        {
            CONVERSATIONS: {
                "post": Operation(
                    "Makes a conversation.", ConversationBody, answers.ConversationObject, needs_body=False
                )
            },
            f"{CONVERSATIONS}/{{id}}": {
                "get": Operation("A conversation, without its items.", answer=answers.ConversationObject),
                "post": Operation(
                    "Gives a conversation other metadata.", ConversationUpdate, answers.ConversationObject
                ),
                "delete": Operation("Deletes a conversation.", answer=answers.Deleted),
            },
            f"{CONVERSATIONS}/{{id}}/items": {
                "get": Operation("The items of a conversation.", answer=_ITEM_PAGE, parameters=_ITEMS),
                "post": Operation("Adds items to a conversation.", NewItems, _ITEM_PAGE),
            },
            f"{CONVERSATIONS}/{{id}}/items/{{item_id}}": {
                "get": Operation("An item of a conversation.", answer=answers.ConversationItem),
                "delete": Operation("Removes an item from a conversation.", answer=answers.ConversationObject),
            },
        },
    ),
    Section(
        "Messages",
        "Anthropic's Messages answer a conversation that the client keeps.",
        {
            "/v1/messages": {
                "post": Operation(
                    "Answers a conversation of the Messages API.",
                    MessagesRequest,
                    answers.WholeMessage,
                    (_EVENTS,),
                    None,
                    _GENERATE,
                )
            },
            "/v1/messages/count_tokens": {
                "post": Operation("Counts a conversation's tokens.", CountTokensRequest, answers.TokenCount)
            },
        },
    ),
    Section(
        "Embeddings and ranking",
        "Models that pool their prompts make vectors of texts, score pairs and rank documents.",
        {
            EMBEDDINGS: {"post": _pooling("Makes embeddings of texts or of tokens.", EmbeddingRequest, _EMBEDDINGS)},
            **{path: {"post": _pooling("Scores pairs of texts.", ScoreRequest, _SCORES)} for path in SCORE},
            **{path: {"post": _pooling(_RERANKS, RerankRequest, answers.Ranking)} for path in RERANK},
        },
    ),
    Section(
        "Tokens",
        "The model's tokenizer turns texts into tokens, and tokens into text.",
        {
            "/tokenize": {
                "post": Operation("The tokens of a text or of a conversation.", TokenizeRequest, answers.Tokens)
            },
            "/detokenize": {"post": Operation("The text of tokens.", DetokenizeRequest, answers.Text)},
        },
    ),
    Section(
        "Requests",
        "An answer outlives its connection: continue to read it, ask for its state, or cancel it.",
        {
            "/v1/requests/{id}": {
                "get": Operation(
                    "The state of a request, and its answer once that is complete.", answer=answers.RequestObject
                ),
                "delete": Operation("Ends and forgets a request.", answer=answers.RequestObject),
            },
            "/v1/requests/{id}/cancel": {"post": Operation("Ends a request.", answer=answers.RequestObject)},
            "/v1/requests/{id}/events": {
                "get": Operation(
                    "The answer from Last-Event-ID on.",
                    others=(_EVENTS,),
                    parameters=(
                        _header("Last-Event-ID", "The last event that the client has."),
                        _query("after", "The same, for clients that cannot set headers.", type="string"),
                        _TIMEOUT,
                    ),
                )
            },
        },
    ),
    Section(
        "Files and batches",
        "OpenAI's Batch API runs files of requests in the background.",
        {
            FILES: {
                "get": Operation(
                    "The caller's files.",
                    answer=answers.ListPage[answers.File],
                    parameters=(
                        _AFTER,
                        _ORDER,
                        _limit(10_000),
                        _query("purpose", "Files of this purpose.", type="string"),
                    ),
                ),
                "post": Operation("Stores a file for a batch.", answer=answers.File, form=_UPLOAD),
            },
            f"{FILES}/{{id}}": {
                "get": Operation("Describes a file.", answer=answers.File),
                "delete": Operation("Deletes a file.", answer=answers.Deleted),
            },
            f"{FILES}/{{id}}/content": {"get": Operation("What a file holds.", others=(_BYTES,))},
            BATCHES: {
                "get": Operation(
                    "The caller's batches.",
                    answer=answers.ListPage[answers.BatchObject],
                    parameters=(_AFTER, _limit(MAX_LISTED)),
                ),
                "post": Operation("Begins a batch.", BatchBody, answers.BatchObject),
            },
            f"{BATCHES}/{{id}}": {"get": Operation("A batch as it is now.", answer=answers.BatchObject)},
            f"{BATCHES}/{{id}}/cancel": {"post": Operation("Ends a batch.", answer=answers.BatchObject)},
        },
    ),
    Section(
        "Models",
        "The router lists its models, and loads LoRA adapters while it runs.",
        {
            "/v1/models": {
                "get": Operation(
                    "The models that the caller may use.",
                    answer=answers.ModelList | answers.ModelInfos,
                    parameters=(
                        _ANTHROPIC_VERSION,
                        _query("limit", "The most models, in the form of Anthropic's API.", **_UP_TO_A_THOUSAND),
                        _query("after_id", "The last model that the client has, in that form.", type="string"),
                        _query("before_id", "The first model that the client has, in that form.", type="string"),
                    ),
                )
            },
            "/v1/models/{model}": {
                "get": Operation(
                    "One model.", answer=answers.Model | answers.ModelInfo, parameters=(_ANTHROPIC_VERSION,)
                )
            },
            LOAD_LORA: {"post": Operation("Loads a LoRA adapter at all engines.", LoadLoRABody, others=(_TEXT,))},
            UNLOAD_LORA: {"post": Operation("Unloads a LoRA adapter at all engines.", UnloadLoRABody, others=(_TEXT,))},
        },
    ),
    Section(
        "Fleet and usage",
        "The router shows its engines, each tenant's usage, and its version.",
        {
            "/v1/usage": {
                "get": Operation(
                    "What the caller's tenant used, by hour or day and model.",
                    answer=answers.UsagePageObject,
                    parameters=_USAGE,
                )
            },
            FLEET: {"get": Operation("The fleet, live.", others=(_EVENTS,))},
            "/version": {"get": Operation("The router's version.", answer=answers.Version)},
        },
    ),
)
"""All routes but those of probes, of the page's files and of this document."""


def openapi(version: str, absent: Container[str] = ()) -> dict[str, Any]:
    """The document, in OpenAPI 3.1, without the paths that are ``absent`` from this router."""
    schemas = Schemas()
    tags, paths = list[dict[str, str]](), dict[str, dict[str, Any]]()
    for section in _SECTIONS:
        present = {path: methods for path, methods in section.paths.items() if path not in absent}
        tags += [{"name": section.name, "description": section.description}] if present else []
        for path, methods in present.items():
            described = {method: _operation(path, operation, schemas) for method, operation in methods.items()}
            paths[path] = {method: {"tags": [section.name], **each} for method, each in described.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "description": _DESCRIPTION},
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
        # None of them where the router has no keys.
        "security": [{}, {"bearer": []}, {"x-api-key": []}, {"api-key": []}],
    }


def _operation(path: str, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {} if operation.answer is None else _json(schemas.of_answer(operation.answer))
    content |= {each: {"schema": _EVENT if each == _EVENTS else {"type": "string"}} for each in operation.others}
    responses = {"200": {"description": "The answer.", "content": content}}
    if operation.accepted is not None:
        accepted = _json(schemas.of_answer(operation.accepted))
        responses["202"] = {"description": "It runs in the background.", "content": accepted}
    error: Any = answers.MessagesError if path.startswith(_MESSAGES) else answers.Error
    if path.startswith(_BOTH_APIS):
        error = answers.Error | answers.MessagesError
    responses["default"] = {"description": "What was wrong.", "content": _json(schemas.of_answer(error))}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    in_path = [
        DescribedParameter(
            name, "path", {"type": "string", "minLength": 1}, f"The {name} in the address.", required=True
        )
        for name in re.findall(r"{(\w+)}", path)
    ]
    if parameters := [each.to_object() for each in (*in_path, *operation.parameters)]:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": _json(schemas.of_body(operation.body)),
        }
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {_FORM: {"schema": operation.form}}}
    return described


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {_JSON: {"schema": schema}}
