"""Answers as the OpenAI API writes them: whole objects, and the chunks of a stream. Does no I/O."""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason

from quire_router.api.frontend import ModelCard
from quire_router.api.rest.connection import JSON, Header
from quire_router.api.rest.refusals import HttpError
from quire_router.generation import Generation, Usage

DONE: Final = b"data: [DONE]\n\n"


def to_json(value: object) -> bytes:
    """Compact JSON in ASCII, so that no reader of lines can take a character for the end of one."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Style:
    """How one route names things. ``opening`` and ``closing`` are the choices of a stream's first and last chunk,
    ``before`` and ``after`` surround the text of those between them.
    """

    id_prefix: str
    whole: str
    chunk: str
    opening: dict[str, Any] | None
    before: str
    after: str
    closing: dict[str, Any]

    def choice(self, text: str) -> dict[str, Any]:
        """The text of a whole answer."""
        if self.opening is None:
            return {"text": text}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


CHAT = Style(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    before='"delta":{"content":',
    after="}",
    closing={"delta": {}},
)
COMPLETION = Style(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    opening=None,
    before='"text":',
    after="",
    closing={"text": ""},
)


def whole(style: Style, generation: Generation, text: str, reason: FinishReason | None, usage: Usage | None) -> bytes:
    """The answer in one piece."""
    choice = {"index": 0, **style.choice(text), "logprobs": None, "finish_reason": reason}
    return to_json({**_head(style, style.whole, generation), "choices": [choice], "usage": usage_object(usage)})


class Chunks:
    """The events of one stream. All that does not change between tokens is written once."""

    def __init__(self, style: Style, generation: Generation, include_usage: bool) -> None:
        self._style = style
        self._head = _head(style, style.chunk, generation)
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        opening = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._before = f'data: {opening},"choices":[{{"index":0,{style.before}'
        no_usage = ',"usage":null' if include_usage else ""
        self._after = f'{style.after},"logprobs":null,"finish_reason":null}}]{no_usage}}}\n\n'

    def opening(self) -> bytes:
        """What comes before the text: the role, where there are roles."""
        return b"" if self._style.opening is None else self._chunk(self._style.opening, None)

    def piece(self, text: str) -> bytes:
        """Some text. Once for each token, so it only joins strings."""
        return (self._before + json.dumps(text) + self._after).encode("ascii")

    def closing(self, reason: FinishReason, usage: Usage | None) -> bytes:
        """The finish reason, the usage where it was asked for, and the end mark."""
        end = self._chunk(self._style.closing, reason)
        if self._usage:
            end += event({**self._head, "choices": [], "usage": usage_object(usage)})
        return end + DONE

    def _chunk(self, choice: dict[str, Any], reason: FinishReason | None) -> bytes:
        whole_choice = {"index": 0, **choice, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "choices": [whole_choice], **self._usage})


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


def error_answer(error: HttpError | QuireError, request_id: str) -> tuple[int, bytes, list[Header]]:
    """Status, body and headers of a refusal."""
    if isinstance(error, HttpError):
        fields = _error_fields(error.message, "invalid_request_error", None, error.code, request_id)
        return error.status, to_json(fields), [*JSON, *error.headers]
    return error.status.http, to_json(error_object(error, request_id)), [*JSON, *_error_headers(error)]


def error_object(error: QuireError, request_id: str) -> dict[str, Any]:
    """An error in the shape of the OpenAI API, with the request's id beside it."""
    return _error_fields(error.message, error.status.kind, error.param, error.code.name.lower(), request_id)


def _error_fields(message: str, kind: str, param: str | None, code: str, request_id: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "request_id": request_id}}


def _error_headers(error: QuireError) -> list[Header]:
    headers: list[Header] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after)).encode()))
    if error.status.http == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def model_object(card: ModelCard) -> dict[str, Any]:
    """One entry of ``/v1/models``."""
    known = {"max_model_len": card.max_model_len} if card.max_model_len else {}
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "quire", **known}


def _head(style: Style, kind: str, generation: Generation) -> dict[str, Any]:
    return {
        "id": style.id_prefix + generation.request_id,
        "object": kind,
        "created": int(generation.created),
        "model": generation.model,
    }
