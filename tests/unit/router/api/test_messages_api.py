"""``/v1/messages`` over HTTP: errors, ids, keys, replays and resumed streams, beside the routes of other formats."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.core.errors import RefusalReason, rate_limit_used_up

from tests.support.message_streams import Event, message_events, message_of
from tests.support.scripted_api import MODEL, Limits, ask, chat, open_stage, script_of
from tests.support.tool_models import THINKING_TEMPLATE

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
KEY = "k" * 16
ONCE = {"idempotency-key": "once"}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>hm</think>so {CALL} then"
TOOLS = [{"name": "get", "input_schema": {"type": "object"}}]
ASKED = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def stage_with(output: str = OUTPUT, **more: Any):
    async with open_stage(script_of(output), template=THINKING_TEMPLATE, **more) as stage:
        stage.fleet.model_limits = Limits(4096)
        yield stage


def kind_of(answer) -> tuple[int, str]:
    assert answer.json["type"] == "error"
    assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status, answer.error["type"]


# Answers


async def test_an_answer_is_the_same_whole_streamed_and_read_again():
    body = {**ASKED, "tools": TOOLS}
    async with stage_with() as stage:
        whole = await ask(stage.port, "POST", f"{PATH}?beta=true", body)
        stream = await ask(stage.port, "POST", PATH, {**body, "stream": True})
        events = message_events(stream.body)
        streamed = message_of(events)
        read = await ask(stage.port, "GET", f"/v1/requests/{streamed['id']}")
        again = await ask(stage.port, "GET", f"/v1/requests/{streamed['id']}/events")
    assert [block["type"] for block in whole.json["content"]] == ["thinking", "text", "tool_use", "text"]
    assert [event.event_id for event in events] == [None] * len(events)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert read.json["response"] == message_of(message_events(again.body)) == streamed
    assert read.json["status"] == "completed"
    for field in ("role", "type", "model", "stop_reason", "stop_sequence", "usage"):
        assert whole.json[field] == streamed[field]
    assert streamed["id"] == f"msg_{stream.headers['request-id']}"


async def test_a_stream_resumes_after_any_event_by_header_and_by_address():
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "tools": TOOLS, "stream": True}, ONCE)
        events = message_events(stream.body)
        path = f"/v1/requests/msg_{stream.headers['request-id']}/events"
        for count, event in enumerate(events[:-1], 1):
            header = await ask(stage.port, "GET", path, headers={"last-event-id": event.event_id})
            address = await ask(stage.port, "GET", f"{path}?after={event.event_id}")
            assert message_events(header.body) == message_events(address.body) == events[count:]
    assert any("_" in (event.event_id or "") for event in events)


@pytest.mark.parametrize("after", ["999", "x", "1_x", "1.1", "_1", "1e_1"])
async def test_an_id_of_no_place_in_the_answer_is_refused_in_its_format(after):
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE)
        path = f"/v1/requests/{stream.headers['request-id']}/events?after={after}"
        answer = await ask(stage.port, "GET", path)
    assert answer.status == 400
    assert (answer.error["type"], answer.error["details"]["param"]) == ("invalid_request_error", "after")


async def test_an_id_of_a_message_is_no_place_in_a_chat():
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", "/v1/chat/completions", chat(stream=True), ONCE)
        path = f"/v1/requests/{stream.headers['x-request-id']}/events?after=1_1"
        answer = await ask(stage.port, "GET", path)
    assert (answer.status, answer.error["param"]) == (400, "after")


async def test_a_broken_stream_resumes_in_the_middle_of_a_block():
    release = asyncio.Event()
    async with open_stage(["one", "two", release, "three", FinishReason.STOP], template=THINKING_TEMPLATE) as stage:
        payload = json.dumps({**ASKED, "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: test\r\nidempotency-key: once\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(payload) + payload)
        had = (await reader.readuntil(b'"two"')).decode()
        writer.transport.abort()
        async with asyncio.timeout(10):
            await stage.runner.abandoned.wait()
        release.set()
        answer_id, after = re.findall(r'"id":"([^"]+)"', had)[0], re.findall(r"id: (\S+)\n", had)[-1]
        rest = message_events((await ask(stage.port, "GET", f"/v1/requests/{answer_id}/events?after={after}")).body)
    types = [event.data["type"] for event in rest]
    assert types == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    assert rest[0].data["delta"] == {"type": "text_delta", "text": "three"}


async def test_a_message_is_resumed_over_grpc_as_a_chat():
    async with stage_with() as stage, stage.channel() as channel:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "tools": TOOLS, "stream": True}, ONCE)
        whole = message_of(message_events(stream.body))
        stub, request_id = InferenceStub(channel), stream.headers["request-id"]
        parts = [each.chat async for each in stub.Resume(pb.ResumeRequest(request_id=request_id))]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Resume(pb.ResumeRequest(request_id=request_id, after="2_1")).read()
    assert "".join(part.text for part in parts) == "so then"
    calls = [call for part in parts for call in part.tool_calls]
    assert json.loads("".join(call.arguments for call in calls)) == whole["content"][2]["input"]
    assert calls[0].id.removeprefix("call_") == whole["content"][2]["id"].removeprefix("toolu_")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_repeated_key_has_the_first_answer():
    """The same conversation by the route of chats is another request: its answer has another form."""
    fields = {"model": MODEL, "max_tokens": 20, "messages": ASKED["messages"]}
    async with stage_with() as stage:
        first = await ask(stage.port, "POST", PATH, ASKED, ONCE)
        again = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE)
        other = await ask(stage.port, "POST", "/v1/chat/completions", fields, ONCE)
        changed = await ask(stage.port, "POST", PATH, {**ASKED, "max_tokens": 19}, ONCE)
        assert len(stage.runner.generations) == 1
    assert message_of(message_events(again.body)) == first.json
    assert again.headers["x-quire-idempotent-replay"] == "true"
    assert (other.status, other.error["type"]) == (409, "conflict_error")
    assert kind_of(changed) == (409, "invalid_request_error")
    assert changed.headers["x-should-retry"] == "false"


async def test_a_request_in_the_background_is_read_later_as_a_message():
    async with stage_with() as stage:
        started = await ask(stage.port, "POST", PATH, {**ASKED, "background": True})
        assert (started.status, started.json["object"]) == (202, "request")
        await asyncio.gather(*stage.runner.background)
        found = await ask(stage.port, "GET", started.headers["location"])
    assert found.json["response"]["type"] == "message"


async def test_a_silent_stream_has_pings():
    release = asyncio.Event()
    async with open_stage([release, "one", FinishReason.STOP], keepalive=0.01, template=THINKING_TEMPLATE) as stage:
        asking = asyncio.create_task(ask(stage.port, "POST", PATH, {**ASKED, "stream": True}))
        await stage.runner.started.wait()
        await asyncio.sleep(0.1)
        release.set()
        answer = await asking
    assert answer.body.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
    assert b":" not in {line[:1] for line in answer.body.split(b"\n")}
    assert message_of(message_events(answer.body))["content"] == [{"type": "text", "text": "one"}]


async def test_a_cancelled_message_ends_as_one():
    async with open_stage(["one", asyncio.Event()], template=THINKING_TEMPLATE) as stage:
        asking = asyncio.create_task(ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE))
        await stage.runner.started.wait()
        (generation,) = stage.runner.generations
        await ask(stage.port, "POST", f"/v1/requests/{generation.request_id}/cancel")
        *events, last = message_events((await asking).body)
    assert "".join(event.data["delta"]["text"] for event in events if "delta" in event.data) == "one"
    assert (last.data["type"], last.data["error"]["details"]["error_code"]) == ("error", "cancelled")


async def test_counting_says_how_many_tokens_the_prompt_of_the_same_message_has():
    fields = {"model": MODEL, "messages": ASKED["messages"], "tools": TOOLS, "system": "Be brief."}
    async with stage_with() as stage:
        counted = await ask(stage.port, "POST", f"{COUNT}?beta=true", {**fields, "context_management": {"edits": [1]}})
        answer = await ask(stage.port, "POST", PATH, {**ASKED, **fields})
        (generation,) = stage.runner.generations
        refused = await ask(stage.port, "POST", COUNT, {**fields, "messages": [{"role": "user", "content": [{}]}]})
    usage = answer.json["usage"]
    assert counted.json == {"input_tokens": len(generation.prompt_token_ids)}
    assert counted.headers["x-quire-ignored-parameters"] == "context_management"
    assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert kind_of(refused) == (400, "invalid_request_error")


async def test_ignored_parameters_are_named_in_a_header():
    async with stage_with() as stage:
        body = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 2000}, "inference_geo": "eu"}
        answer = await ask(stage.port, "POST", PATH, body)
    assert answer.headers["x-quire-ignored-parameters"] == "inference_geo, thinking.budget_tokens"


# Keys and errors


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {KEY}", "x-api-key": "other"}],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_key_comes_in_either_header(path, headers):
    async with stage_with(keys=[KEY]) as stage:
        versions = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,oauth-2025-04-20"}
        fields = ASKED if path == PATH else {name: ASKED[name] for name in ("model", "messages")}
        assert (await ask(stage.port, "POST", path, fields, {**versions, **headers})).status == 200


@pytest.mark.parametrize("path", [PATH, COUNT, f"{PATH}/", f"{PATH}/batches"])
async def test_errors_before_the_request_is_read_are_those_of_the_api(path):
    async with stage_with(keys=[KEY], max_body_bytes=1000) as stage:
        for headers in ({}, {"x-api-key": "wrong" * 4}):
            answer = await ask(stage.port, "POST", path, ASKED, headers)
            assert kind_of(answer) == (401, "authentication_error")
            assert "API key" in answer.error["message"]
        key = {"x-api-key": KEY}
        unread = {
            (404, "not_found_error"): await ask(stage.port, "POST", f"{path}/nothing", ASKED, key),
            (400, "invalid_request_error"): await ask(stage.port, "POST", PATH, b"{", key),
            (405, "invalid_request_error"): await ask(stage.port, "GET", COUNT, headers=key),
            (413, "request_too_large"): await ask(stage.port, "POST", PATH, b" " * 1001, key),
            (415, "invalid_request_error"): await ask(stage.port, "POST", PATH, ASKED, {**key, "content-type": "a/b"}),
        }
    assert {kind_of(answer): answer for answer in unread.values()} == unread


async def test_other_routes_keep_the_errors_of_their_own():
    async with stage_with(keys=[KEY]) as stage:
        for path in ("/v1/chat/completions", "/v1/messagesx", "/v1/models"):
            answer = await ask(stage.port, "POST", path, ASKED)
            assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
            assert "request-id" not in answer.headers


async def test_an_unknown_model_is_named_with_those_that_there_are():
    async with stage_with() as stage:
        answer = await ask(stage.port, "POST", PATH, {**ASKED, "model": "claude"})
    assert kind_of(answer) == (404, "not_found_error")
    assert answer.error["details"] == {"error_code": "model_not_found", "param": "model"}
    assert f"only '{MODEL}'" in answer.error["message"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (QuireError(ErrorCode.INVALID, "No.", param="messages"), (400, "invalid_request_error")),
        (QuireError(ErrorCode.FORBIDDEN, "No."), (403, "permission_error")),
        (rate_limit_used_up(RefusalReason.TOKENS_PER_MINUTE, 5, 2.5), (429, "rate_limit_error")),
        (QuireError(ErrorCode.UNAVAILABLE, "No.", retry_after=2), (503, "overloaded_error")),
        (QuireError(ErrorCode.DEADLINE, "No."), (504, "timeout_error")),
        (QuireError(ErrorCode.INTERNAL, "No."), (500, "api_error")),
        (ValueError("a bug"), (500, "api_error")),
    ],
)
async def test_an_error_has_the_type_that_the_api_has_for_it(error, expected):
    async with open_stage([error], template=THINKING_TEMPLATE) as stage:
        whole = await ask(stage.port, "POST", PATH, ASKED)
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
    assert kind_of(whole) == kind_of(stream) == expected
    if isinstance(error, QuireError) and error.retry_after is not None:
        assert int(whole.headers["retry-after"]) >= error.retry_after


@pytest.mark.parametrize("ids", [False, True], ids=["without ids", "with ids"])
async def test_a_stream_that_fails_ends_with_an_error_event(ids):
    error = QuireError(ErrorCode.UNAVAILABLE, "This router is shutting down.", reason="stopping")
    async with open_stage(["one", error], template=THINKING_TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE if ids else {})
    *_, last = message_events(answer.body)
    assert last == Event(
        None,
        {
            "type": "error",
            "error": {
                "type": "overloaded_error",
                "message": "This router is shutting down.",
                "details": {"error_code": "stopping", "param": None, "resumable": True},
            },
            "request_id": answer.headers["request-id"],
        },
    )
    assert bool(re.search(rb"\nretry: 1\d\d\d\nevent: error", answer.body)) is ids


async def test_errors_of_a_resumed_message_are_in_its_format():
    async with open_stage(["one", QuireError(ErrorCode.DEADLINE, "Too long.")], template=THINKING_TEMPLATE) as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE)
        path = f"/v1/requests/{stream.headers['request-id']}/events"
        again = await ask(stage.port, "GET", path)
        unknown = await ask(stage.port, "GET", "/v1/requests/msg_x/events")
    assert message_events(again.body)[-1].data["error"]["type"] == "timeout_error"
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
