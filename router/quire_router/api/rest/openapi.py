"""``/openapi.json``: the routes of the REST API and the schemas of their bodies, for tools that read OpenAPI."""

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from quire_router.api.rest.batch_endpoints import BatchBody
from quire_router.api.rest.conversation_endpoints import (
    CONVERSATIONS,
    ConversationBody,
    ConversationUpdate,
    NewItems,
)
from quire_router.api.rest.loras import LoadLoRABody, UnloadLoRABody
from quire_router.api.rest.pooling_routes import EMBEDDINGS, RERANK, SCORE
from quire_router.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire_router.api.schemas.responses import InputTokensRequest, ResponsesRequest
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest

_DESCRIPTION = "OpenAI's APIs and Anthropic's Messages, served by Quire's router."
_SCHEMAS = "#/components/schemas/"
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_BYTES = "application/octet-stream"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field of the body that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "properties": {
                        "error_code": {"type": "string"},
                        "param": {"type": ["string", "null"], "description": "The field of the body that is wrong."},
                    },
                },
            },
        },
        "request_id": {"type": "string"},
    },
}


class Operation:
    """What one method of one path does: in one line, with the schema of its body, and the types of its answer."""

    def __init__(self, summary: str, body: type[BaseModel] | None = None, *, answers: Sequence[str] = (_JSON,)) -> None:
        self.summary = summary
        self.body = body
        self.answers = answers


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
OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "/v1/chat/completions": {"post": Operation("Answers a conversation.", ChatRequest, answers=(_JSON, _EVENTS))},
    "/v1/completions": {"post": Operation("Continues a text.", CompletionRequest, answers=(_JSON, _EVENTS))},
    "/v1/messages": {
        "post": Operation("Answers a conversation of the Messages API.", MessagesRequest, answers=(_JSON, _EVENTS))
    },
    "/v1/messages/count_tokens": {"post": Operation("Counts a conversation's tokens.", CountTokensRequest)},
    "/v1/responses": {
        "post": Operation("Answers a conversation of the Responses API.", ResponsesRequest, answers=(_JSON, _EVENTS))
    },
    "/v1/responses/input_tokens": {"post": Operation("Counts a conversation's tokens.", InputTokensRequest)},
    "/v1/responses/{id}": {
        "get": Operation("A stored response, or its events.", answers=(_JSON, _EVENTS)),
        "delete": Operation("Ends and forgets a response."),
    },
    "/v1/responses/{id}/cancel": {"post": Operation("Ends a response.")},
    "/v1/responses/{id}/input_items": {"get": Operation("The conversation that a response answers.")},
    CONVERSATIONS: {"post": Operation("Makes a conversation.", ConversationBody)},
    f"{CONVERSATIONS}/{{id}}": {
        "get": Operation("A conversation, without its items."),
        "post": Operation("Gives a conversation other metadata.", ConversationUpdate),
        "delete": Operation("Deletes a conversation."),
    },
    f"{CONVERSATIONS}/{{id}}/items": {
        "get": Operation("The items of a conversation."),
        "post": Operation("Adds items to a conversation.", NewItems),
    },
    f"{CONVERSATIONS}/{{id}}/items/{{item_id}}": {
        "get": Operation("An item of a conversation."),
        "delete": Operation("Removes an item from a conversation."),
    },
    EMBEDDINGS: {"post": Operation("Makes embeddings of texts or of tokens.", EmbeddingRequest)},
    **{path: {"post": Operation("Scores pairs of texts.", ScoreRequest)} for path in SCORE},
    **{path: {"post": Operation("Orders documents by their relevance to a query.", RerankRequest)} for path in RERANK},
    FILES: {
        "get": Operation("The caller's files."),
        "post": Operation("Stores a file for a batch, which comes as multipart/form-data."),
    },
    f"{FILES}/{{id}}": {"get": Operation("What is known of a file."), "delete": Operation("Deletes a file.")},
    f"{FILES}/{{id}}/content": {"get": Operation("What a file holds.", answers=(_BYTES,))},
    BATCHES: {"get": Operation("The caller's batches."), "post": Operation("Begins a batch.", BatchBody)},
    f"{BATCHES}/{{id}}": {"get": Operation("A batch as it is now.")},
    f"{BATCHES}/{{id}}/cancel": {"post": Operation("Ends a batch.")},
    "/v1/models": {"get": Operation("The models that the caller may use.")},
    "/v1/models/{model}": {"get": Operation("One model.")},
    "/v1/requests/{id}": {
        "get": Operation("The state of a request, and its answer once that is complete."),
        "delete": Operation("Ends and forgets a request."),
    },
    "/v1/requests/{id}/cancel": {"post": Operation("Ends a request.")},
    "/v1/requests/{id}/events": {"get": Operation("The answer from Last-Event-ID on.", answers=(_EVENTS,))},
    "/v1/usage": {"get": Operation("What the caller's tenant used, by hour or day and model.")},
    FLEET: {"get": Operation("The fleet, live.", answers=(_EVENTS,))},
    LOAD_LORA: {"post": Operation("Loads a LoRA adapter at all engines.", LoadLoRABody, answers=(_TEXT,))},
    UNLOAD_LORA: {"post": Operation("Unloads a LoRA adapter at all engines.", UnloadLoRABody, answers=(_TEXT,))},
    "/tokenize": {"post": Operation("The tokens of a text or of a conversation.", TokenizeRequest)},
    "/detokenize": {"post": Operation("The text of tokens.", DetokenizeRequest)},
    "/version": {"get": Operation("The router's version.")},
}
"""All routes but those of probes, of the page's files and of this document, by path."""


def openapi(version: str, absent: Container[str] = ()) -> dict[str, Any]:
    """The document, in OpenAPI 3.1, without the paths that are ``absent`` from this router."""
    schemas: dict[str, Any] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    paths = {
        path: {method: _operation(path, operation, schemas) for method, operation in methods.items()}
        for path, methods in OPERATIONS.items()
        if path not in absent
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
        # None of them where the router has no keys.
        "security": [{}, {"bearer": []}, {"x-api-key": []}, {"api-key": []}],
    }


def _operation(path: str, operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {each: {} for each in operation.answers}},
            "default": {
                "description": "What was wrong.",
                "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}{error}"}}},
            },
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        schema = operation.body.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
        schemas.update(schema.pop("$defs", {}))
        schemas[operation.body.__name__] = schema
        reference = {"$ref": f"{_SCHEMAS}{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": reference}}}
    return described
