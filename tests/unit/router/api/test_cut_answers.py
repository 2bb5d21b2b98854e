"""An answer that is cancelled, out of time, or without engines: the end that each API's own document knows."""

import json
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from anthropic.types.shared import ErrorType
from openai.types.responses import ResponseErrorEvent, ResponseStatus
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason
from quire_router.core.errors import engines_lost, request_timed_out

from tests.support.scripted_api import MODEL, Stage, ask, chat, completion, open_stage, script_of

RESPONSE = {"model": MODEL, "input": "hello", "store": False}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": completion(),
    "/v1/messages": {**chat(), "max_tokens": 50},
    "/v1/responses": RESPONSE,
}
CHATS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class End:
    """What cuts an answer, and how each API tells it: the status of a whole answer and the code; Anthropic's type."""

    cause: FinishReason | QuireError
    status: int
    code: str
    anthropic: str


ENDS = {
    "cancelled": End(FinishReason.ABORT, 409, "cancelled", "invalid_request_error"),
    "deadline": End(request_timed_out(), 504, "deadline", "timeout_error"),
    "engines lost": End(engines_lost(), 503, "unavailable", "overloaded_error"),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ENDS)
async def test_a_whole_answer_that_is_cut_is_a_typed_error(route: str, name: str) -> None:
    end = ENDS[name]
    async with open_stage([*script_of("hello wor")[:-1], end.cause]) as stage:
        answer = await ask(stage.port, "POST", route, ROUTES[route])
    if route == "/v1/responses" and name == "cancelled":
        assert (answer.status, answer.json["status"]) == (200, "cancelled")
        assert answer.json["status"] in get_args(ResponseStatus)
        return
    assert answer.status == end.status
    assert b"abort" not in answer.body
    if route == "/v1/messages":
        assert answer.json["error"]["type"] == end.anthropic
        assert answer.json["error"]["type"] in get_args(ErrorType)
    else:
        assert answer.json["error"]["code"] == end.code
    assert ("x-should-retry" in answer.headers) == (name == "cancelled")


async def streamed(stage: Stage, route: str) -> tuple[list[dict[str, Any]], bytes]:
    answer = await ask(stage.port, "POST", route, {**ROUTES[route], "stream": True})
    assert answer.status == 200
    lines = answer.body.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")], answer.body


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ENDS)
async def test_a_stream_that_is_cut_ends_with_an_event_of_its_document(route: str, name: str) -> None:
    end = ENDS[name]
    async with open_stage([*script_of("hello wor")[:-1], end.cause]) as stage:
        events, body = await streamed(stage, route)
    last = events[-1]
    assert b"abort" not in body
    assert b"hel" in body
    if route == "/v1/messages":
        assert last["type"] == "error"
        assert last["error"]["type"] == end.anthropic
    elif route in CHATS:
        assert last["error"]["code"] == end.code
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
        assert b"[DONE]" not in body
    elif name == "cancelled":
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    else:
        (error,) = (event for event in events if event["type"] == "error")
        ResponseErrorEvent.model_validate(error, strict=True)
        assert error["code"] == end.code


async def test_a_cancelled_request_cannot_be_resumed() -> None:
    async with open_stage([*script_of("hello wor")[:-1], FinishReason.ABORT]) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", chat(stream=True), {"Idempotency-Key": "k"})
    last = json.loads(answer.body.decode().rstrip().split("\n\n")[-1].split("data: ")[1])
    assert last["error"]["resumable"] is False
