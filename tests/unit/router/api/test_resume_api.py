"""Resuming a request over both APIs: its remaining events, its status, its end; and which keys may read it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason

from tests.support.scripted_api import ANSWER, MODEL, ask, chat, completion, open_stage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [(CHAT, chat), (COMPLETIONS, completion)]
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True, "n": 2},
    {"stream_options": {"include_usage": True}, "n": 2},
]
IDS = {"include_event_ids": True}
KEY = {"idempotency-key": "once"}


def fields_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a stream with ids."""
    options = {**fields, "stream_options": {**fields.get("stream_options", {}), **IDS}}
    return options | {"logprobs": 2, "echo": True} if path == COMPLETIONS and "logprobs" in fields else options


@asynccontextmanager
async def reading(stage, path, body) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which a request was sent; it breaks when the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    try:
        yield reader
    finally:
        writer.transport.abort()


def events_path(answer_id: object) -> str:
    return f"/v1/requests/{answer_id}/events"


# The rest of an answer


@pytest.mark.parametrize(("path", "build"), BOTH)
@pytest.mark.parametrize("fields", FIELDS)
async def test_the_events_after_any_event_are_those_that_followed_it(path, build, fields):
    async with open_stage() as stage:
        whole = (await ask(stage.port, "POST", path, build(stream=True, **fields_for(path, fields)))).sse
        answer_id = whole[0][1]["id"]
        for cut, (event_id, _) in enumerate(whole[:-1], 1):
            header = await ask(stage.port, "GET", events_path(answer_id), headers={"last-event-id": event_id})
            address = await ask(stage.port, "GET", f"{events_path(answer_id)}?after={event_id}")
            assert header.sse == address.sse == whole[cut:]
        assert (await ask(stage.port, "GET", events_path(answer_id))).sse == whole


@pytest.mark.parametrize("fields", [{}, {"echo": True, "logprobs": 1, "n": 2}])
async def test_a_request_of_several_prompts_resumes_as_one_stream(fields):
    body = completion(["one", "two", "three"], stream=True, stream_options={"include_usage": True, **IDS}, **fields)
    async with open_stage() as stage:
        whole = (await ask(stage.port, "POST", COMPLETIONS, body)).sse
        answer_id = whole[0][1]["id"]
        for cut in range(0, len(whole), 3):
            rest = await ask(stage.port, "GET", f"{events_path(answer_id)}?after={whole[cut][0] or ''}")
            assert by_choice(rest.sse) == by_choice(whole[cut + 1 :] if whole[cut][0] else whole)


def by_choice(events) -> dict[object, list[object]]:
    """The order of choices of different prompts among each other is not fixed."""
    found: dict[object, list[object]] = {}
    for _, event in events:
        key = event if event == "[DONE]" else event["choices"][0]["index"] if event["choices"] else "usage"
        found.setdefault(key, []).append(event)
    return found


@pytest.mark.parametrize(("path", "build"), BOTH)
async def test_a_broken_stream_resumes_at_its_last_event(path, build):
    release = asyncio.Event()
    async with open_stage(["one", "two", release, "three", FinishReason.STOP]) as stage:
        async with reading(stage, path, build(stream=True, stream_options=IDS)) as reader:
            had = (await reader.readuntil(b'"two"')).decode()
        async with asyncio.timeout(10):
            await stage.runner.abandoned.wait()
        release.set()
        answer_id, after = re.findall(r'"id":"([^"]+)"', had)[0], re.findall(r"id: (\S+)", had)[-1]
        rest = await ask(stage.port, "GET", f"{events_path(answer_id)}?after={after}")

    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices_of(rest.events)]
    assert [text for text in texts if text] == ["three"]
    assert rest.events[-1] == "[DONE]"


def choices_of(events) -> list[dict[str, object]]:
    return [choice for event in events if event != "[DONE]" for choice in event["choices"]]


async def test_an_answer_that_was_not_streamed_can_be_read_as_a_stream():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat())
        stream = await ask(stage.port, "GET", events_path(answer.json["id"]))

    assert "".join(choice["delta"].get("content", "") for choice in choices_of(stream.events)) == "Hello wörld"
    assert stream.events[-2]["usage"] == answer.json["usage"]


@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_resume_over_grpc_is_what_followed(method):
    async with open_stage() as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        sampling = types_pb2.SamplingParams(n=2, logprobs=1)
        request = (
            pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="hi")], sampling=sampling)
            if method == "Chat"
            else pb.GenerateRequest(model=MODEL, text="hi", sampling=sampling, echo=True)
        )
        whole = [answer async for answer in getattr(stub, method)(request)]
        for cut in range(len(whole) + 1):
            after = whole[cut - 1].event_id if cut else ""
            call = stub.Resume(pb.ResumeRequest(request_id=whole[0].request_id, after=after))
            rest = [getattr(each, "chat" if method == "Chat" else "generate") async for each in call]
            assert rest == whole[cut:]
            assert dict(await call.initial_metadata())["quire-request-id"] == whole[0].request_id


@pytest.mark.parametrize("ids", [False, True], ids=["without ids", "with ids"])
async def test_an_error_event_says_whether_it_is_resumable_and_with_ids_when_to_retry(ids):
    for script, resumable in ((["one"], True), ([], False)):
        error = QuireError(ErrorCode.UNAVAILABLE, "This router is shutting down.")
        release = asyncio.Event()
        async with open_stage([*script, release, error], heartbeat=0.01, keepalive=0.01) as stage:
            body = chat(stream=True, stream_options={"include_event_ids": ids})
            asking = asyncio.create_task(ask(stage.port, "POST", CHAT, body))
            await stage.runner.started.wait()
            await asyncio.sleep(0.1)
            release.set()
            answer = await asking
        assert answer.status == 200
        assert answer.events[-1]["error"]["resumable"] is resumable
        assert answer.body.rstrip().split(b"\n")[-2].startswith(b"retry: ") == (resumable and ids)


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED])
async def test_a_request_with_a_key_is_resumable_before_its_first_event(code):
    release = asyncio.Event()
    async with open_stage([release, QuireError(code, "Not now.")], heartbeat=0.01) as stage:
        asking = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(stream=True), KEY))
        await stage.runner.started.wait()
        await asyncio.sleep(0.1)
        release.set()
        answer = await asking
    assert answer.status == 200
    assert answer.events[-1]["error"]["resumable"] is True


async def test_only_errors_that_another_router_can_recover_from_are_resumable():
    async with open_stage(["one", QuireError(ErrorCode.DEADLINE, "Too long.")]) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(stream=True))

    assert answer.events[-1]["error"]["resumable"] is False


# Comments


@pytest.mark.parametrize("before", [[], ["one", "two"]], ids=["before the first piece", "after it"])
async def test_a_silent_stream_has_heartbeats_and_the_openai_client_reads_on(before):
    release = asyncio.Event()
    async with open_stage([*before, release, *ANSWER], heartbeat=0.01) as stage, stage.openai() as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, extra_headers=KEY
        )
        async with stream:
            asyncio.get_running_loop().call_later(0.1, release.set)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == "".join(before) + "Hello wörld"


async def test_comments_come_between_events_and_never_inside_one():
    release = asyncio.Event()
    async with open_stage(["one", release, *ANSWER], heartbeat=0.01) as stage:
        asking = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(stream=True), KEY))
        await stage.runner.started.wait()
        await asyncio.sleep(0.1)
        release.set()
        body = (await asking).body

    assert body.count(b": waiting\n") > 1
    for line in body.split(b"\n"):
        assert line == b": waiting" or b": waiting" not in line
    assert body.startswith(b"retry: 1")


async def test_an_error_before_the_first_heartbeat_has_its_own_status():
    async with open_stage([QuireError(ErrorCode.OVERLOADED, "Full.")], heartbeat=5) as stage:
        assert (await ask(stage.port, "POST", CHAT, chat(stream=True))).status == 429


# How far a request is


async def test_a_request_has_its_progress_and_at_last_its_response():
    release = asyncio.Event()
    async with open_stage(["one", release, *ANSWER]) as stage, stage.channel() as channel:
        asking = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(n=2)))
        await until(lambda: len(stage.runner.runs) == 1 and len(next(iter(stage.runner.runs.values())).deltas) == 2)
        request_id = next(iter(stage.runner.runs))
        running = await ask(stage.port, "GET", f"/v1/requests/{request_id}")
        release.set()
        answer = await asking
        completed = await ask(stage.port, "GET", f"/v1/requests/{answer.json['id']}")
        over_grpc = await InferenceStub(channel).GetRequest(pb.GetRequestRequest(request_id=request_id))

    assert (running.json["status"], "response" in running.json) == ("running", False)
    assert running.json["usage"]["completion_tokens"] == 2
    assert completed.json["response"] == answer.json
    assert (completed.json["status"], completed.json["object"], completed.json["id"]) == (
        "completed",
        "request",
        request_id,
    )
    assert completed.json["usage"].items() <= answer.json["usage"].items(), "what reasoning took is the response's"
    assert (over_grpc.status, over_grpc.model) == (pb.REQUEST_STATUS_COMPLETED, MODEL)
    assert over_grpc.usage.completion_tokens == answer.json["usage"]["completion_tokens"]


async def test_a_failed_request_has_its_error():
    async with open_stage([QuireError(ErrorCode.DEADLINE, "Too long.")]) as stage, stage.channel() as channel:
        failed = await ask(stage.port, "POST", CHAT, chat())
        answer = await ask(stage.port, "GET", f"/v1/requests/{failed.headers['x-request-id']}")
        over_grpc = await InferenceStub(channel).GetRequest(pb.GetRequestRequest(request_id=answer.json["id"]))
        again = await ask(stage.port, "GET", events_path(answer.json["id"]))

    assert (answer.status, answer.json["status"]) == (200, "failed")
    assert (answer.json["error"]["code"], answer.json["error"]["message"]) == ("deadline", "Too long.")
    assert (over_grpc.status, over_grpc.error.message) == (pb.REQUEST_STATUS_FAILED, "Too long.")
    assert (again.status, again.error["message"]) == (504, "Too long.")


@pytest.mark.parametrize("how", ["post", "delete", "grpc"])
async def test_a_request_can_be_cancelled(how):
    async with open_stage(["one", asyncio.Event()]) as stage, stage.channel() as channel:
        asking = asyncio.create_task(ask(stage.port, "POST", COMPLETIONS, completion()))
        await stage.runner.started.wait()
        request_id = next(iter(stage.runner.runs))
        if how == "grpc":
            await InferenceStub(channel).Cancel(pb.CancelRequest(request_id=request_id))
        elif how == "post":
            assert (await ask(stage.port, "POST", f"/v1/requests/cmpl-{request_id}/cancel")).status == 200
        else:
            assert (await ask(stage.port, "DELETE", f"/v1/requests/{request_id}")).status == 200
        answer = await asking
        told = await ask(stage.port, "GET", f"/v1/requests/{request_id}")
        again = await ask(stage.port, "POST", f"/v1/requests/{request_id}/cancel")

    assert (answer.status, answer.json["error"]["code"]) == (409, "cancelled")
    assert told.json["status"] == again.json["status"] == "cancelled"


async def test_a_request_deleted_after_its_end_is_unknown():
    async with open_stage() as stage:
        request_id = (await ask(stage.port, "POST", CHAT, chat())).headers["x-request-id"]
        deleted = await ask(stage.port, "DELETE", f"/v1/requests/{request_id}")
        gone = [await ask(stage.port, method, f"/v1/requests/{request_id}") for method in ("GET", "DELETE")]

    assert (deleted.status, deleted.json["status"], deleted.json["deleted"]) == (200, "completed", True)
    assert [answer.status for answer in gone] == [404, 404]


@pytest.mark.parametrize(("store", "retention"), [(False, 0), (True, None), (None, None)])
async def test_a_request_with_store_false_is_not_kept_after_its_end(store, retention):
    fields = {} if store is None else {"store": store}
    async with open_stage() as stage:
        await ask(stage.port, "POST", COMPLETIONS, completion(prompt=["one", "two"], **fields))

    assert [each.retention for each in stage.runner.generations] == [retention] * 2


async def test_a_background_request_with_store_false_is_refused():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(background=True, store=False))

    assert (answer.status, answer.error["param"]) == (400, "store")


# Who may ask, and for what

HOSTILE_IDS = ["x", "chatcmpl-", "é", "a" * 5000, "..", "%00", "*", "quire:request", "a%2Fb", "-" * 65]
KEYS = ("key-of-one", "key-of-two")


@pytest.mark.parametrize("path", ["", "/events", "/cancel"])
async def test_a_request_of_another_tenant_is_unknown(path):
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    async with open_stage(keys=KEYS) as stage:
        request_id = (await ask(stage.port, "POST", CHAT, chat(), mine)).headers["x-request-id"]
        method = "POST" if path == "/cancel" else "GET"
        answers = [
            await ask(stage.port, method, f"/v1/requests/{each}{path}?after=999", headers=other)
            for each in (request_id, "f" * 32)
        ]

    first, second = ({**answer.error, "request_id": ""} for answer in answers)
    assert [answer.status for answer in answers] == [404, 404]
    assert first == second


async def test_grpc_does_not_resume_a_request_of_another_tenant():
    mine, other = ((("authorization", f"Bearer {key}"),) for key in KEYS)
    async with open_stage(keys=KEYS) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        message = await stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), metadata=mine).read()
        for call in (
            stub.Resume(pb.ResumeRequest(request_id=message.request_id), metadata=other).read(),
            stub.GetRequest(pb.GetRequestRequest(request_id=message.request_id), metadata=other),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("request_id", HOSTILE_IDS)
async def test_ids_that_name_nothing_are_404(request_id):
    async with open_stage() as stage, stage.channel() as channel:
        for path in ("", "/events"):
            answer = await ask(stage.port, "GET", f"/v1/requests/{quote(request_id, safe='%')}{path}")
            assert answer.status == 404
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await InferenceStub(channel).Resume(pb.ResumeRequest(request_id=request_id)).read()

    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "after",
    ["x", "-1", "1.2", "5", "4.", "999999999", "1" * 5000, "1e", "4E", "u4", "4eu.", "0x4", "1" + "0" * 9, "4 e", "²"],
)
async def test_an_invalid_cursor_is_refused(after):
    async with open_stage() as stage, stage.channel() as channel:
        request_id = (await ask(stage.port, "POST", CHAT, chat(stream=True))).headers["x-request-id"]
        header = await ask(stage.port, "GET", events_path(request_id), headers={"last-event-id": after})
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await InferenceStub(channel).Resume(pb.ResumeRequest(request_id=request_id, after=after)).read()

    assert (header.status, header.error["param"]) == (400, "after")
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("query", ["after=1&after=2", "other=1", "after=1&x=2&y=3", "x", "after=%FF"])
async def test_an_address_with_anything_else_is_refused(query):
    async with open_stage() as stage:
        request_id = (await ask(stage.port, "POST", CHAT, chat(stream=True))).headers["x-request-id"]
        assert (await ask(stage.port, "GET", f"{events_path(request_id)}?{query}")).status == 400


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
