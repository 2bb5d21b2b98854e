"""How long a reader who comes back waits is its own affair: its answer ends in time, and the request is left as it was,
for whoever reads on.
"""

import asyncio
import json
from time import monotonic

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

from tests.support.scripted_api import Answer, ask, completion, open_stage
from tests.support.scripted_engine import STOP, output
from tests.unit.router.api.test_shutdown import STREAM, RunningRouter, running_router

SOON = {"x-request-timeout": "1"}


async def left_stream(router: RunningRouter) -> str:
    """The id of a request whose client left after its first token."""
    body = json.dumps({**STREAM, "stream_options": {"include_event_ids": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    submit = await router.engine.submit()
    router.engine.send(output(submit.request_id, [80]))
    await reader.readuntil(b"id: 1\n")
    writer.transport.abort()
    await router.engine.cancel()
    return submit.request_id


async def rest_of(router: RunningRouter, request_id: str) -> Answer:
    """The answer to a reader who has all the time, whose request is taken up and ends."""
    answer = asyncio.create_task(ask(router.port, "GET", f"/v1/requests/{request_id}/events"))
    submit = await router.engine.submit()
    assert list(submit.output_token_ids) == [80, 81]
    router.engine.send(output(submit.request_id, [82], 2, STOP))
    return await answer


async def test_both_apis_take_a_deadline_for_a_resumed_stream() -> None:
    async with open_stage() as stage, stage.channel() as channel:
        request_id = (await ask(stage.port, "POST", "/v1/completions", completion())).json["id"]
        began = monotonic()
        for headers in ({"x-request-timeout": "50"}, {}):
            await ask(stage.port, "GET", f"/v1/requests/{request_id}/events", headers=headers)
        for timeout in (60, None):
            resumed = pb.ResumeRequest(request_id=request_id.removeprefix("cmpl-"))
            _ = [message async for message in InferenceStub(channel).Resume(resumed, timeout=timeout)]
        over_rest, without, over_grpc, forever = stage.runner.deadlines

    assert over_rest is not None
    assert over_grpc is not None
    assert began + 50 <= over_rest < monotonic() + 50
    assert began < over_grpc < monotonic() + 60
    assert (without, forever) == (None, None)


async def test_over_rest_a_deadline_ends_the_stream_with_an_event_and_the_request_is_released() -> None:
    async with running_router(shutdown_timeout=1) as router, asyncio.timeout(20):
        request_id = await left_stream(router)
        late = asyncio.create_task(ask(router.port, "GET", f"/v1/requests/{request_id}/events", headers=SOON))
        submit = await router.engine.submit()
        router.engine.send(output(submit.request_id, [81], 1))
        events = (await late).events
        status = (await ask(router.port, "GET", f"/v1/requests/{request_id}")).json["status"]
        rest = await rest_of(router, request_id)

    assert (events[-1]["error"]["code"], events[-1]["error"]["resumable"]) == ("deadline", False)
    assert status == "running"
    assert [event["choices"][0]["finish_reason"] for event in rest.events[:-1]][-1] == "stop"


async def test_over_grpc_a_deadline_ends_the_call_and_the_request_is_released() -> None:
    async with (
        running_router(shutdown_timeout=1) as router,
        grpc.aio.insecure_channel(f"127.0.0.1:{router.rpc_port}") as channel,
        asyncio.timeout(20),
    ):
        request_id = await left_stream(router)
        call = InferenceStub(channel).Resume(pb.ResumeRequest(request_id=request_id), timeout=1)
        submit = await router.engine.submit()
        router.engine.send(output(submit.request_id, [81], 1))
        with pytest.raises(grpc.aio.AioRpcError) as end:
            _ = [message async for message in call]
        await router.engine.cancel()
        rest = await rest_of(router, request_id)

    assert end.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert rest.events[-1] == "[DONE]"


async def test_a_followers_deadline_ends_it_alone_and_the_first_reader_continues() -> None:
    async with running_router(shutdown_timeout=1) as router, asyncio.timeout(20):
        first = await router.stream()
        late = await ask(router.port, "GET", f"/v1/requests/{router.request_id}/events", headers=SOON)
        router.engine.send(output(router.request_id, [81], 1, STOP))
        answer = await first

    assert late.events[-1]["error"]["code"] == "deadline"
    assert answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("seconds", ["0", "soon", "-1"])
async def test_what_is_no_time_is_refused(seconds: str) -> None:
    async with running_router(shutdown_timeout=1) as router, asyncio.timeout(20):
        path = "/v1/requests/unknown/events"
        answer = await ask(router.port, "GET", path, headers={"x-request-timeout": seconds})

    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout")
