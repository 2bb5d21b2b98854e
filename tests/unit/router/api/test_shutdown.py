"""Graceful shutdown of a router: running requests may finish in time, and the others get an error with the reason."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import REGISTRY
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.cli import read_settings
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.app import Router
from quire_router.config import Settings

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.ports import free_port
from tests.support.scripted_api import Answer, ask, completion, read_answer
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until

STREAM = completion(stream=True, max_tokens=50) | {"model": "m"}


class RunningRouter:
    """A whole router in this process, with one engine that says what the test tells it to."""

    def __init__(self, engine: ScriptedEngine, shutdown_timeout: float) -> None:
        self.engine = engine
        self.port, self.rpc_port = free_port(), free_port()
        ports = ["--http-port", str(self.port), "--grpc-port", str(self.rpc_port), "--metrics-port", str(free_port())]
        flags = ["--model", "m=/nowhere", "--engine", engine.address, "--shutdown-timeout", str(shutdown_timeout)]
        tokenizers = {"m": ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
        self.router = Router(read_settings(Settings, [*ports, *flags]), tokenizers)
        self.running = asyncio.create_task(self.router.run())

    async def wait_healthy(self) -> None:
        async with asyncio.timeout(20):
            while not await self._healthy():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    async def _healthy(self) -> bool:
        try:
            return (await ask(self.port, "GET", "/health")).status == 200
        except ConnectionError:
            return False

    async def stream(self) -> asyncio.Task[Answer]:
        """A streaming request that the engine has just begun to answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(STREAM).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.request_id = (await self.engine.submit()).request_id
        self.engine.send(output(self.request_id, [80]))
        answer = asyncio.create_task(read_answer(reader))
        answer.add_done_callback(lambda _: writer.close())
        return answer


@asynccontextmanager
async def running_router(shutdown_timeout: float, **description: int):
    engine = ScriptedEngine(vocab_size=byte_level().get_vocab_size(), **description)
    await engine.start()
    router = RunningRouter(engine, shutdown_timeout)
    try:
        await router.wait_healthy()
        yield router
    finally:
        router.router.stop()
        await asyncio.wait([router.running], timeout=20)
        await engine.stop()
    assert router.running.exception() is None


async def test_running_requests_finish_and_new_ones_are_refused():
    async with running_router(shutdown_timeout=20) as router:
        answer = await router.stream()
        router.router.stop()
        await asyncio.sleep(0)
        refused = await ask(router.port, "POST", "/v1/completions", STREAM)
        router.engine.send(output(router.request_id, [81], 1, STOP))
        events = (await answer).events
        await router.running

    assert (refused.status, refused.error["type"]) == (503, "service_unavailable_error")
    assert refused.error["code"] == refused.headers["x-quire-reason"] == "stopping"
    assert "retry-after" in refused.headers
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(ConnectionError):
        await ask(router.port, "GET", "/live")


async def test_waiting_requests_are_admitted_within_the_shutdown_timeout():
    async with running_router(shutdown_timeout=20, max_num_seqs=1) as router:
        answer, first = await router.stream(), router.request_id
        waiting = asyncio.create_task(ask(router.port, "POST", "/v1/completions", {**STREAM, "stream": False}))
        await until(lambda: REGISTRY.get_sample_value("quire_parked_requests", {"model": "m"}) == 1)
        router.router.stop()
        await asyncio.sleep(0.05)
        router.engine.send(output(first, [81], 1, STOP))
        assert (await answer).events[-1] == "[DONE]"
        second = (await router.engine.submit()).request_id
        router.engine.send(output(second, [82], 0, STOP))
        assert (await waiting).status == 200


async def test_requests_that_wait_beyond_the_shutdown_timeout_get_an_error():
    async with running_router(shutdown_timeout=0.2, max_num_seqs=1) as router:
        answer = await router.stream()
        waiting = asyncio.create_task(ask(router.port, "POST", "/v1/completions", {**STREAM, "stream": False}))
        await until(lambda: REGISTRY.get_sample_value("quire_parked_requests", {"model": "m"}) == 1)
        router.router.stop()
        refused = await waiting
        await answer

    assert (refused.status, refused.error["code"]) == (503, "stopping")
    assert "retry-after" in refused.headers


async def test_a_request_that_does_not_finish_in_time_gets_an_error_over_rest():
    async with running_router(shutdown_timeout=0.05) as router:
        answer = await router.stream()
        router.router.stop()
        events = (await answer).events

    assert (events[-1]["error"]["type"], events[-1]["error"]["code"]) == ("service_unavailable_error", "stopping")
    assert events[-1]["error"]["resumable"] is True


async def test_a_request_that_does_not_finish_in_time_gets_an_error_over_grpc():
    async with (
        running_router(shutdown_timeout=0.05) as router,
        grpc.aio.insecure_channel(f"127.0.0.1:{router.rpc_port}") as channel,
    ):
        call = InferenceStub(channel).Generate(pb.GenerateRequest(model="m", text="hello"))
        submit = await router.engine.submit()
        router.engine.send(output(submit.request_id, [80]))
        await call.read()
        router.router.stop()
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await call.read()

    assert end.value.code() == grpc.StatusCode.UNAVAILABLE
    assert dict(end.value.trailing_metadata())["quire-reason"] == "stopping"
