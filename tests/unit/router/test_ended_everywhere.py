"""Once a client has the end of an answer, every read, deletion and continuation sees it, at every router and with each
journal: whole routers in this process, with a Redis that hears one of them late.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.cli import read_settings
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router import components
from quire_router.app import Router
from quire_router.config import Settings
from quire_router.journal.codec import JournalSettings

from tests.chaos.proxy import UP, Proxy
from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, redis_server
from tests.support.scripted_engine import STOP, ScriptedEngine, output

LATE = 0.05  # seconds that Redis hears the router later which runs the requests
ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.soak)])  # of each kind of read
PATHS = pytest.mark.parametrize("path", ["/v1/responses", pytest.param("/v1/requests", marks=pytest.mark.soak)])
TOKENS = [80, 81, 82]
TEXT = byte_level().decode(TOKENS)
WHERE = {"memory": 1, "a file": 1, "Redis": 1, "Redis, another router": 2}


@dataclass
class Routers:
    """Requests run at the first one, and are read at the last one."""

    clients: list[httpx.AsyncClient]
    grpc_addresses: list[str]

    async def post(self, path: str, router: int = 0, key: str = "", **fields: Any) -> httpx.Response:
        headers = {"idempotency-key": key} if key else {}
        answer = await self.clients[router].post(path, json={"model": "m", **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "x-quire-journal" not in answer.headers
        return answer

    async def get(self, path: str) -> httpx.Response:
        answer = await self.clients[-1].get(path)
        assert answer.status_code == 200, answer.text
        return answer

    async def respond(self, router: int = 0, *, streamed: bool = False, **fields: Any) -> dict[str, Any]:
        """A response that has just ended, as its client got it."""
        asked = {"input": "hello", **fields}
        if not streamed:
            whole: dict[str, Any] = (await self.post("/v1/responses", router, **asked)).json()
            return whole
        stream = await self.post("/v1/responses", router, **asked, stream=True)
        last = events_of(stream)[-1]
        assert last["type"] == "response.completed"
        response: dict[str, Any] = last["response"]
        return response


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def answer_all(engine: ScriptedEngine) -> None:
    """The engine gives every request the same answer."""
    while True:
        command = await engine.commands.get()
        if command.WhichOneof("command") == "submit":
            engine.send(output(command.submit.request_id, TOKENS, 0, STOP))


@asynccontextmanager
async def running_router(*flags: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    engine = ScriptedEngine(models=("m",), vocab_size=byte_level().get_vocab_size())
    address, port, grpc_port = await engine.start(), free_port(), free_port()
    given = ["--http-port", str(port), "--grpc-port", str(grpc_port), "--metrics-port", str(free_port())]
    given += ["--model", "m=/nowhere", "--engine", address, *flags]
    tokenizers = {"m": ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
    router = Router(read_settings(Settings, given), tokenizers)
    tasks = [asyncio.create_task(router.run()), asyncio.create_task(answer_all(engine))]
    try:
        await asyncio.wait_for(engine.opened.get(), 20)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 - the router says it here
                await asyncio.sleep(0.01)
            yield client, f"127.0.0.1:{grpc_port}"
    finally:
        router.stop()
        router.stop()
        await tasks[0]
        tasks[1].cancel()
        await engine.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=WHERE)
async def routers(
    request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Routers]:
    patient = partial(JournalSettings, end_timeout=60.0, ask_timeout=60.0)  # however busy this machine is
    monkeypatch.setattr(components, "JournalSettings", patient)
    async with AsyncExitStack() as stack:
        flags: Sequence[Sequence[str]] = [()]
        if request.param == "a file":
            flags = [("--journal-file", str(tmp_path / "journal"))]
        elif request.param != "memory":
            proxy = Proxy(server.port)
            await proxy.start()
            stack.push_async_callback(proxy.stop)
            proxy.delay([UP], LATE)
            urls = [f"redis://{proxy.address}", server.url]
            flags = [("--redis-url", url) for url in urls[: WHERE[request.param]]]
        started = [await stack.enter_async_context(running_router(*each)) for each in flags]
        for client, _ in started:
            while await is_connecting(client):
                pass
        yield Routers([client for client, _ in started], [address for _, address in started])


async def is_connecting(client: httpx.AsyncClient) -> bool:
    """Whether a router has not reached its journal yet."""
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hello"})
    return "x-quire-journal" in answer.headers


async def response_is_completed(routers: Routers, response: dict[str, Any]) -> None:
    assert (await routers.get(f"/v1/responses/{response['id']}")).json() == response


async def its_stream_ends_with_it(routers: Routers, response: dict[str, Any]) -> None:
    last = events_of(await routers.get(f"/v1/responses/{response['id']}?stream=true"))[-1]
    assert (last["type"], last["response"]) == ("response.completed", response)


async def request_is_completed(routers: Routers, response: dict[str, Any]) -> None:
    found = (await routers.get(f"/v1/requests/{response['id']}")).json()
    assert (found["status"], found["response"]) == ("completed", response)
    assert found["usage"]["completion_tokens"] == len(TOKENS)


async def its_events_end_with_it(routers: Routers, response: dict[str, Any]) -> None:
    assert events_of(await routers.get(f"/v1/requests/{response['id']}/events"))[-1]["response"] == response


async def grpc_says_completed(routers: Routers, response: dict[str, Any]) -> None:
    async with grpc.aio.insecure_channel(routers.grpc_addresses[-1]) as channel:
        found = await InferenceStub(channel).GetRequest(pb.GetRequestRequest(request_id=response["id"]))
    assert found.status == pb.REQUEST_STATUS_COMPLETED


async def it_cannot_be_cancelled(routers: Routers, response: dict[str, Any]) -> None:
    cancelled = await routers.clients[-1].post(f"/v1/responses/{response['id']}/cancel")
    assert cancelled.json() == response


async def another_goes_on_from_it(routers: Routers, response: dict[str, Any]) -> None:
    further = await routers.respond(len(routers.clients) - 1, previous_response_id=response["id"])
    assert further["usage"]["input_tokens"] > response["usage"]["input_tokens"] + len(TOKENS)


READS: list[Callable[[Routers, dict[str, Any]], Awaitable[None]]] = [
    response_is_completed,
    its_stream_ends_with_it,
    request_is_completed,
    its_events_end_with_it,
    grpc_says_completed,
    it_cannot_be_cancelled,
    another_goes_on_from_it,
]


@ROUNDS
async def test_every_read_sees_the_end_that_its_client_has(routers: Routers, rounds: int) -> None:
    for read in rounds * READS:
        for streamed in (False, True):
            await read(routers, await routers.respond(streamed=streamed))


@ROUNDS
async def test_the_turn_is_among_the_items_of_its_conversation(routers: Routers, rounds: int) -> None:
    made = (await routers.clients[0].post("/v1/conversations", json={})).json()
    for number in range(2 * rounds):
        await routers.respond(conversation=made["id"], streamed=number % 2 == 1)
        items = (await routers.get(f"/v1/conversations/{made['id']}/items?limit=100")).json()["data"]
        assert len(items) == 2 * (number + 1)
        assert items[0]["content"][0]["text"] == TEXT


@PATHS
async def test_what_was_deleted_is_gone_at_every_router(routers: Routers, path: str) -> None:
    for streamed in (False, True):
        response = await routers.respond(streamed=streamed)
        deleted = await routers.clients[-1].delete(f"{path}/{response['id']}")
        assert deleted.json()["deleted"]
        for client in routers.clients:
            for suffix in ("responses/{}", "responses/{}?stream=true", "requests/{}", "responses/{}/input_items"):
                assert (await client.get(f"/v1/{suffix.format(response['id'])}")).status_code == 404
            body = {"model": "m", "input": "and?", "previous_response_id": response["id"]}
            refused = await client.post("/v1/responses", json=body)
            assert refused.json()["error"]["code"] == "previous_response_not_found"


@PATHS
async def test_deleting_a_response_takes_nothing_from_its_conversation(routers: Routers, path: str) -> None:
    made = (await routers.clients[0].post("/v1/conversations", json={})).json()
    response = await routers.respond(conversation=made["id"])
    assert (await routers.clients[-1].delete(f"{path}/{response['id']}")).json()["deleted"]
    items = (await routers.get(f"/v1/conversations/{made['id']}/items")).json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"]


KEYED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
    "/v1/completions of a list": {"prompt": ["hello", "you"]},
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_keyed_answer_of_any_api_has_ended_everywhere(routers: Routers, *, streamed: bool) -> None:
    for kind, fields in KEYED.items():
        path, key = kind.partition(" ")[0], uuid4().hex
        answer = await routers.post(path, key=key, **fields, stream=streamed)
        body = events_of(answer)[0] if streamed else answer.json()
        name = answer.headers["x-request-id"]
        found = (await routers.get(f"/v1/requests/{name}")).json()
        assert found["status"] == "completed", kind
        again = (await routers.post(path, router=len(routers.clients) - 1, key=key, **fields)).json()
        assert again == found["response"]
        if not streamed:
            assert again == body


@ROUNDS
async def test_an_answer_that_nobody_waited_for_has_ended_at_its_reader_too(routers: Routers, rounds: int) -> None:
    """One without a key: only who reads it asks for its end. Its record is begun first, as it is in the background of
    other answers.
    """
    for _ in range(2 * rounds):
        fields = KEYED["/v1/chat/completions"]
        name = (await routers.post("/v1/chat/completions", **fields)).headers["x-request-id"]
        found = await routers.clients[0].get(f"/v1/requests/{name}")
        assert found.json()["status"] == "completed"
        assert (await routers.get(f"/v1/requests/{name}")).json()["status"] == "completed"
