"""Answers as the OpenAI API writes them: what whole answers and streams have in common, errors and models. Does no
I/O.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from quire_proto.errors import QuireError

from quire_router.api.earlier import StoredRequest
from quire_router.api.frontend import ModelCard
from quire_router.api.rest.connection import JSON_HEADERS, Header
from quire_router.api.rest.logprobs import ChatLogprobsFormat, CompletionLogprobsFormat, LogprobsFormat
from quire_router.api.rest.refusals import HttpError
from quire_router.generation import GenerationRequest, Usage

RECONNECT: Final = b"retry: 1000\n"
"""How many milliseconds a client waits before it comes back; a line of the event that follows it. Only where events
have ids: many clients that know only ``data:`` fail on any other line.
"""


def to_json(value: object) -> bytes:
    """Compact JSON in ASCII, so that no reader of lines can take a character for the end of one."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class OpenAiFormat:
    """How one route names things. ``opening`` and ``closing`` are the choices of a stream's first and last chunk, and
    ``piece_before`` and ``piece_after`` surround the text of those between them; ``before`` and ``after`` that of a
    whole answer. ``shape`` writes log-probabilities; those of the prompt stand in its choices or beside them.
    """

    id_prefix: str
    whole: str
    chunk: str
    opening: dict[str, Any] | None
    piece_before: str
    piece_after: str
    closing: dict[str, Any]
    before: str
    after: str
    shape: type[LogprobsFormat]
    prompt_in_choices: bool


CHAT = OpenAiFormat(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    piece_before='"delta":{"content":',
    piece_after="}",
    closing={"delta": {}},
    before='"message":{"role":"assistant","content":',
    after=',"refusal":null}',
    shape=ChatLogprobsFormat,
    prompt_in_choices=False,
)
COMPLETION = OpenAiFormat(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    opening=None,
    piece_before='"text":',
    piece_after="",
    closing={"text": ""},
    before='"text":',
    after="",
    shape=CompletionLogprobsFormat,
    prompt_in_choices=True,
)


def usage_object(usage: Usage | None) -> dict[str, Any] | None:
    """Usage in the words of the OpenAI API."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_response(error: HttpError | QuireError, request_id: str) -> tuple[int, bytes, list[Header]]:
    """Status, body and headers of a refusal."""
    if isinstance(error, HttpError):
        fields = _error_fields(error.message, "invalid_request_error", None, error.code, request_id)
        return error.status, to_json(fields), [*JSON_HEADERS, *error.headers]
    return error.status.http, to_json(error_object(error, request_id)), [*JSON_HEADERS, *_error_headers(error)]


def error_object(error: QuireError, request_id: str) -> dict[str, Any]:
    """An error in the shape of the OpenAI API, with the request's id beside it."""
    code = error.reason or error.code.name.lower()
    return _error_fields(error.message, error.status.kind, error.param, code, request_id)


def _error_fields(message: str, kind: str, param: str | None, code: str, request_id: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "request_id": request_id}}


def _error_headers(error: QuireError) -> list[Header]:
    headers: list[Header] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after)).encode()))
    if error.reason is not None:
        headers.append((b"x-quire-reason", error.reason.encode("ascii")))
    if error.status.http == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def model_object(card: ModelCard) -> dict[str, Any]:
    """One entry of ``/v1/models``."""
    known = {"max_model_len": card.max_model_len} if card.max_model_len else {}
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "quire", **known}


def format_for(generation: GenerationRequest) -> OpenAiFormat:
    """How a request's answer is written."""
    return CHAT if generation.operation == "chat" else COMPLETION


def request_object(earlier: StoredRequest) -> dict[str, Any]:
    """How it is with a request."""
    first, error = earlier.first, earlier.error
    failure = {} if error is None else error_object(error, first.request_id)
    return {
        "id": first.request_id,
        "object": "request",
        "status": earlier.status,
        "model": first.model,
        "created": int(first.created),
        "background": first.background,
        "usage": usage_object(earlier.usage),
        **failure,
    }


def error_event(error: QuireError, request_id: str, *, resumable: bool, event_ids: bool) -> bytes:
    """The last event of a stream that cannot go on; whether it can at another router and, in a stream whose events have
    ids, after which time.
    """
    fields = error_object(error, request_id)
    fields["error"]["resumable"] = resumable
    return (RECONNECT if resumable and event_ids else b"") + event(fields)


def head(style: OpenAiFormat, kind: str, generation: GenerationRequest) -> dict[str, Any]:
    """What every object of one answer begins with."""
    return {
        "id": style.id_prefix + generation.request_id,
        "object": kind,
        "created": int(generation.created),
        "model": generation.model,
    }
