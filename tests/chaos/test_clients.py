"""The clients of the chaos run take no bad answer for a good one: whatever a service might do wrong has a name."""

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

from tests.chaos import rpc_client
from tests.chaos.answer import Answer
from tests.chaos.client import Manners
from tests.chaos.report import FOUND, Report
from tests.chaos.run import CLIENTS
from tests.chaos.workload import BACKGROUND, BATCH, CONVERSATION, MESSAGES, POLLING, RPC, STREAM, WHOLE, Request

MANNERS = Manners(silence=20.0, patience=0.5, limit=60.0, absence=0.0, later=0.0)
PATH, BODY = "/v1/completions", {"model": "demo", "prompt": "x"}
ID = "ab12"
HEADERS = {"x-request-id": ID}
HEAD = {"id": f"cmpl-{ID}", "object": "text_completion", "created": 1, "model": "demo"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
DONE = "data: [DONE]\n\n"


def event(place: str, *choices: dict[str, Any], **fields: Any) -> str:
    return f"id: {place}\ndata: {json.dumps({**HEAD, 'choices': choices, **fields})}\n\n"


def choice(text: str, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, **fields}


ONE, TWO = event("1", choice("one")), event("2e", choice(" two", finish_reason="stop"))
LAST = event("2eu", usage=USAGE)
RIGHT = (ONE, TWO, LAST, DONE)


def failure(status: int = 503, **fields: Any) -> dict[str, Any]:
    kinds = {404: ("not_found_error", "not_found"), 500: ("server_error", "internal")}
    kind, code = kinds.get(status, ("service_unavailable_error", "unavailable"))
    known = {"message": "Why.", "type": kind, "param": None, "code": code, "request_id": ID}
    return {"error": {**known, **fields}}


def last(**fields: Any) -> str:
    return f"data: {json.dumps(failure(**fields))}\n\n"


class Body(httpx.AsyncByteStream):
    """A body that breaks off behind its last event, unless it ``ends``."""

    def __init__(self, events: tuple[str, ...], ends: bool) -> None:
        self._events, self._ends = events, ends

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for each in self._events:
            yield each.encode()
        if not self._ends:
            raise httpx.RemoteProtocolError("incomplete chunked read")


def events(*events: str, ends: bool = True, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(200, headers=headers or HEADERS, stream=Body(events, ends))


def refusal(status: int = 503, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    after = {"retry-after": "1"} if headers is None else headers
    return httpx.Response(status, json=failure(status, **fields), headers=after)


async def received(
    replies: list[httpx.Response], request: Request, manners: Manners = MANNERS, *, status: str = "completed"
) -> Answer:
    """What a client receives from a service that gives these replies, and then answers 404. Who reads what has just
    ended learns that it is in this ``status``.
    """
    left = iter(replies)
    stack: Any = SimpleNamespace(urls=["http://router"])

    def reply(sent: httpx.Request) -> httpx.Response:
        _, _, _, *rest = sent.url.path.split("/")
        if sent.method == "GET" and len(rest) == 1 and not sent.url.query and request.way in (STREAM, CONVERSATION):
            return httpx.Response(200, json={"id": rest[0], "status": status})
        return next(left, None) or refusal(404, param="request_id")

    transport = httpx.MockTransport(reply)
    async with httpx.AsyncClient(transport=transport) as http:
        client = CLIENTS[request.way](stack, http, "key", random.Random(1), manners)
        return await client.run(request)


def judged(request: Request, wanted: Answer, got: Answer) -> str:
    report = Report()
    report.compare(request, wanted, got, [])
    return ", ".join(name for name in FOUND if report.counts[name])


STREAMED = Request(STREAM, "greedy", PATH, BODY)
UNKEYED = replace(STREAMED, keyed=False)


@pytest.mark.parametrize(
    "replies",
    [
        [events(*RIGHT)],
        [events(": waiting\n", *RIGHT)],
        [refusal(), events(*RIGHT)],
        [events(ONE, ends=False), events(TWO, LAST, DONE)],
        [events(ONE, TWO, ends=False), events(LAST, DONE)],
        [events(ONE, last(resumable=True)), refusal(), events(TWO, LAST, DONE)],
    ],
)
async def test_a_stream_that_is_right_is_right_however_often_it_breaks(replies: list[httpx.Response]) -> None:
    answer = await received(replies, STREAMED)
    assert judged(STREAMED, await received([events(*RIGHT)], STREAMED), answer) == ""


@pytest.mark.parametrize(
    ("pending", "status", "verdict"),
    [({}, "running", "unended"), ({}, "completed", ""), ({"quire_journal": "pending"}, "running", "")],
    ids=["it runs", "it has ended", "nobody knows"],
)
async def test_an_end_that_a_reader_does_not_find_is_none_unless_it_is_pending(
    pending: dict[str, str], status: str, verdict: str
) -> None:
    replies = [events(ONE, TWO, event("2eu", usage=USAGE, **pending), DONE)]
    answer = await received(replies, STREAMED, status=status)
    assert judged(STREAMED, await received([events(*RIGHT)], STREAMED), answer) == verdict


AGAIN, OTHER_END = event("2", choice("one")), event("2e", choice(" two", finish_reason="length"))
MORE, LESS = {**USAGE, "completion_tokens": 3, "total_tokens": 6}, {**USAGE, "total_tokens": 6}
BAD_STREAMS = {
    "a token lost at a break": (
        [events(ONE, ends=False), events(event("2e", choice("", finish_reason="stop")), LAST, DONE)], "lost"),
    "a token sent again after a break": (
        [events(ONE, ends=False), events(AGAIN, event("3e", choice(" two", finish_reason="stop")),
                                         event("3eu", usage=USAGE), DONE)], "repeated"),
    "an event sent again after a break": ([events(ONE, ends=False), events(*RIGHT)], "malformed"),
    "events in another order": (
        [events(event("1", choice(" two")), event("2e", choice("one", finish_reason="stop")), LAST, DONE)], "changed"),
    "another end": ([events(ONE, OTHER_END, LAST, DONE)], "changed"),
    "no end": ([events(ONE, event("2", choice(" two")), event("2u", usage=USAGE), DONE)], "lost"),
    "no usage": ([events(ONE, TWO, DONE)], "lost"),
    "another usage": ([events(ONE, TWO, event("2eu", usage=MORE), DONE)], "changed"),
    "a usage that does not add up": ([events(ONE, TWO, event("2eu", usage=LESS), DONE)], "malformed"),
    "no [DONE]": ([events(ONE, TWO, LAST)], "untyped"),
    "an end in the middle": ([events(ONE)], "untyped"),
    "more after [DONE]": ([events(*RIGHT, TWO)], "malformed"),
    "an event without an id": ([events(ONE.partition("\n")[2], TWO, LAST, DONE)], "malformed"),
    "another id of the request": ([events(ONE, TWO.replace(ID, "cd34"), LAST, DONE)], "malformed"),
    "another id after a break": (
        [events(ONE, ends=False), events(TWO, LAST, DONE, headers={"x-request-id": "cd34"})], "malformed"),
    "another model": ([events(ONE.replace("demo", "other"), TWO, LAST, DONE)], "malformed"),
    "no resumable": ([events(ONE, last())], "untyped"),
    "a resumable that says nothing": ([events(ONE, last(resumable="yes")), events(TWO, LAST, DONE)], "untyped"),
    "resumable after what does not pass": (
        [events(ONE, last(status=500, resumable=True)), events(TWO, LAST, DONE)], "untyped"),
    "not resumable though it passes": ([events(ONE, last(resumable=False))], "untyped"),
    "events after an error": ([events(ONE, last(resumable=True), TWO), events(TWO, LAST, DONE)], "malformed"),
    "an error": ([events(ONE, last(status=500, resumable=False))], "errors"),
    "an error of another request": ([events(ONE, last(resumable=True, request_id="cd34")),
                                     events(TWO, LAST, DONE)], "malformed"),
    "an error without a type": ([events(ONE, 'data: {"error": "no"}\n\n')], "untyped"),
    "what is no JSON": ([events(ONE, "data: one\n\n")], "untyped"),
    "what is no event": ([events(ONE, 'data: {"choices": [{}]}\n\n')], "untyped"),
    "an untyped refusal": ([httpx.Response(503, text="upstream")], "untyped"),
    "an untyped limit": ([httpx.Response(429, json={"error": "no"})], "untyped"),
    "a refusal without its time": ([refusal(headers={})], "untyped"),
    "a status of another error": ([refusal(404, code="internal")], "untyped"),
    "an unknown request": ([refusal(404, param="request_id")], "errors"),
    "refusals without end": ([refusal() for _ in range(100)], "hung"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_a_bad_stream_has_a_verdict(name: str) -> None:
    replies, verdict = BAD_STREAMS[name]
    answer = await received(replies, STREAMED)
    assert judged(STREAMED, await received([events(*RIGHT)], STREAMED), answer) == verdict


async def test_a_client_that_gets_only_heartbeats_counts_as_hanging() -> None:
    breaks = [events(": waiting\n", ends=False) for _ in range(100)]
    answer = await received(breaks, STREAMED, replace(MANNERS, limit=0.5))
    assert judged(STREAMED, await received([events(*RIGHT)], STREAMED), answer) == "hung"


async def test_a_request_without_a_key_is_retried_until_its_stream_starts() -> None:
    silent = events(": waiting\n", headers={"x-request-id": "cd34"}, ends=False)
    answer = await received([silent, events(": waiting\n", last(resumable=False)), events(*RIGHT)], UNKEYED)
    assert judged(UNKEYED, await received([events(*RIGHT)], UNKEYED), answer) == ""
    assert len(answer.sent) == 3


WHOLE_BODY = {**HEAD, "choices": [choice("one two", finish_reason="stop")], "usage": USAGE}


def whole(**fields: Any) -> httpx.Response:
    return httpx.Response(200, json={**WHOLE_BODY, **fields}, headers=HEADERS)


BAD_WHOLES = {
    "right": (whole(), ""),
    "no choice": (whole(choices=[]), "lost"),
    "no usage": (whole(usage=None), "lost"),
    "less text": (whole(choices=[choice("one", finish_reason="stop")]), "lost"),
    "no end": (whole(choices=[choice("one two")]), "lost"),
    "another model": (whole(model="other"), "malformed"),
    "another id than its header's": (whole(id="cmpl-cd34"), "malformed"),
    "an id of another kind": (whole(id=f"chatcmpl-{ID}"), "malformed"),
    "an error": (refusal(500), "errors"),
    "an untyped error": (httpx.Response(500, text="oh"), "untyped"),
    "no JSON": (httpx.Response(200, text="oh", headers=HEADERS), "untyped"),
}


@pytest.mark.parametrize("name", BAD_WHOLES)
async def test_a_bad_whole_response_has_a_verdict(name: str) -> None:
    reply, verdict = BAD_WHOLES[name]
    request = Request(WHOLE, "greedy", PATH, BODY)
    assert judged(request, await received([whole()], request), await received([reply], request)) == verdict


def started(**fields: Any) -> httpx.Response:
    headers = {"location": f"/v1/requests/{ID}", **HEADERS}
    return httpx.Response(202, json={"id": ID, "status": "running", **fields}, headers=headers)


def seen(status: str = "completed", **fields: Any) -> httpx.Response:
    return httpx.Response(200, json={"id": ID, "status": status, "response": WHOLE_BODY, **fields}, headers=HEADERS)


BAD_POLLS = {
    "right": ([started(), seen("running"), seen()], ""),
    "another id": ([started(), seen(id="cd34")], "malformed"),
    "another id in its answer": ([started(), seen(response={**WHOLE_BODY, "id": "cmpl-cd34"})], "malformed"),
    "no answer": ([started(), seen(response=None)], "untyped"),
    "an error": ([started(), seen("failed", **failure(500))], "errors"),
    "an error that has passed": ([started(), seen("failed", **failure())], "errors"),
    "cancelled without a request": ([started(), seen("cancelled")], "untyped"),
    "another status": ([started(), seen("lost")], "untyped"),
}


@pytest.mark.parametrize("name", BAD_POLLS)
async def test_a_bad_background_request_has_a_verdict(name: str) -> None:
    replies, verdict = BAD_POLLS[name]
    request = Request(POLLING, "greedy", PATH, BODY)
    assert judged(request, await received([started(), seen()], request), await received(replies, request)) == verdict


async def test_one_that_is_attached_to_is_read_as_a_stream() -> None:
    request = Request(BACKGROUND, "greedy", PATH, BODY)
    right = await received([started(), events(*RIGHT)], request)
    assert judged(request, right, await received([started(), events(ONE, TWO, LAST)], request)) == "untyped"
    assert judged(request, right, await received([started(id="cd34"), events(*RIGHT)], request)) == "malformed"


CONVERSING = Request(CONVERSATION, "conversation", "/v1/responses", {"model": "demo"}, turns=("Hi.", "And?"))
TURN_IDS = ("resp_ab12", "resp_cd34")


def told(number: int, kind: str, **fields: Any) -> str:
    data = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"


def response(turn: int, text: str, **fields: Any) -> dict[str, Any]:
    known = {"id": TURN_IDS[turn], "model": "demo", "previous_response_id": TURN_IDS[0] if turn else None}
    output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    usage = {"input_tokens": 3, "output_tokens": 2}
    return {**known, "status": "completed", "output": output, "usage": usage, **fields}


def turn(number: int, text: str = "one two", **fields: Any) -> tuple[str, ...]:
    """The events of a turn."""
    created = told(0, "created", response=response(number, "", output=[], usage=None, **fields))
    pieces = [told(5, "output_text.delta", delta=text[:3]), told(9, "output_text.delta", delta=text[3:])]
    return created, *pieces, told(10, "completed", response=response(number, text, **fields))


GONE = {"param": "previous_response_id", "type": "invalid_request_error", "code": "previous_response_not_found"}
BAD_CONVERSATIONS: dict[str, tuple[list[httpx.Response], str]] = {
    "right": ([events(*turn(0)), events(*turn(1))], ""),
    "broken and read on": (
        [events(*turn(0)[:2], ends=False), refusal(), events(*turn(0)[2:]), events(*turn(1))], ""),
    "a piece lost at a break": (
        [events(*turn(0)[:2], ends=False), events(turn(0)[3]), events(*turn(1))], "malformed"),
    "a piece sent again": ([events(*turn(0)[:3], *turn(0)[2:]), events(*turn(1))], "malformed"),
    "an answer that is another": ([events(*turn(0)), events(*turn(1, "two one"))], "changed"),
    "an answer that goes on from another": (
        [events(*turn(0)), events(*turn(1, previous_response_id="resp_ef56"))], "malformed"),
    "another model": ([events(*turn(0)), events(*turn(1, model="other"))], "malformed"),
    "another end": ([events(*turn(0)), events(*turn(1, status="incomplete"))], "changed"),
    "no end": ([events(*turn(0)), events(*turn(1)[:3])], "untyped"),
    "a first turn that is forgotten": ([events(*turn(0)), refusal(400, **GONE)], "errors"),
    "an error": ([events(*turn(0)), refusal(500)], "errors"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONVERSATIONS)
async def test_a_bad_conversation_has_a_verdict(name: str) -> None:
    replies, verdict = BAD_CONVERSATIONS[name]
    right = await received([events(*turn(0)), events(*turn(1))], CONVERSING)
    assert right.content()[1] == (6, 4)
    assert judged(CONVERSING, right, await received(replies, CONVERSING)) == verdict


MESSAGING = Request(MESSAGES, "message", "/v1/messages", {"model": "demo"})


def said(place: str, kind: str, **fields: Any) -> str:
    """An event of a message."""
    head = f"id: {place}\n" if place else ""
    return f"{head}event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def piece(place: str, text: str) -> str:
    return said(place, "content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def ended(reason: str = "end_turn", output: int = 2) -> str:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 1, "output_tokens": output}
    return said("2eu", "message_delta", delta={"stop_reason": reason}, usage=usage)


BEGUN = said("0", "message_start", message={"id": "msg_ab12", "model": "demo"})
OPENED, CLOSED = said("0_1", "content_block_start", index=0), said("2_1", "content_block_stop", index=0)
STOPPED = said("", "message_stop")
MESSAGE = (BEGUN, OPENED, piece("1", "one"), piece("2", " two"), CLOSED, ended(), STOPPED)
OVERLOADED = {"type": "overloaded_error", "message": "Why.", "details": {"error_code": "unavailable", "param": None}}


def broken(resumable: bool) -> str:
    details = {**OVERLOADED["details"], "resumable": resumable}
    return said("", "error", error={**OVERLOADED, "details": details}, request_id=ID)


BAD_MESSAGES: dict[str, tuple[list[httpx.Response], str]] = {
    "right": ([events(*MESSAGE)], ""),
    "broken and read on": ([events(*MESSAGE[:3], said("", "ping"), broken(True)), events(*MESSAGE[3:])], ""),
    "refused, and then right": (
        [httpx.Response(503, json={"type": "error", "error": OVERLOADED, "request_id": ID},
                        headers={"retry-after": "1"}), events(*MESSAGE)], ""),
    "a piece lost at a break": ([events(*MESSAGE[:3], ends=False), events(*MESSAGE[4:])], "lost"),
    "a piece sent again": ([events(*MESSAGE[:4], ends=False), events(*MESSAGE[3:])], "malformed"),
    "a beginning sent again": ([events(*MESSAGE[:3], ends=False), events(*MESSAGE)], "malformed"),
    "another text": ([events(*MESSAGE[:3], piece("2", " too"), *MESSAGE[4:])], "changed"),
    "another end": ([events(*MESSAGE[:5], ended("max_tokens"), STOPPED)], "changed"),
    "another usage": ([events(*MESSAGE[:5], ended(output=3), STOPPED)], "changed"),
    "no end": ([events(*MESSAGE[:5])], "untyped"),
    "an event without an id": ([events(*MESSAGE[:3], piece("", " two"), *MESSAGE[4:])], "malformed"),
    "an error that is not as resumable as it says": ([events(*MESSAGE[:3], broken(False))], "untyped"),
    "an untyped error": ([httpx.Response(500, text="oh")], "untyped"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_a_bad_message_has_a_verdict(name: str) -> None:
    replies, verdict = BAD_MESSAGES[name]
    right = await received([events(*MESSAGE)], MESSAGING)
    assert right.content()[1] == (3, 2)
    assert judged(MESSAGING, right, await received(replies, MESSAGING)) == verdict


BATCHING = Request(BATCH, "batch", PATH, {"model": "demo"}, turns=("Once", "Twice"))


def answered(number: int, text: str = "one two", **fields: Any) -> dict[str, Any]:
    body = {**HEAD, "id": f"cmpl-{number}", "choices": [choice(text, finish_reason="stop")], "usage": USAGE}
    return {"custom_id": str(number), "response": {"status_code": 200, "body": body}, "error": None, **fields}


def batch(status: str = "completed", **fields: Any) -> httpx.Response:
    known = {"id": "batch_1", "status": status, "output_file_id": "file-out", "error_file_id": None}
    return httpx.Response(200, json={**known, **fields})


def output(*lines: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, text="\n".join(map(json.dumps, lines)) + "\n")


UPLOADED, NONE_YET = httpx.Response(200, json={"id": "file-in"}), httpx.Response(200, json={"data": []})
STARTED = [UPLOADED, NONE_YET, batch("validating")]
GONE_BATCH = {"param": "batch_id"}
GONE_FILE = {"data": [{"code": "invalid_file", "message": "There is no file 'file-in'.", "param": "input_file_id"}]}
BAD_BATCHES: dict[str, tuple[list[httpx.Response], str]] = {
    "right": ([*STARTED, batch("in_progress"), batch(), output(answered(0), answered(1))], ""),
    "created before the connection broke": (
        [UPLOADED, NONE_YET, refusal(), httpx.Response(200, json={"data": [
            {"id": "batch_1", "metadata": {"key": "key"}}]}), batch(), output(answered(0), answered(1))], ""),
    "a line lost": ([*STARTED, batch(), output(answered(0))], "malformed"),
    "a line twice": ([*STARTED, batch(), output(answered(0), answered(0), answered(1))], "malformed"),
    "lines in another order": ([*STARTED, batch(), output(answered(1), answered(0))], "malformed"),
    "another answer": ([*STARTED, batch(), output(answered(0), answered(1, "two one"))], "changed"),
    "less of an answer": ([*STARTED, batch(), output(answered(0), answered(1, "one"))], "lost"),
    "lines that failed": ([*STARTED, batch(error_file_id="file-bad")], "untyped"),
    "a batch that failed": ([*STARTED, batch("failed")], "untyped"),
    "a batch whose file is gone": ([*STARTED, batch("failed", errors=GONE_FILE)], "errors"),
    "a batch that is gone": ([*STARTED, refusal(404, **GONE_BATCH)], "errors"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BATCHES)
async def test_a_bad_batch_has_a_verdict(name: str) -> None:
    replies, verdict = BAD_BATCHES[name]
    right = await received([*STARTED, batch(), output(answered(0), answered(1))], BATCHING)
    assert right.content()[1] == (6, 4)
    assert judged(BATCHING, right, await received(replies, BATCHING)) == verdict


def message(place: str, text: str = "", *tokens: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=ID, event_id=place, text=text, token_ids=tokens, **fields)


FIRST = message("1", "one", 1)
TOLD = types_pb2.Usage(prompt_tokens=3, completion_tokens=2)
SECOND = message("2eu", " two", 2, finish_reason=types_pb2.FINISH_REASON_STOP, usage=TOLD)
OTHER = pb.GenerateResponse.FromString(SECOND.SerializeToString().replace(ID.encode(), b"cd34"))
Reply = pb.GenerateResponse | pb.ResumeResponse | tuple[grpc.StatusCode, str, int]


class Scripted(InferenceServicer):
    """Each call says what comes next, and ends with an error where that is one: its status, its words, and which error
    is beside it, 0 for none.
    """

    def __init__(self, calls: list[list[Reply]]) -> None:
        self._calls = list(calls)

    async def Generate(self, _request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for each in self._next():
            yield await _reply(each, context)

    async def Resume(self, _request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for each in self._next():
            reply = await _reply(each, context)
            yield pb.ResumeResponse(generate=reply)

    def _next(self) -> Iterator[Reply]:
        return iter(self._calls.pop(0) if len(self._calls) > 1 else self._calls[0])


async def _reply(reply: Reply, context: Any) -> Any:
    if not isinstance(reply, tuple):
        return reply
    status, words, code = reply
    error = types_pb2.Error(code=code, message="Why.").SerializeToString()  # type: ignore[arg-type]
    await context.abort(status, words, (("quire-error-bin", error),) if code else ())


@asynccontextmanager
async def serving(calls: list[list[Reply]]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_InferenceServicer_to_server(Scripted(calls), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def called(calls: list[list[Reply]]) -> Answer:
    request = Request(RPC, "greedy", PATH, BODY)
    async with serving(calls) as address, httpx.AsyncClient(timeout=60) as http:
        stack: Any = SimpleNamespace(fronts=[SimpleNamespace(grpc_address=address)], urls=[])
        return await CLIENTS[RPC](stack, http, "key", random.Random(1), MANNERS).run(request)


BUSY, GONE, OURS = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL
BAD_CALLS: dict[str, tuple[list[list[Reply]], str]] = {
    "right": ([[FIRST, SECOND]], ""),
    "right after a break": ([[FIRST, (BUSY, "Socket closed", 0)], [SECOND]], ""),
    "right after an error that passes": ([[FIRST, (BUSY, "Why.", 7)], [SECOND]], ""),
    "a message that says nothing": ([[FIRST, message("1"), SECOND]], "malformed"),
    "a message that says nothing at another place": ([[FIRST, message("-"), SECOND]], "malformed"),
    "a token sent again": ([[FIRST, (BUSY, "Why.", 7)], [FIRST, SECOND]], "malformed"),
    "a token lost": ([[message("2eu", "one", 1, finish_reason=1, usage=TOLD)]], "malformed"),
    "a token lost, and its place": ([[message("1eu", "one", 1, finish_reason=1, usage=TOLD)]], "lost"),
    "another token": ([[message("1", "one", 3), SECOND]], "changed"),
    "another id": ([[FIRST, OTHER]], "malformed"),
    "no usage": ([[FIRST, message("2e", " two", 2, finish_reason=1)]], "untyped"),
    "nothing": ([[]], "untyped"),
    "more after the usage": ([[FIRST, SECOND, message("3eu", "", 3)]], "malformed"),
    "an error after the usage": ([[FIRST, SECOND, (OURS, "Why.", 9)]], "untyped"),
    "an error": ([[FIRST, (OURS, "Why.", 9)]], "errors"),
    "an unknown request": ([[(GONE, "Why.", 4)]], "errors"),
    "a status of another error": ([[(GONE, "Why.", 9)]], "untyped"),
    "words of another error": ([[(GONE, "Other words.", 4)]], "untyped"),
    "an error of no kind": ([[(OURS, "Why.", 77)]], "untyped"),
    "a failure without our words": ([[(OURS, "Why.", 0)]], "untyped"),
    "an unexpected failure": ([[(grpc.StatusCode.UNKNOWN, "Unexpected", 0)]], "untyped"),
    "breaks without end": ([[(BUSY, "Socket closed", 0)]], "hung"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_bad_call_has_a_verdict(name: str) -> None:
    calls, verdict = BAD_CALLS[name]
    assert judged(Request(RPC, "greedy", PATH, BODY), await called([[FIRST, SECOND]]), await called(calls)) == verdict


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([[message("-"), message("-"), FIRST, message("1"), SECOND]], ""),
        ([[FIRST, message("-"), SECOND]], "malformed"),
        ([[FIRST, SECOND, message("2eu", "", 3)]], "malformed"),
    ],
)
async def test_a_message_that_says_nothing_breaks_a_long_silence(
    calls: list[list[Reply]], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_client, "SILENCE", 0.0)
    assert judged(Request(RPC, "greedy", PATH, BODY), await called([[FIRST, SECOND]]), await called(calls)) == verdict
