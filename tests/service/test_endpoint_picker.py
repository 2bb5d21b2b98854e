"""The endpoint picker of a real router: behind a small proxy that asks as Envoy does, and behind a real Envoy, where
there is one. The servers are stand-ins for vLLM's that run here.
"""

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, ClientTimeout

from tests.service.conftest import DEMO
from tests.support.envoy import ENVOY, SUBSET_HEADER, Cluster, Envoy
from tests.support.ext_proc import (
    CHAT,
    ExtProcStream,
    ForwardedEngine,
    Gateway,
    channel_to,
    destination,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame, literal, opening
from tests.support.http_engines import serving
from tests.support.ports import free_port
from tests.support.processes import Router
from tests.support.redis_server import redis_server

STORY = "There was once a fox who lived by the river and knew each of its stones. " * 12


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


class PickingRouter(Router):
    """A router with a picker, over TLS with a certificate of its own."""

    def __init__(self, engines: Sequence[str], folder: Path, *flags: str) -> None:
        self.picker_port = free_port()
        picking = (f"--picker-port={self.picker_port}", "--picker-insecure")
        super().__init__(DEMO, engines, folder, *picking, *flags, name="m")

    @property
    def certificate(self) -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", self.picker_port)).encode()

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(20):
            while await asyncio.to_thread(self.metric, name, **labels) != value:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.05)


@asynccontextmanager
async def picking(folder: Path, *engines: ForwardedEngine, flags: Sequence[str] = ()) -> AsyncIterator[PickingRouter]:
    async with serving(*engines):
        router = PickingRouter([each.address for each in engines], folder, *flags)
        try:
            await asyncio.to_thread(router.wait_ready)
            await router.until_metric("quire_engines_ready", len(engines))
            yield router
        finally:
            if router.popen.poll() is None:
                await asyncio.to_thread(router.stop)


async def test_conversations_go_on_where_they_began(tmp_path: Path) -> None:
    engines = [ForwardedEngine() for _ in range(3)]
    async with picking(tmp_path, *engines) as router, channel_to(router.picker_port, router.certificate) as channel:
        gateway = Gateway(channel)
        topics = {topic: f"{topic}: {STORY}" for topic in ("fox", "bear", "crow")}
        for engine in engines:
            engine.hold_after = 1
        asked = asyncio.gather(*(gateway.post(chat(text, stream=True)) for text in topics.values()))
        async with asyncio.timeout(20):
            while sum(len(engine.bodies) for engine in engines) < len(topics):  # noqa: ASYNC110 - requests come here
                await asyncio.sleep(0.01)
        for engine in engines:
            engine.hold_after = None
            engine.released.set()
        answers = await asked
        homes = dict(zip(topics, (answer.endpoint for answer in answers), strict=True))
        assert len(set(homes.values())) == 3  # at the same time they share the servers
        for turn in range(3):
            for topic, text in topics.items():
                answer = await gateway.post(chat(f"{text} And then? {turn}"))
                assert (answer.status, answer.endpoint) == (200, homes[topic])
        await router.until_metric("quire_picks_total", 12, model="m", end="completed")
        await router.until_metric("quire_in_flight_requests", 0, model="m")


async def test_a_router_that_stops_lets_responses_pass(tmp_path: Path) -> None:
    engine = ForwardedEngine()
    async with picking(tmp_path, engine) as router, channel_to(router.picker_port, router.certificate) as channel:
        stream = ExtProcStream(channel)
        await stream.send(request_headers())
        assert destination(await stream.ask(request_body(json.dumps(chat(stream=True)).encode()))) == [engine.endpoint]
        await stream.read()
        await stream.ask(response_headers(200, "text/event-stream"))
        router.signal(signal.SIGTERM)
        await stream.ask(response_body(b"data: {}\n\n"))
        await stream.ask(response_body(b"data: [DONE]\n\n", end=True))
        assert await stream.ended() is grpc.StatusCode.OK
        assert await asyncio.to_thread(router.wait) == 0, router.text


async def test_workers_share_the_port(tmp_path: Path) -> None:
    with redis_server() as redis:
        flags = ("--workers=2", f"--redis-url={redis.url}", "--no-picker-secure-serving", "--shutdown-timeout=1")
        async with picking(tmp_path, ForwardedEngine(), flags=flags) as router:
            # Each connection is one worker's, which the kernel chooses.
            for number in range(8):
                async with channel_to(router.picker_port, options=[("quire.test", number)]) as channel:
                    assert (await Gateway(channel).post(chat(f"{number}"))).status == 200
            await router.until_metric("quire_picks_total", 8, model="m", end="completed")
            await router.until_metric("quire_in_flight_requests", 0, model="m")


def test_a_picker_with_nothing_to_pick_does_not_start(tmp_path: Path) -> None:
    router = PickingRouter(["127.0.0.1:9000", "dns://engines:9000", "vllm+https://10.0.0.1:8000"], tmp_path)
    assert router.wait() != 0
    assert "--picker-port needs servers that speak HTTP at an IP address" in router.text


needs_envoy = pytest.mark.skipif(ENVOY is None, reason="scripts/envoy.sh fetches it")


@contextmanager
def proxying(
    folder: Path,
    router: PickingRouter,
    engines: Sequence[ForwardedEngine],
    kind: Cluster,
    mode: str = "FULL_DUPLEX_STREAMED",
    retries: int = 0,
) -> Iterator[Envoy]:
    envoy = Envoy(folder, router.picker_port, [each.port for each in engines], kind, mode, retries)
    try:
        yield envoy.wait_ready()
        assert envoy.popen.poll() is None, envoy.text
    finally:
        envoy.kill()


@needs_envoy
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("header", "FULL_DUPLEX_STREAMED"), ("metadata", "FULL_DUPLEX_STREAMED"), ("metadata", "BUFFERED")],
)
async def test_envoy_follows_the_picker(kind: Cluster, mode: str, tmp_path: Path) -> None:
    engines = [ForwardedEngine() for _ in range(3)]
    async with picking(tmp_path, *engines, flags=["--debug-route", "--max-body-bytes=500000"]) as router:
        with proxying(tmp_path, router, engines, kind, mode) as envoy:
            async with ClientSession(envoy.url, timeout=ClientTimeout(30)) as http:

                async def post(body: Any, **headers: str) -> tuple[int, bytes, str]:
                    data = body if isinstance(body, bytes) else json.dumps(body).encode()
                    given = {"content-type": "application/json", **headers}
                    async with http.post(CHAT, data=data, headers=given) as answer:
                        route = answer.headers.get("x-quire-route", "")
                        return answer.status, await answer.read(), route.partition(";")[0]

                # The server that Envoy sends a request to is the one that was picked, and gets each byte of it.
                for number, length in enumerate((1, 50, 500)):
                    body = json.dumps(chat(f"{number} {STORY * length}"), indent=2).encode()
                    status, answer, route = await post(body)
                    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 4)
                    assert next(each for each in engines if each.address == route).bodies[-1] == body
                status, answer, _ = await post(chat(STORY * 700))
                assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")

                # What begins alike goes to the same one.
                home = (await post(chat(f"fox: {STORY}")))[2]
                for turn in range(4):
                    assert (await post(chat(f"fox: {STORY} And then? {turn}")))[2] == home

                # A stream passes through.
                status, answer, _ = await post(chat(stream=True, max_tokens=9))
                assert (status, answer.count(b"data: {")) == (200, 9)
                assert answer.endswith(b"data: [DONE]\n\n")

                # A subset is kept to, and what cannot be picked is an error of the router's.
                for engine in engines:
                    _, _, route = await post(chat(), **{SUBSET_HEADER: engine.endpoint})
                    assert route == engine.address
                status, answer, _ = await post(chat(), **{SUBSET_HEADER: "192.0.2.1:1"})
                assert (status, json.loads(answer)["error"]["code"]) == (503, "none_ready")
                status, answer, _ = await post(b"no JSON")
                assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")

                # Requests without a body are sent on, too.
                async with http.get("/v1/models") as models:
                    assert (await models.json())["data"][0]["id"] == "m"
            await router.until_metric("quire_in_flight_requests", 0, model="m")


@needs_envoy
async def test_a_client_that_leaves_envoy_frees_the_load(tmp_path: Path) -> None:
    engine = ForwardedEngine()
    engine.hold_after = 2
    async with picking(tmp_path, engine) as router:
        with proxying(tmp_path, router, [engine], "metadata") as envoy:
            async with ClientSession(envoy.url) as http:
                answer = await http.post(CHAT, json=chat(stream=True))
                assert b"data: {" in await answer.content.readany()
                await router.until_metric("quire_in_flight_requests", 1, model="m")
                answer.close()
            await router.until_metric("quire_in_flight_requests", 0, model="m")
            await router.until_metric("quire_picks_total", 1, model="m", end="closed")


@needs_envoy
async def test_envoy_goes_on_to_the_next_best_endpoint(tmp_path: Path) -> None:
    engines = [ForwardedEngine(), ForwardedEngine()]
    async with picking(tmp_path, *engines, flags=["--picker-fallbacks=1", "--debug-route"]) as router:
        with proxying(tmp_path, router, engines, "metadata", retries=1) as envoy:
            async with ClientSession(envoy.url, timeout=ClientTimeout(30)) as http:
                async with http.post(CHAT, json=chat(STORY)) as answer:
                    home = answer.headers["x-quire-route"].partition(";")[0]
                gone, other = sorted(engines, key=lambda each: each.address != home)
                await gone.stop()  # which the router finds out within a second
                body = json.dumps(chat(f"{STORY} And then?")).encode()
                async with http.post(CHAT, data=body) as answer:
                    assert answer.status == 200
                assert other.bodies == [body]


@needs_envoy
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_a_request_with_trailers_passes_through_envoy(mode: str, tmp_path: Path) -> None:
    engine = ForwardedEngine()
    body = json.dumps(chat()).encode()
    names = {
        ":method": "POST",
        ":scheme": "http",
        ":path": CHAT,
        ":authority": "llm",
        "content-type": "application/json",
    }
    head = b"".join(literal(name, value) for name, value in names.items())
    async with picking(tmp_path, engine) as router:
        with proxying(tmp_path, router, [engine], "metadata", mode) as envoy:
            reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
            writer.write(opening() + frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, 0, 1, body))
            writer.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, literal("x-checksum", "1")))
            async with asyncio.timeout(20):
                answer = b""
                while b'"completion_tokens"' not in answer:
                    piece = await reader.read(65_536)
                    assert piece, "Envoy has closed the connection"
                    answer += piece
            writer.close()
    assert engine.bodies == [body]
