"""How old the load is that autoscalers are told: the time from a request that one router gets, or loses, to the word of
another router that counts it, through Redis.

``python -m tests.bench.metric_age`` prints milliseconds, of the API that HorizontalPodAutoscalers ask, here again and
again, and of KEDA's stream, which speaks by itself. The first time includes the request's own way into the router.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import grpc
import httpx
import uvloop
from quire.keda.externalscaler_pb2 import ScaledObjectRef
from quire.keda.externalscaler_pb2_grpc import ExternalScalerStub

from tests.support.autoscalers import RESOURCE, Cluster, value
from tests.support.ports import free_port
from tests.support.processes import Router, eventually, fetch
from tests.support.redis_server import redis_server

Times = dict[str, list[float]]
API, STREAM = "external.metrics.k8s.io", "KEDA's stream"
DEMO = Path(__file__).parents[2] / "demo" / "model"
MODEL = "quire-demo"
LONGEST_PAUSE = 0.7  # seconds between two changes, so that they come at every moment of what routers do now and then
PATIENCE = 20.0
RESOLUTION = 0.005  # seconds


@contextmanager
def routers(folder: Path, cluster: Cluster) -> Iterator[tuple[Router, str, str]]:
    """A router that holds what it gets, having no engine, and where another one tells external metrics and KEDA."""
    scaling, keda = free_port(), free_port()
    with redis_server() as redis:
        held = ("--redis-url", redis.url, "--hold-timeout", "600", "--shutdown-timeout", "0.2")
        first = Router(DEMO, [], folder, *held)
        second = Router(DEMO, [], folder, *held, *cluster.flags(scaling), "--keda-port", str(keda))
        try:
            for router in (first, second):
                eventually(partial(is_up, router), 60, router.text)
            yield first, f"https://127.0.0.1:{scaling}{RESOURCE}", f"127.0.0.1:{keda}"
        finally:
            first.stop()
            second.stop()


def is_up(router: Router) -> bool:
    return fetch(router.metrics_port, "/live")[0] == 200


@asynccontextmanager
async def request(router: Router) -> AsyncIterator[None]:
    """One that the router holds, until the block ends."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=600) as client:
        waiting = asyncio.create_task(client.post(f"{router.url}/v1/completions", json=body))
        try:
            yield
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


async def measure(router: Router, resource: str, asking: httpx.AsyncClient, keda: str, rounds: int) -> Times:
    """Milliseconds of each change."""
    times: Times = {API: [], STREAM: []}
    async with grpc.aio.insecure_channel(keda) as channel:
        stream = ExternalScalerStub(channel).StreamIsActive(ScaledObjectRef(scalerMetadata={"model": MODEL}))
        await seen(asking, resource, 0)
        assert not (await stream.read()).result

        async def note(wanted: int) -> None:
            began = perf_counter()
            pushed = asyncio.create_task(since(began, stream.read()))
            times[API].append(await since(began, seen(asking, resource, wanted)))
            times[STREAM].append(await pushed)
            await asyncio.sleep(random.uniform(0, LONGEST_PAUSE))

        for _ in range(rounds):
            async with request(router):
                await note(1)
            await note(0)
    return times


async def seen(asking: httpx.AsyncClient, resource: str, wanted: int) -> None:
    """Asks until the load is this."""
    async with asyncio.timeout(PATIENCE):
        while value(await asking.get(resource)) != wanted:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(RESOLUTION)


async def since(began: float, what: object) -> float:
    """Milliseconds until it has happened."""
    await what  # type: ignore[misc]
    return (perf_counter() - began) * 1000


async def run(rounds: int, folder: Path) -> Times:
    cluster = Cluster(folder)
    with routers(folder, cluster) as (router, resource, keda):
        async with httpx.AsyncClient(verify=cluster.proxy(), timeout=10) as asking:
            return await measure(router, resource, asking, keda, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="requests, each of which comes and goes")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for who, times in uvloop.run(run(rounds, Path(folder))).items():
            p99 = quantiles(times, n=100)[-1]
            print(f"{who}: {median(times):.0f} ms, p99 {p99:.0f}, {max(times):.0f} at most, of {len(times)} changes")


if __name__ == "__main__":
    main()
