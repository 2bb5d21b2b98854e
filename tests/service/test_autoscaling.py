"""Real routers publish the load, and a simulated autoscaler that reads it starts and stops real engines."""

import asyncio
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI
from quire.keda.externalscaler_pb2 import GetMetricsRequest, ScaledObjectRef
from quire.keda.externalscaler_pb2_grpc import ExternalScalerStub

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.autoscalers import RESOURCE, Cluster, ask, value
from tests.support.forked_engines import ForkedEngine, ForkedRouter, warm_up
from tests.support.hpa import Hpa
from tests.support.ports import free_port
from tests.support.processes import Engine, Router, eventually, fetch
from tests.support.redis_server import RedisServer, redis_server

HELD, LONG = 20, 2
PATIENCE = 120.0
TICK = 0.1  # seconds from one question of the autoscaler to the next


@dataclass
class Asked:
    """A router, the ports at which autoscalers ask it, and what KEDA shows, if anything."""

    router: Router
    proxy: ssl.SSLContext
    scaling_port: int
    keda_port: int
    credentials: grpc.ChannelCredentials | None

    async def external(self) -> int | None:
        """The load by external.metrics.k8s.io; None where it is an error."""
        answer = await ask(self.scaling_port, self.proxy, f"{RESOURCE}?labelSelector=model%3D{MODEL}")
        assert answer.status_code in (200, 503), answer.text
        return value(answer)

    async def keda(self) -> int | None:
        """The load by KEDA's external scaler; None where it is an error."""
        metadata = ScaledObjectRef(name="engine", namespace="serving", scalerMetadata={"model": MODEL})
        async with self._channel(f"127.0.0.1:{self.keda_port}") as channel:
            stub = ExternalScalerStub(channel)
            try:
                metrics = await stub.GetMetrics(GetMetricsRequest(scaledObjectRef=metadata, metricName="quire_load"))
                active = (await stub.IsActive(metadata)).result
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return None
        load = int(metrics.metricValues[0].metricValueFloat)
        assert active is (load > 0)
        return load

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(address)
        return grpc.aio.secure_channel(address, self.credentials)


@dataclass
class Stage:
    """Two routers, the first of two processes and the second with TLS for KEDA, that know where engines may be, Redis,
    and no engine.
    """

    folder: Path
    redis: RedisServer
    asked: list[Asked]
    ports: list[int]
    engines: dict[int, Engine] = field(default_factory=dict)
    stopped: list[Engine] = field(default_factory=list)

    @property
    def routers(self) -> list[Router]:
        return [each.router for each in self.asked]

    def scale(self, replicas: int) -> None:
        """As a Deployment does: starts missing engines and terminates surplus ones, busy ones first."""
        for port in self.ports:
            if len(self.engines) < replicas and port not in self.engines:
                flags = (*SMALL_POOLS, *FLOAT32, "--shutdown-timeout", "0.2")
                self.engines[port] = ForkedEngine(DEMO, self.folder, *flags, port=port)
        while len(self.engines) > replicas:
            port = max(self.engines, key=lambda each: self.engines[each].metric("quire_engine_running_sequences"))
            engine = self.engines.pop(port)
            engine.signal(signal.SIGTERM)
            self.stopped.append(engine)

    async def running(self) -> int:
        """How many engines there should be now."""
        return len(self.engines)

    async def known(self) -> list[float]:
        """How many of them each router can give requests to."""
        return [router.metric("quire_engines_ready", model=MODEL) for router in self.routers]

    async def follow(self, hpa: Hpa) -> None:
        """Does what the autoscaler says, again and again."""
        while True:
            load = await self.asked[0].external()
            self.scale(hpa.desired(len(self.engines), load, time.monotonic()))
            await asyncio.sleep(TICK)

    async def agree(self, load: int | None) -> None:
        """Waits until every running router publishes this load to both autoscalers."""
        there = [each for each in self.asked if each.router.popen.poll() is None]
        for read in (read for each in there for read in (each.external, each.keda)):
            await comes(read, load)


async def comes(read: Callable[[], Any], wanted: object) -> None:
    seen: object = None
    try:
        async with asyncio.timeout(90):
            while (seen := await read()) != wanted:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{wanted} was wanted, and {seen} seen last")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """For all tests: the last one leaves a dead router behind."""
    warm_up()
    folder = tmp_path_factory.mktemp("autoscaling")
    cluster, ports = Cluster(folder), [free_port(), free_port()]
    proxy = cluster.proxy()
    with redis_server() as redis, ExitStack() as ending:
        asked = []
        for workers, credentials in (("2", None), ("1", cluster.keda())):
            scaling, keda = free_port(), free_port()
            flags = (*cluster.flags(scaling), "--keda-port", str(keda), "--redis-url", redis.url)
            flags += () if credentials is None else cluster.keda_flags()
            flags = (*flags, "--workers", workers, "--hold-timeout", str(PATIENCE), "--shutdown-timeout", "0.2")
            router = ForkedRouter(DEMO, [f"127.0.0.1:{port}" for port in ports], folder, *flags)
            ending.callback(lambda router=router: router.popen.poll() is None and router.stop())
            asked.append(Asked(router, proxy, scaling, keda, credentials))
        for each in asked:
            eventually(partial(is_up, each.router), 60, each.router.text)
        warm_up(wait=True)
        stage = Stage(folder, redis, asked, ports)
        ending.callback(lambda: [engine.kill() for engine in (*stage.engines.values(), *stage.stopped)])
        yield stage


def is_up(router: Router) -> bool:
    """It is not healthy without an engine, but there; with workers, one of them."""
    return fetch(router.http_port, "/health")[0] == 503


async def complete(router: Router, tokens: int, started: asyncio.Event | None = None) -> tuple[str, str]:
    """A streamed response: its text and finish reason. ``started`` is set at its first event."""
    text, reason = "", ""
    plain = httpx.AsyncClient(verify=False)  # it is http, and to read who vouches for https takes long
    terms = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, "http_client": plain}
    async with AsyncOpenAI(base_url=f"{router.url}/v1", **terms) as client:
        answer = await client.completions.create(
            model=MODEL, prompt="Once", max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in answer:
            if started is not None:
                started.set()
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def test_engines_follow_the_load_from_zero_and_back_and_no_answer_is_lost(stage: Stage) -> None:
    await stage.agree(0)
    waiting = [asyncio.create_task(complete(stage.routers[number % 2], 8)) for number in range(HELD)]
    await stage.agree(HELD)
    assert [router.metric("quire_load", model=MODEL) for router in stage.routers] == [HELD / 2, HELD / 2]
    assert not stage.engines

    hpa = Hpa(target=HELD / 2, minimum=0, maximum=2, down_window=TICK)
    following = asyncio.create_task(stage.follow(hpa))
    following.add_done_callback(lambda done: done.cancelled() or done.result())  # what it raises is in the log
    await comes(stage.running, 2)
    hpa.minimum = 2
    answers = await asyncio.gather(*waiting)
    assert {reason for _, reason in answers} == {"length"}
    assert len({text for text, _ in answers}) == 1

    # One engine has capacity for all that is left, and the one that is terminated is in the middle of a response.
    await comes(stage.known, [2, 2])
    started = asyncio.Event()
    streams = [asyncio.create_task(complete(stage.routers[number % 2], 1900, started)) for number in range(LONG)]
    await started.wait()
    hpa.minimum = 0
    await comes(stage.running, 1)
    assert not any(stream.done() for stream in streams)
    long = await asyncio.gather(*streams)
    assert {reason for _, reason in long} == {"length"}
    (text,) = {text for text, _ in long}
    assert text.startswith(answers[0][0])

    await comes(stage.running, 0)
    following.cancel()
    await stage.agree(0)
    codes = [await asyncio.to_thread(engine.wait) for engine in stage.stopped]
    assert len(codes) >= 2  # more where a slow machine makes the load rise and fall once more
    assert set(codes) == {0}


async def test_a_dead_routers_load_expires_and_without_redis_the_load_is_unknown(stage: Stage) -> None:
    await stage.agree(0)
    waiting = [asyncio.create_task(complete(router, 8)) for router in stage.routers]
    await stage.agree(2)
    stage.routers[1].kill()
    await stage.agree(1)
    stage.redis.kill()
    await stage.agree(None)
    assert stage.routers[0].metric("quire_load", model=MODEL) == 1, "its own part is still published"
    stage.redis.start()
    await stage.agree(1)
    assert not waiting[0].done()
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await stage.agree(0)
