"""Answers of OpenAI's Responses API: lists of items, which are reasoning, messages and calls of functions, in the order
in which the model wrote them. ``ResponseEncoder`` writes a stream of their events (``response_events``), and
``ResponseBuilder`` a whole response. Does no I/O.

**Sequence numbers.** One delta may be several events here, and the next deltas may be split in another way when they
come again. So an event's ``sequence_number`` counts what the answer's text alone says: how many characters and marks
(beginnings and ends of items and of their parts) there are up to its end, less one. Numbers grow and have gaps, and a
client that has the number N is sent what is behind it, at any router: it has N + 1 of them. Event ids are the same
numbers.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.stream_scanner import Content, OutputPart, ToolCallStart

from quire_router.api.output_parser import ReasoningCounter, create_parsers
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.response_opener import PENDING
from quire_router.api.rest.answer_format import ErrorResponse, EventEncoder, error_headers
from quire_router.api.rest.http import JSON_HEADERS, HttpError, json_text, to_json
from quire_router.api.rest.logprobs import ChatLogprobsFormat, LogprobsRenderer, TextOffsets
from quire_router.api.rest.openai_format import error_object, error_response
from quire_router.api.rest.response_events import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ItemWriter,
    ResponseEvent,
    TokenEntry,
)
from quire_router.api.schemas.response_items import MESSAGE
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import FIELD_NAMES
from quire_router.api.stored_requests import no_such_place
from quire_router.core.generation import Delta, StreamCursor, Usage

_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ResponsesFormat:
    """The ``AnswerFormat`` of ``/v1/responses``."""

    heartbeat: bytes | None = None
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    tells_cancelled: bool = True

    def encoder(self, prepared: PreparedRequest, cursor: StreamCursor, delivered: int = 0) -> "ResponseEncoder":
        """See ``AnswerFormat``. The ``cursor`` is the beginning: all that the client has is in ``delivered``."""
        return ResponseEncoder(prepared, cursor, delivered)

    def builder(self, prepared: PreparedRequest) -> "ResponseBuilder":
        """See ``AnswerFormat``."""
        return ResponseBuilder(prepared)

    def read_event_id(self, event_id: str) -> tuple[str, int]:
        """See ``AnswerFormat``."""
        if not event_id:
            return "", 0
        if not _NUMBER.fullmatch(event_id):
            raise no_such_place()
        return "", int(event_id) + 1

    def error_response(self, error: HttpError | QuireError, request_id: str) -> ErrorResponse:
        """See ``AnswerFormat``."""
        if isinstance(error, HttpError):
            return error_response(error, request_id)
        own = FIELD_NAMES.translate_error(error)
        return error.status.http, to_json(error_object(own, request_id)), [*JSON_HEADERS, *error_headers(error)]

    def error_event(
        self, error: QuireError, request_id: str, *, resumable: bool, encoder: EventEncoder | None = None
    ) -> bytes:
        """See ``AnswerFormat``. A response that cannot be resumed has failed, which an event of its own says last:
        there are clients that end with that event, and do not read its error.
        """
        own = FIELD_NAMES.translate_error(error)
        fields = error_object(own, request_id)["error"]
        number, failed = 0, b""
        if isinstance(encoder, ResponseEncoder):
            number = encoder.position
            failed = b"" if resumable else encoder.failed(own)
        # What clients look for is in the object; the documents of the API have it beside that.
        flat = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"]}
        data = {**flat, "sequence_number": number, "error": {**fields, "resumable": resumable}}
        return f"event: error\ndata: {json_text(data)}\n\n".encode("ascii") + failed


RESPONSES: Final = ResponsesFormat()


def usage_object(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """Returns the ``usage`` of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_object(error: QuireError) -> dict[str, Any]:
    """Returns the ``error`` of a response that failed."""
    codes = {ErrorCode.OVERLOADED: "rate_limit_exceeded", ErrorCode.INVALID: "invalid_prompt"}
    return {"code": codes.get(error.code, "server_error"), "message": error.message, "param": error.param}


def read_state(prepared: PreparedRequest) -> ResponseState:
    """Returns what a response repeats of its request. Raises ``QuireError`` INTERNAL when its record is damaged."""
    try:
        return ResponseState.read_repeated(prepared.first.conversation)
    except (ValueError, RecursionError):
        raise internal() from None


class Answer:
    """Reads the deltas of the one choice of an answer into its items, and writes the response around them."""

    __slots__ = (
        "_is_plain",
        "_parser",
        "_pending",
        "_prepared",
        "_reason",
        "_reasoning",
        "_state",
        "logprobs",
        "writer",
    )

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._state = read_state(prepared)
        self._is_plain = not prepared.is_parsed
        self._parser = create_parsers(prepared)[0]
        self._reason: FinishReason | None = None
        self._reasoning = ReasoningCounter(prepared, [self._parser])
        self.writer = ItemWriter(prepared.first.request_id, self._state)
        self.logprobs: LogprobsRenderer | None = None
        self._pending: LogprobQueue | None = None
        if prepared.response_options.logprobs is not None:
            self.logprobs = LogprobsRenderer(prepared, ChatLogprobsFormat)
            self._pending = LogprobQueue(prepared, self.logprobs)

    @property
    def has_ended(self) -> bool:
        """Whether its last delta was read."""
        return self._reason is not None

    def read(self, delta: Delta) -> Iterator[ResponseEvent]:
        """Yields the events of the next delta. Every one has to be read, also of those that the client has had."""
        self._reasoning.add(delta)
        if self._pending is not None:
            self._pending.add(delta)
        for part in self._parser.parts(delta):
            yield from self.writer.write(part, () if self._pending is None else self._pending.take(part))
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            opened = self.writer.open_item
            if opened is not None and self._pending is not None and opened.kind == MESSAGE:
                opened.logprobs += self._pending.rest()
            is_whole = self._reason is FinishReason.STOP and not self._parser.is_in_call
            yield from self.writer.close(COMPLETED if is_whole else INCOMPLETE)

    def read_text(self, text: str) -> bool:
        """Reads a token's ``text`` if it continues the open message; returns False, and reads nothing, if it may be
        more than that.
        """
        opened = self.writer.open_item
        if not self._is_plain or self._pending is not None or opened is None:
            return False
        if text:
            opened.texts.append(text)
        return True

    def json(self, status: str, usage: Usage | None, error: QuireError | None = None) -> str:
        """Returns the response as it is now."""
        first = self._prepared.first
        limited = self._reason is FinishReason.LENGTH
        fields = {
            "id": f"resp_{first.request_id}",
            "object": "response",
            "created_at": int(first.created),
            "status": status,
            "error": None if error is None else failure_object(error),
            "incomplete_details": {"reason": "max_output_tokens"} if limited else None,
            "model": first.model_name,
            **self._state.response_fields,
            "usage": None if usage is None else usage_object(usage, self._reasoning.total),
        }
        return f'{json_text(fields)[:-1]},"output":{self.writer.output_json()}}}'

    def final_json(self, usage: Usage) -> tuple[str, str]:
        """Returns the status and the whole response. Raises ``QuireError`` INTERNAL if it has not ended."""
        if self._reason is None:
            raise internal()
        statuses = {FinishReason.LENGTH: INCOMPLETE, FinishReason.ABORT: "cancelled"}
        status = statuses.get(self._reason, INCOMPLETE if self._parser.is_in_call else COMPLETED)
        return status, self.json(status, usage)

    def failed_json(self, error: QuireError) -> str:
        """Returns the response that ended with an error. The item that was written is in it as far as it came."""
        for _ in self.writer.close(INCOMPLETE):
            pass
        return self.json("failed", None, error)


class LogprobQueue:
    """The log-probabilities of tokens whose text has not been written yet.

    Where the whole answer is text, a token's belong to the part of the text that the token begins in, however it is
    split. Where there is reasoning or calls as well, they belong to the text that comes with them or next.
    """

    __slots__ = ("_offsets", "_pending", "_plain", "_renderer", "_written")

    def __init__(self, prepared: PreparedRequest, renderer: LogprobsRenderer) -> None:
        first = prepared.first
        output = prepared.tokenizer.new_output_stream(
            first.prompt_token_ids, (), skip_special_tokens=first.skip_special_tokens
        )
        self._renderer = renderer
        self._offsets = TextOffsets(output)
        self._plain = not prepared.is_parsed
        self._pending: deque[tuple[int, str]] = deque()
        self._written = 0

    def add(self, delta: Delta) -> None:
        """Adds those of a delta."""
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
            (begin,) = self._offsets.of([token_id])
            (entry,) = self._renderer.logprobs(Delta("", [token_id], logprobs=[logprobs]))
            self._pending.append((begin, entry))

    def take(self, part: OutputPart) -> list[TokenEntry]:
        """Returns those that belong to the next part."""
        if not self._plain:
            taken = [TokenEntry(0, entry) for _, entry in self._pending]
            self._pending.clear()
            return taken if isinstance(part, Content) else []
        start, taken = self._written, []
        self._written += 0 if isinstance(part, ToolCallStart) else len(part.text)
        while self._pending and self._pending[0][0] < self._written:
            begin, entry = self._pending.popleft()
            taken.append(TokenEntry(begin - start, entry))
        return taken

    def rest(self) -> list[str]:
        """Returns those of tokens that have no text of their own."""
        return [entry for _, entry in self._pending]


class ResponseEncoder:
    """Encodes the deltas of one answer as events of a stream (see ``EventEncoder``). Of all its characters and marks
    the client has had the first ``delivered``.
    """

    __slots__ = ("_answer", "_cursor", "_delivered", "_has_ids", "logprobs", "position")

    def __init__(self, prepared: PreparedRequest, cursor: StreamCursor, delivered: int = 0) -> None:
        self._answer = Answer(prepared)
        self.logprobs = self._answer.logprobs
        self.position = 0
        self._delivered = delivered
        self._cursor = cursor
        self._has_ids = prepared.event_ids

    def opening(self) -> bytes:
        """See ``EventEncoder``."""
        self._cursor.open(0)
        begun = self._answer.json(IN_PROGRESS, None)
        kinds = ("response.created", "response.in_progress")
        return self._encode([_with_response(kind, begun) for kind in kinds])

    def encode(self, delta: Delta) -> bytes:
        """See ``EventEncoder``."""
        data = self._encode(list(self._answer.read(delta)))
        if delta.usage is None:
            return data
        status, response = self._answer.final_json(delta.usage)
        kind = "response.completed" if status == COMPLETED else "response.incomplete"
        return data + self._encode([_with_response(kind, response, pending=delta.pending)])

    def encode_token(self, index: int, token_id: int, text: str) -> bytes:
        """See ``EventEncoder``."""
        if not self._answer.read_text(text):
            return self.encode(Delta(text, [token_id], index=index))
        if not text:
            return b""
        writer = self._answer.writer
        return self._encode([ResponseEvent(writer.head, text, ())])

    def failed(self, error: QuireError) -> bytes:
        """Returns the event of a response that ends with an error, behind that of the error."""
        self.position += 1
        return self._encode([_with_response("response.failed", self._answer.failed_json(error))])

    def _encode(self, events: Sequence[ResponseEvent]) -> bytes:
        """Encodes what the client has not had."""
        data = []
        for each in events:
            begin = self.position
            self.position += each.size
            if self.position > self._delivered:
                number = self.position - 1
                text = each.encode(number, max(0, self._delivered - begin))
                data.append(f"id: {number}\n{text}" if self._has_ids else text)
        return "".join(data).encode("ascii")


def _with_response(kind: str, response: str, *, pending: bool = False) -> ResponseEvent:
    journal = f',"quire_journal":"{PENDING}"' if pending else ""
    return ResponseEvent(f'event: {kind}\ndata: {{"type":"{kind}","response":{response}{journal}')


class ResponseBuilder:
    """Collects the deltas of an answer, and writes them as one response (see ``BodyBuilder``)."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._answer = Answer(prepared)
        self.logprobs = self._answer.logprobs

    def add(self, delta: Delta) -> None:
        """See ``BodyBuilder``."""
        for _ in self._answer.read(delta):
            pass

    async def body(self, usage: Usage) -> bytes:
        """See ``BodyBuilder``."""
        return self._answer.final_json(usage)[1].encode("ascii")

    def output(self) -> list[dict[str, Any]]:
        """Returns the items of the answer so far."""
        items: list[dict[str, Any]] = json.loads(self._answer.writer.output_json())
        return items
