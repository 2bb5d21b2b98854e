"""Answers of Anthropic's Messages API: lists of blocks, which are text, thinking and calls of tools, in the order in
which the model wrote them. ``BlockWriter`` makes the events of blocks from the parts of an answer, ``MessageEncoder`` a
stream of them, ``MessageBuilder`` a whole message. Does no I/O.

**Event ids.** One delta may be several events here: the end of a text, the end of its block, the beginning of the next.
A client that has some of them has the id ``17_5``: it has the answer up to the 17th token, as ``StreamCursor`` counts,
and then five more characters or marks (beginnings and ends of blocks, signatures). Both depend on the answer's text
alone, while the next deltas may be split in another way when they come again.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as _quote
from typing import Any, Final

from pydantic import TypeAdapter
from quire_proto.context_length import CONTEXT_LENGTH_EXCEEDED, in_words_of_messages
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.stream_scanner import Content, OutputPart, Reasoning, ToolCallArguments, ToolCallStart

from quire_router.api.output_parser import ReasoningCounter, call_digest, choice_name, create_parsers
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.response_opener import PENDING
from quire_router.api.rest.answer_format import ErrorResponse, EventEncoder, error_headers
from quire_router.api.rest.http import JSON_HEADERS, HttpError, json_text, to_json
from quire_router.api.rest.logprobs import LogprobsRenderer
from quire_router.api.schemas.anthropic import FIELD_NAMES
from quire_router.core.generation import Delta, StreamCursor, Usage

_POSITION = re.compile(r"([0-9]+)_([0-9]{1,9})", re.ASCII)
_SIGNATURE_BYTES = 32
_OBJECT = TypeAdapter(dict[str, Any])

_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_DELTAS: Final = {
    _TEXT: '{"type":"text_delta","text":',
    _THINKING: '{"type":"thinking_delta","thinking":',
    _TOOL_USE: '{"type":"input_json_delta","partial_json":',
}
_DELTA_END = "}}\n\n"


def event(fields: dict[str, Any]) -> str:
    """Returns one server-sent event, which is named as its ``type``."""
    return f"event: {fields['type']}\ndata: {json_text(fields)}\n\n"


@dataclass(slots=True)
class BlockEvent:
    """An event of a block: a mark, which is ``data`` alone, or one with a ``text``, which ``data`` stands before."""

    data: str
    text: str | None = None

    @property
    def size(self) -> int:
        """What it counts for in event ids."""
        return 1 if self.text is None else len(self.text)

    def drop(self, count: int) -> None:
        """Leaves out the first characters of its text, not all."""
        assert self.text is not None  # a mark has no part
        self.text = self.text[count:]

    def encode(self) -> str:
        """Returns the event."""
        return self.data if self.text is None else f"{self.data}{_quote(self.text)}{_DELTA_END}"


class BlockWriter:
    """The blocks of one answer, of which at most one is open: the one at ``index``, of the type ``kind``, which is None
    before the first. ``calls`` are those that have begun. All ids follow from the request's.
    """

    __slots__ = ("_choice", "calls", "delta_head", "index", "kind")

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self.kind: str | None = None
        self.index = -1
        self.calls = 0
        self.delta_head = ""

    def write(self, part: OutputPart) -> Iterator[BlockEvent]:
        """Yields the events of the next part."""
        if isinstance(part, ToolCallStart):
            yield from self.close()
            yield self._open(tool_use(self._choice, self.calls, part.name))
            self.calls += 1
            return
        if isinstance(part, Content) and self.kind != _TEXT:
            yield from self.close()
            yield self._open({"type": _TEXT, "text": ""})
        elif isinstance(part, Reasoning) and self.kind != _THINKING:
            yield from self.close()
            yield self._open({"type": _THINKING, "thinking": "", "signature": ""})
        yield BlockEvent(self.delta_head, part.text)

    def close(self) -> Iterator[BlockEvent]:
        """Yields the events that end the open block, if there is one."""
        if self.kind == _THINKING:
            signed = {"type": "signature_delta", "signature": signature(self._choice, self.index)}
            yield BlockEvent(event({"type": "content_block_delta", "index": self.index, "delta": signed}))
        if self.kind is not None:
            yield BlockEvent(event({"type": "content_block_stop", "index": self.index}))
        self.kind = None

    def _open(self, block: dict[str, Any]) -> BlockEvent:
        self.kind = block["type"]
        self.index += 1
        delta = _DELTAS[block["type"]]
        self.delta_head = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self.index},"delta":{delta}'
        )
        return BlockEvent(event({"type": "content_block_start", "index": self.index, "content_block": block}))


def tool_use(choice: str, number: int, name: str) -> dict[str, Any]:
    """Returns the block of a call, without its input."""
    return {"type": _TOOL_USE, "id": f"toolu_{call_digest(choice, number)}", "name": name, "input": {}}


def signature(choice: str, index: int) -> str:
    """Returns what a block of thinking is signed with: clients give it back, and nothing depends on it here."""
    return blake2b(f"{choice}/{index}".encode(), digest_size=_SIGNATURE_BYTES, person=b"quire thinking").hexdigest()


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The ``AnswerFormat`` of ``/v1/messages``."""

    heartbeat: bytes = b'event: ping\ndata: {"type":"ping"}\n\n'
    id_headers: tuple[bytes, ...] = (b"request-id", b"x-request-id")
    tells_cancelled: bool = False

    def encoder(self, prepared: PreparedRequest, cursor: StreamCursor, delivered: int = 0) -> "MessageEncoder":
        """See ``AnswerFormat``."""
        return MessageEncoder(prepared, cursor, delivered)

    def builder(self, prepared: PreparedRequest) -> "MessageBuilder":
        """See ``AnswerFormat``."""
        return MessageBuilder(prepared)

    def read_event_id(self, event_id: str) -> tuple[str, int]:
        """See ``AnswerFormat``."""
        found = _POSITION.fullmatch(event_id)
        return (event_id, 0) if found is None else (found[1], int(found[2]))

    def error_response(self, error: HttpError | QuireError, request_id: str) -> ErrorResponse:
        """See ``AnswerFormat``."""
        if isinstance(error, HttpError):
            fields = _error_fields(_HTTP_KINDS.get(error.status, _INVALID), error.message, error.code, None, request_id)
            return error.status, to_json(fields), [*JSON_HEADERS, *error.headers]
        return error.status.http, to_json(error_object(error, request_id)), [*JSON_HEADERS, *error_headers(error)]

    def error_event(
        self,
        error: QuireError,
        request_id: str,
        *,
        resumable: bool,
        encoder: EventEncoder | None = None,  # noqa: ARG002
    ) -> bytes:
        """See ``AnswerFormat``."""
        fields = error_object(error, request_id)
        fields["error"]["details"]["resumable"] = resumable
        return event(fields).encode("ascii")


MESSAGES: Final = MessageFormat()

_INVALID = "invalid_request_error"
_HTTP_KINDS = {404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 501: "api_error"}
_KINDS = {
    ErrorCode.CONFLICT: _INVALID,
    ErrorCode.UNAVAILABLE: "overloaded_error",
    ErrorCode.INTERNAL: "api_error",
}
"""Anthropic's types of errors, where they are not OpenAI's."""


def error_object(error: QuireError, request_id: str) -> dict[str, Any]:
    """Returns an error as Anthropic's API writes it; what else is known of it is in its ``details``."""
    error = FIELD_NAMES.translate_error(error)
    code = error.reason or error.code.name.lower()
    kind = _KINDS.get(error.code, error.status.kind)
    message = in_words_of_messages(error.message) if code == CONTEXT_LENGTH_EXCEEDED else error.message
    return _error_fields(kind, message, code, error.param, request_id)


def _error_fields(kind: str, message: str, code: str, param: str | None, request_id: str) -> dict[str, Any]:
    details = {"error_code": code, "param": param}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}, "request_id": request_id}


def message_object(prepared: PreparedRequest) -> dict[str, Any]:
    """Returns a message without its content, its end and its usage."""
    first = prepared.first
    known = {"id": f"msg_{first.request_id}", "type": "message", "role": "assistant", "model": first.model_name}
    return {**known, "container": None}


def message_usage(usage: Usage, thinking_tokens: int) -> dict[str, Any]:
    """Returns the ``usage`` of a message: that of its end, and what only other servers have."""
    written = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    others = {"cache_creation": written, "server_tool_use": None, "service_tier": "standard"}
    return {**usage_object(usage, thinking_tokens), **others}


def usage_object(usage: Usage, thinking_tokens: int) -> dict[str, Any]:
    """Returns Anthropic's ``usage``, where tokens that are read from a cache are not among ``input_tokens``, and those
    of thinking are among ``output_tokens``, also where it is not shown.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


class _Reader:
    """Reads the deltas of the one choice of an answer: their parts in order, and why it ended (``stop_fields``). It
    ``is_plain`` where all of it is text.
    """

    __slots__ = ("_limited_by_context", "_parser", "_thinking", "choice", "is_plain", "stop_fields")

    def __init__(self, prepared: PreparedRequest) -> None:
        self.choice = choice_name(prepared.first.request_id, 0)
        self.stop_fields: dict[str, Any] | None = None
        self.is_plain = not prepared.is_parsed
        self._parser = create_parsers(prepared)[0]
        self._thinking = ReasoningCounter(prepared, [self._parser])
        self._limited_by_context = prepared.response_options.limited_by_context

    def parts(self, delta: Delta) -> Sequence[OutputPart]:
        """Returns what a delta consists of."""
        self._thinking.add(delta)
        return self._parser.parts(delta)

    @property
    def thinking_tokens(self) -> int:
        """How many tokens of the answer are thinking, with its marks."""
        return self._thinking.total

    def end(self, delta: Delta, calls: int) -> None:
        """Records the end of the answer, in which ``calls`` were made."""
        reason = str(delta.finish_reason)
        if delta.stop_string is not None:
            reason = "stop_sequence"
        elif delta.finish_reason is FinishReason.STOP:
            reason = _TOOL_USE if calls and self._parser.ends_with_calls(delta) else "end_turn"
        elif delta.finish_reason is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._limited_by_context else "max_tokens"
        self.stop_fields = {"stop_reason": reason, "stop_sequence": delta.stop_string, "stop_details": None}


class MessageEncoder:
    """Encodes the deltas of one answer as events of a stream (see ``EventEncoder``). ``delivered`` is what the client
    has behind ``cursor``.
    """

    __slots__ = ("_blocks", "_cursor", "_delivered", "_has_ids", "_is_direct", "_prepared", "_reader", "logprobs")

    def __init__(self, prepared: PreparedRequest, cursor: StreamCursor, delivered: int = 0) -> None:
        self.logprobs: LogprobsRenderer | None = None
        self._prepared = prepared
        self._reader = _Reader(prepared)
        self._blocks = BlockWriter(self._reader.choice)
        self._cursor = cursor
        self._delivered = delivered
        self._has_ids = prepared.event_ids
        self._is_direct = self._reader.is_plain and not self._has_ids

    def opening(self) -> bytes:
        """See ``EventEncoder``. Of the usage only the length of the prompt is known yet."""
        if self._cursor.started(0):
            return b""
        self._cursor.open(0)
        usage = message_usage(Usage(len(self._prepared.first.prompt_token_ids), 0), 0)
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
        message = {**message_object(self._prepared), **unknown, "usage": usage}
        return self._with_id(event({"type": "message_start", "message": message}), str(self._cursor))

    def encode(self, delta: Delta) -> bytes:
        """See ``EventEncoder``."""
        events = [each for part in self._reader.parts(delta) for each in self._blocks.write(part)]
        if delta.finish_reason is not None:
            events += self._blocks.close()
            self._reader.end(delta, self._blocks.calls)
        data = b"" if delta.replayed else self._encode(events, delta)
        return data if delta.usage is None else data + self._closing(delta.usage, pending=delta.pending)

    def encode_token(self, index: int, token_id: int, text: str) -> bytes:
        """See ``EventEncoder``."""
        if not (self._is_direct and self._blocks.kind):
            return self.encode(Delta(text, [token_id], index=index))
        return f"{self._blocks.delta_head}{_quote(text)}{_DELTA_END}".encode("ascii") if text else b""

    def _encode(self, events: Sequence[BlockEvent], delta: Delta) -> bytes:
        """Encodes what the client has not had of a delta's events. The last has the id of the position behind it."""
        before, count, data = str(self._cursor), 0, []
        self._cursor.advance(delta)
        for number, each in enumerate(events, 1):
            count += each.size
            if self._delivered >= each.size:
                self._delivered -= each.size
                continue
            if self._delivered:
                each.drop(self._delivered)
                self._delivered = 0
            event_id = str(self._cursor) if number == len(events) else f"{before}_{count}"
            data.append(self._with_id(each.encode(), event_id))
        return b"".join(data)

    def _closing(self, usage: Usage, *, pending: bool) -> bytes:
        """Returns the end of the message. Raises ``QuireError`` INTERNAL if it has none."""
        if self._reader.stop_fields is None:
            raise internal()
        journal = {"quire_journal": PENDING} if pending else {}
        stop = event({"type": "message_stop", **journal}).encode("ascii")
        if self._cursor.usage:
            return stop
        self._cursor.usage = True
        told = usage_object(usage, self._reader.thinking_tokens)
        fields = {"type": "message_delta", "delta": self._reader.stop_fields, "usage": told}
        return self._with_id(event(fields), str(self._cursor)) + stop

    def _with_id(self, text: str, event_id: str) -> bytes:
        return (f"id: {event_id}\n{text}" if self._has_ids else text).encode("ascii")


class MessageBuilder:
    """Collects the deltas of an answer, and writes them as one message (see ``BodyBuilder``)."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.logprobs: LogprobsRenderer | None = None
        self._prepared = prepared
        self._reader = _Reader(prepared)
        self._blocks: list[tuple[OutputPart, list[str]]] = []
        self._calls = 0

    def add(self, delta: Delta) -> None:
        """See ``BodyBuilder``."""
        for part in self._reader.parts(delta):
            if isinstance(part, ToolCallStart):
                self._blocks.append((part, []))
                self._calls += 1
            elif isinstance(part, ToolCallArguments) or (self._blocks and type(self._blocks[-1][0]) is type(part)):
                self._blocks[-1][1].append(part.text)
            else:
                self._blocks.append((part, [part.text]))
        if delta.finish_reason is not None:
            self._reader.end(delta, self._calls)

    async def body(self, usage: Usage) -> bytes:
        """See ``BodyBuilder``."""
        if self._reader.stop_fields is None:
            raise internal()
        content = {"content": [*self._content()]}
        message = {**message_object(self._prepared), **content, **self._reader.stop_fields}
        return to_json({**message, "usage": message_usage(usage, self._reader.thinking_tokens)})

    def _content(self) -> Iterator[dict[str, Any]]:
        calls = 0
        for index, (first, texts) in enumerate(self._blocks):
            text = "".join(texts)
            if isinstance(first, ToolCallStart):
                yield {**tool_use(self._reader.choice, calls, first.name), "input": read_input(text)}
                calls += 1
            elif isinstance(first, Reasoning):
                signed = signature(self._reader.choice, index)
                yield {"type": _THINKING, "thinking": text, "signature": signed}
            else:
                yield {"type": _TEXT, "text": text}


def read_input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call, empty where they are no JSON object: a model need not write one, and an answer
    may end within it. They are read as a request's body is, so that the client can give them back.
    """
    try:
        value = _OBJECT.validate_json(arguments)
        json.dumps(value, allow_nan=False)  # raises for NaN, and for 1e999, which is read as an infinity
    except ValueError:
        return {}
    return value
