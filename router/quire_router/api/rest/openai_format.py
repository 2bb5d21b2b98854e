"""The OpenAI API's answers: how its two routes name things (``OpenAiFormat``), whole completions
(``CompletionBuilder``) and streams of chunks (``ChunkEncoder``), chat messages and deltas with reasoning and tool
calls, and errors. Does no I/O.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii as _quote  # as json.dumps writes a string, in a quarter of the time
from typing import Any, Final

from quire_proto.errors import QuireError, internal

from quire_router.api.output_parser import ParsedDelta, ReasoningCounter, ToolCallDelta, create_parsers
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.response_opener import PENDING, started_choices
from quire_router.api.rest.answer_format import ErrorResponse, EventEncoder, error_headers
from quire_router.api.rest.http import JSON_HEADERS, HttpError, json_text, to_json
from quire_router.api.rest.logprobs import (
    ChatLogprobsFormat,
    CompletionLogprobsFormat,
    LogprobLists,
    LogprobsFormat,
    LogprobsRenderer,
    joined,
    number,
)
from quire_router.core.generation import Delta, StreamCursor, Usage

DONE: Final = b"data: [DONE]\n\n"
_NO_USAGE: Final = b',"usage":null}\n\n'
_NO_MESSAGE_FIELDS: Final[dict[str, Any]] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
)
"""Null where a whole message has nothing for them, as in vLLM: clients read them as attributes."""


@dataclass(frozen=True, slots=True)
class OpenAiFormat:
    """How one route names things. ``object_type`` and ``chunk_object_type`` are the ``object`` of a whole response and
    of a chunk. ``first_choice`` and ``last_choice`` are the choices of a stream's first and last chunk;
    ``delta_prefix`` and ``delta_suffix`` surround the text of the chunks between them, ``message_prefix`` and
    ``message_suffix`` that of a whole response. ``logprobs_format`` writes log-probabilities of the output; those of
    the prompt, and its tokens, are in its choices (``prompt_in_choices``) or beside them. The last three name fields
    that are always null here, and in vLLM unless a request asks for them: of a choice, of a whole response, and of
    every chunk except that with the role.
    """

    id_prefix: str
    object_type: str
    chunk_object_type: str
    first_choice: dict[str, Any] | None
    delta_prefix: str
    delta_suffix: str
    last_choice: dict[str, Any]
    message_prefix: str
    message_suffix: str
    logprobs_format: type[LogprobsFormat]
    prompt_in_choices: bool
    null_choice_fields: tuple[str, ...]
    null_fields: tuple[str, ...]
    null_chunk_fields: tuple[str, ...]
    heartbeat: bytes | None = None
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    tells_cancelled: bool = False

    def encoder(self, prepared: PreparedRequest, cursor: StreamCursor, _delivered: int = 0) -> "ChunkEncoder":
        """See ``AnswerFormat``."""
        return ChunkEncoder(self, prepared, cursor)

    def read_event_id(self, event_id: str) -> tuple[str, int]:
        """See ``AnswerFormat``."""
        return event_id, 0

    def builder(self, prepared: PreparedRequest) -> "CompletionBuilder":
        """See ``AnswerFormat``."""
        return CompletionBuilder(self, prepared)

    def error_response(self, error: HttpError | QuireError, request_id: str) -> ErrorResponse:
        """See ``AnswerFormat``."""
        return error_response(error, request_id)

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
        fields["error"]["resumable"] = resumable
        return event(fields)


CHAT = OpenAiFormat(
    id_prefix="chatcmpl-",
    object_type="chat.completion",
    chunk_object_type="chat.completion.chunk",
    first_choice={"delta": {"role": "assistant", "content": ""}},
    delta_prefix='"delta":{"content":',
    delta_suffix="}",
    last_choice={"delta": {}},
    message_prefix='"message":{"role":"assistant","content":',
    message_suffix=f",{json_text(_NO_MESSAGE_FIELDS)[1:]}",
    logprobs_format=ChatLogprobsFormat,
    prompt_in_choices=False,
    null_choice_fields=("routed_experts", "weight_versions"),
    null_fields=(
        *("service_tier", "system_fingerprint", "prompt_text"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ),
    null_chunk_fields=("kv_transfer_params",),
)
COMPLETION = OpenAiFormat(
    id_prefix="cmpl-",
    object_type="text_completion",
    chunk_object_type="text_completion",
    first_choice=None,
    delta_prefix='"text":',
    delta_suffix="",
    last_choice={"text": ""},
    message_prefix='"text":',
    message_suffix="",
    logprobs_format=CompletionLogprobsFormat,
    prompt_in_choices=True,
    null_choice_fields=("routed_experts", "weight_versions"),
    null_fields=("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"),
    null_chunk_fields=(),
)


def answer_usage(usage: Usage, reasoning: ReasoningCounter | None) -> dict[str, Any]:
    """Returns the OpenAI API's ``usage`` of an answer, of whose tokens some may be ``reasoning``."""
    reasoning_tokens = 0 if reasoning is None else reasoning.total
    return {**(usage_object(usage) or {}), "completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}


def usage_object(usage: Usage | None) -> dict[str, Any] | None:
    """Returns the OpenAI API's ``usage``; None for None."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_response(error: HttpError | QuireError, request_id: str) -> ErrorResponse:
    """Returns status, body and headers of an error."""
    if isinstance(error, HttpError):
        fields = _error_fields(error.message, "invalid_request_error", None, error.code, request_id)
        return error.status, to_json(fields), [*JSON_HEADERS, *error.headers]
    return error.status.http, to_json(error_object(error, request_id)), [*JSON_HEADERS, *error_headers(error)]


def error_object(error: QuireError, request_id: str) -> dict[str, Any]:
    """Returns an error as the OpenAI API writes it, with the request's id."""
    code = error.reason or error.code.name.lower()
    return _error_fields(error.message, error.status.kind, error.param, code, request_id)


def _error_fields(message: str, kind: str, param: str | None, code: str, request_id: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "request_id": request_id}}


def stop_reason_json(delta: Delta, stop_token_ids: Collection[int]) -> str:
    """Returns vLLM's ``stop_reason`` of the last delta of a choice: the stop string that ended it, or which of the
    request's ``stop_token_ids``, else null.
    """
    stop_token = delta.stop_token
    by_token = stop_token is not None and stop_token.token_id in stop_token_ids
    return json_text(stop_token.token_id if stop_token is not None and by_token else delta.stop_string)


def delta_json(parsed: ParsedDelta) -> str:
    """Returns ``choices[].delta`` of one event. The reasoning has both names that clients look for."""
    parts = []
    if parsed.reasoning:
        reasoning = json_text(parsed.reasoning)
        parts.append(f'"reasoning_content":{reasoning},"reasoning":{reasoning}')
    if parsed.content:
        parts.append(f'"content":{json_text(parsed.content)}')
    if parsed.calls:
        parts.append(f'"tool_calls":[{",".join(map(_call_json, parsed.calls))}]')
    return f"{{{','.join(parts)}}}"


def message_object(parts: Sequence[ParsedDelta]) -> dict[str, Any]:
    """Returns ``choices[].message`` of a whole response. Its content is null where there are only tool calls."""
    content = "".join(parsed.content for parsed in parts)
    reasoning = "".join(parsed.reasoning for parsed in parts)
    calls: dict[int, list[ToolCallDelta]] = {}
    for call in (call for parsed in parts for call in parsed.calls):
        calls.setdefault(call.index, []).append(call)
    message = {"role": "assistant", "content": content or (None if calls else ""), **_NO_MESSAGE_FIELDS}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return {**message, "tool_calls": [_joined(deltas) for deltas in calls.values()]} if calls else message


def _joined(deltas: Sequence[ToolCallDelta]) -> dict[str, Any]:
    """Returns a whole call."""
    return _call_object(replace(deltas[0], arguments="".join(delta.arguments for delta in deltas)))


def _call_json(call: ToolCallDelta) -> str:
    if call.id:
        return json_text({"index": call.index, **_call_object(call)})
    return f'{{"index":{call.index},"function":{{"arguments":{json_text(call.arguments)}}}}}'


def _call_object(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(slots=True)
class _ChoiceBuilder:
    """The deltas of one choice so far."""

    texts: list[str] = field(default_factory=list)
    parsed: list[ParsedDelta] = field(default_factory=list)
    logprobs: list[LogprobLists] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str = "null"
    score: float | None = None


class CompletionBuilder:
    """Collects the deltas of all choices, and writes them as one completion object."""

    def __init__(self, style: OpenAiFormat, prepared: PreparedRequest) -> None:
        self.logprobs = LogprobsRenderer(prepared, style.logprobs_format) if prepared.has_logprobs else None
        self._parsers = create_parsers(prepared) if prepared.is_parsed else None
        self._reasoning = None if self._parsers is None else ReasoningCounter(prepared, self._parsers)
        self._style = style
        self._prompt_token_ids = prompt_token_ids(prepared)
        first = prepared.first
        self._stop_token_ids = first.params.stop_token_ids
        self._head = {
            "id": style.id_prefix + first.request_id,
            "object": style.object_type,
            "created": int(first.created),
            "model": first.model_name,
        }
        self._choices = [_ChoiceBuilder() for _ in range(prepared.num_choices)]

    def add(self, delta: Delta) -> None:
        """Adds a delta."""
        choice = self._choices[delta.index]
        if self._parsers is None:
            choice.texts.append(delta.text)
        else:
            choice.parsed.append(self._parsers[delta.index].parse(delta))
            if self._reasoning is not None:
                self._reasoning.add(delta)
        if self.logprobs is not None:
            choice.logprobs.append(self.logprobs.logprobs(delta))
        if self._prompt_token_ids:
            choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason, choice.score = delta.finish_reason, delta.score
            choice.stop_reason = stop_reason_json(delta, self._stop_token_ids)
            if choice.parsed:
                choice.finish_reason = choice.parsed[-1].finish_reason

    async def body(self, usage: Usage) -> bytes:
        """Returns the completion as JSON; yields to the event loop after each choice. Raises ``QuireError`` INTERNAL
        when a choice has not ended: an incomplete one is never passed on as complete.
        """
        if any(choice.finish_reason is None for choice in self._choices):
            raise internal()
        choices = []
        for index, choice in enumerate(self._choices):
            choices.append(self._choice_object(index, choice).encode("ascii"))
            await asyncio.sleep(0)
        after = "" if self._style.prompt_in_choices else self._of_prompt(0)
        after += nulls(self._style.null_fields)
        end = f'],"usage":{json_text(answer_usage(usage, self._reasoning))}{after}}}'
        return b"".join(
            (f'{json_text(self._head)[:-1]},"choices":['.encode("ascii"), b",".join(choices), end.encode("ascii"))
        )

    def _choice_object(self, index: int, choice: _ChoiceBuilder) -> str:
        if self._parsers is None:
            text = f"{self._style.message_prefix}{json_text(''.join(choice.texts))}{self._style.message_suffix}"
        else:
            text = f'"message":{json_text(message_object(choice.parsed))}'
        logprobs = "null"
        if self.logprobs is not None:
            logprobs = self.logprobs.logprobs_object(tuple(map(joined, zip(*choice.logprobs, strict=True))))
        after = self._of_prompt(index) if self._style.prompt_in_choices else ""
        if choice.score is not None:
            after += f',"score":{number(choice.score)}'
        after += f',"token_ids":{json_text(choice.token_ids if self._prompt_token_ids else None)}'
        after += nulls(self._style.null_choice_fields)
        reason = json_text(choice.finish_reason)
        end = f'"finish_reason":{reason},"stop_reason":{choice.stop_reason}{after}'
        return f'{{"index":{index},{text},"logprobs":{logprobs},{end}}}'

    def _of_prompt(self, index: int) -> str:
        """Returns what is shown of a choice's prompt."""
        listed = "" if self.logprobs is None else self.logprobs.prompt_logprobs(index)
        tokens = json_text(self._prompt_token_ids[index]) if self._prompt_token_ids else "null"
        return f',"prompt_logprobs":{listed or "null"},"prompt_token_ids":{tokens}'


class ChunkEncoder:
    """Encodes each delta as one event, also the last of its choice: the event id, where ids were requested, is the
    client's cursor after the delta, so that it can resume with Last-Event-ID. Parts that do not change between tokens
    are rendered once. Does no I/O.
    """

    __slots__ = (
        "_advances_cursor",
        "_after",
        "_before",
        "_choices",
        "_closed",
        "_continuous_usage",
        "_cursor",
        "_end",
        "_has_ids",
        "_head",
        "_no_token_ids",
        "_parsers",
        "_prompt_token_ids",
        "_prompts",
        "_prompts_shown",
        "_reasoning",
        "_starts",
        "_stop_token_ids",
        "_style",
        "_usage",
        "logprobs",
    )

    def __init__(self, style: OpenAiFormat, prepared: PreparedRequest, cursor: StreamCursor) -> None:
        self.logprobs: LogprobsRenderer | None = None
        if prepared.has_logprobs:
            started = started_choices(cursor, prepared.num_choices)
            self.logprobs = LogprobsRenderer(prepared, style.logprobs_format, started)
        self._parsers = create_parsers(prepared) if prepared.is_parsed else None
        self._reasoning = None if self._parsers is None else ReasoningCounter(prepared, self._parsers)
        self._style = style
        self._cursor = cursor
        self._has_ids = prepared.event_ids
        self._continuous_usage = prepared.response_options.continuous_usage
        self._advances_cursor = self._has_ids or self._continuous_usage
        self._prompt_token_ids = prompt_token_ids(prepared)
        self._prompts_shown = {*started_choices(cursor, prepared.num_choices)} if self._prompt_token_ids else set()
        self._prompts = [len(each.prompt_token_ids) for each in prepared.generations for _ in range(each.params.n)]
        self._choices = prepared.num_choices
        first = prepared.first
        self._stop_token_ids = first.params.stop_token_ids
        self._head: dict[str, Any] = {
            "id": style.id_prefix + first.request_id,
            "object": style.chunk_object_type,
            "created": int(first.created),
            "model": first.model_name,
        }
        self._usage: dict[str, Any] = {"usage": None} if prepared.response_options.include_usage else {}
        opening = _unclosed(self._head)
        starts = [f'data: {opening},"choices":[{{"index":{index},' for index in range(self._choices)]
        self._before = [start + style.delta_prefix for start in starts]
        self._starts = [f'{start}"delta":' for start in starts]
        no_usage = ',"usage":null' if self._usage else ""
        self._no_token_ids = nulls(("prompt_token_ids", "token_ids") if style.prompt_in_choices else ("token_ids",))
        self._closed = f"}}]{nulls(style.null_chunk_fields)}{no_usage}}}\n\n"
        self._end = f',"finish_reason":null{self._no_token_ids}{self._closed}'
        self._after = f'{style.delta_suffix},"logprobs":null{self._end}'

    def opening(self) -> bytes:
        """Returns the first chunks of a chat: the role of each choice that the client has had nothing of."""
        if self._style.first_choice is None:
            return b""
        return b"".join(self._open(index) for index in range(self._choices) if not self._cursor.started(index))

    def encode(self, delta: Delta) -> bytes:
        """Returns the events of a delta: none, text, the end of its choice. A delta with the usage ends the stream."""
        logprobs = self.logprobs.logprobs(delta) if self.logprobs is not None else ()
        if self._parsers is not None:
            if self._reasoning is not None:
                self._reasoning.add(delta)
            data = self._encode_parsed(self._parsers[delta.index].parse(delta), delta, logprobs)
        else:
            data = b"" if delta.replayed else self._encode_text(delta, logprobs)
        if data and self._continuous_usage:
            data = self._with_usage(data, delta.index)
        return data if delta.usage is None else data + self._closing(delta.usage, pending=delta.pending)

    def encode_token(self, index: int, token_id: int, text: str) -> bytes:
        """As ``encode`` of a delta that is one token of choice ``index`` and its text."""
        if self._advances_cursor or self._parsers is not None or self.logprobs is not None or self._prompt_token_ids:
            return self.encode(Delta(text, [token_id], index=index))
        if text:
            return f"{self._before[index]}{_quote(text)}{self._after}".encode("ascii")
        return b""

    def _encode_text(self, delta: Delta, logprobs: LogprobLists) -> bytes:
        line = self._advance(delta) if self._advances_cursor else ""
        if delta.finish_reason is not None:
            return self._encode_last(line, delta, logprobs)
        if any(logprobs) or self._shows_tokens(delta):  # also without text: tokens may come before their text
            text = self._before[delta.index] + _quote(delta.text) + self._style.delta_suffix
            text += f',"logprobs":{self._logprobs_object(logprobs)},"finish_reason":null{self._ended(delta)}'
            return f"{line}{text}".encode("ascii")
        if delta.text:
            return f"{line}{self._before[delta.index]}{_quote(delta.text)}{self._after}".encode("ascii")
        return b""

    def _encode_parsed(self, parsed: ParsedDelta, delta: Delta, logprobs: LogprobLists) -> bytes:
        """Encodes a delta of a choice that may have reasoning or tool calls. It is one event too, whatever it holds."""
        if delta.replayed:
            return b""
        line = self._advance(delta) if self._advances_cursor else ""
        if not (parsed.has_output or any(logprobs) or self._shows_tokens(delta)):
            return b""
        start = f"{line}{self._starts[delta.index]}{delta_json(parsed)}"
        if not (any(logprobs) or self._prompt_token_ids) and parsed.finish_reason is None:
            return f'{start},"logprobs":null{self._end}'.encode("ascii")
        logprobs_json = self._logprobs_object(logprobs)
        end = f',"logprobs":{logprobs_json},"finish_reason":{json_text(parsed.finish_reason)}{self._ended(delta)}'
        return f"{start}{end}".encode("ascii")

    def _encode_last(self, line: str, delta: Delta, logprobs: LogprobLists) -> bytes:
        """Encodes the last delta of a choice, behind the ``line`` with its id."""
        logprobs_json = self._logprobs_object(logprobs)
        if delta.text or logprobs_json != "null":
            choice = self._before[delta.index] + _quote(delta.text) + self._style.delta_suffix
        else:
            closing = _unclosed({"index": delta.index, **self._style.last_choice})
            choice = f'data: {_unclosed(self._head)},"choices":[{closing}'
        end = f',"logprobs":{logprobs_json},"finish_reason":"{delta.finish_reason}"{self._ended(delta)}'
        return f"{line}{choice}{end}".encode("ascii")

    def _ended(self, delta: Delta) -> str:
        """Returns what follows the finish reason."""
        end = self._token_ids(delta) + self._closed
        if delta.finish_reason is None:
            return end
        score = "" if delta.score is None else f',"score":{number(delta.score)}'
        return f',"stop_reason":{stop_reason_json(delta, self._stop_token_ids)}{score}{end}'

    def _shows_tokens(self, delta: Delta) -> bool:
        """Returns whether a delta has an event for its tokens, or for those of its choice's prompt. The cursor counts a
        choice as started from its first delta on, also from an empty one, so that one shows the prompt.
        """
        if not self._prompt_token_ids:
            return False
        shows_prompt = self._style.prompt_in_choices and delta.index not in self._prompts_shown
        return shows_prompt or bool(delta.token_ids or delta.text)

    def _token_ids(self, delta: Delta) -> str:
        """Returns the tokens of a delta. A completion's prompt has its tokens in the first chunk of each choice."""
        if not self._prompt_token_ids:
            return self._no_token_ids
        prompt = ""
        if self._style.prompt_in_choices:
            shown = None if delta.index in self._prompts_shown else self._prompt_token_ids[delta.index]
            self._prompts_shown.add(delta.index)
            prompt = f',"prompt_token_ids":{json_text(shown)}'
        return f'{prompt},"token_ids":{json_text(delta.token_ids)}'

    def _logprobs_object(self, logprobs: LogprobLists) -> str:
        return self.logprobs.logprobs_object(logprobs) if self.logprobs is not None and any(logprobs) else "null"

    def _closing(self, usage: Usage, *, pending: bool) -> bytes:
        """Returns the usage, where it was requested and not sent before, and the end mark. What is ``pending`` has a
        chunk of its own otherwise, with a choice that adds nothing: clients that know of no usage expect one.
        """
        journal = {"quire_journal": PENDING} if pending else {}
        if self._usage and not self._cursor.usage:
            self._cursor.usage = True
            told = answer_usage(usage, self._reasoning)
            return self._event({**self._head, "choices": [], "usage": told, **journal}) + DONE
        if not pending:
            return DONE
        line = f"id: {self._cursor}\n" if self._has_ids else ""
        nothing = f'{line}{self._before[0]}""{self._after}'.removesuffix("}\n\n")
        return f"{nothing},{json_text(journal)[1:]}\n\n".encode("ascii") + DONE

    def _open(self, index: int) -> bytes:
        self._cursor.open(index)
        choice = {"index": index, **(self._style.first_choice or {}), "logprobs": None, "finish_reason": None}
        token_ids = self._prompt_token_ids[index] if self._prompt_token_ids else None
        prompt = {"prompt_token_ids": token_ids, "prompt_text": None}
        data = self._event({**self._head, "choices": [choice], **prompt, **self._usage})
        return self._with_usage(data, index) if self._continuous_usage else data

    def _with_usage(self, data: bytes, index: int) -> bytes:
        """Adds to an event the usage of its choice so far: as in vLLM, the tokens of its prompt and its own."""
        prompt, completion = self._prompts[index], self._cursor.position(index)
        tokens = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d' % (
            prompt,
            completion,
            prompt + completion,
        )
        return data.removesuffix(_NO_USAGE) + b',"usage":{' + tokens + b"}}\n\n"

    def _event(self, chunk: dict[str, Any]) -> bytes:
        line = f"id: {self._cursor}\n".encode("ascii") if self._has_ids else b""
        return line + event(chunk)

    def _advance(self, delta: Delta) -> str:
        """Advances the cursor by ``delta``; returns the line with the id of its event, empty without ids."""
        self._cursor.advance(delta)
        return f"id: {self._cursor!s}\n" if self._has_ids else ""


def prompt_token_ids(prepared: PreparedRequest) -> list[list[int]]:
    """Returns the tokens of each choice's prompt; none where the response does not show tokens."""
    if not prepared.response_options.token_ids:
        return []
    return [[*each.prompt_token_ids] for each in prepared.generations for _ in range(each.params.n)]


def nulls(names: Sequence[str]) -> str:
    """Returns fields that are null, each behind a comma."""
    return "".join(f',"{name}":null' for name in names)


def event(value: object) -> bytes:
    """Returns one server-sent event with ``value`` as JSON."""
    return b"data: " + to_json(value) + b"\n\n"


def _unclosed(value: dict[str, Any]) -> str:
    """Returns a JSON object without its closing brace."""
    return json_text(value)[:-1]
