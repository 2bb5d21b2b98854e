"""How soon a router sees that an engine of a Service came or leaves, and what 1,000 endpoints cost in quiet.

``python -m tests.bench.discovery`` prints milliseconds from the API server's word to the fleet's view, and the part of
a core that discovery takes in ``--seconds`` of quiet, with the watches and bookmarks that there are in a cluster. The
API server is the tests' own, for the second in a process of its own; the kubelet's and the controllers' time comes on
top.
"""

import argparse
import asyncio
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import uvloop
from quire_router.clients.kube_client import KubeAccess
from quire_router.discovery.base import KubernetesService
from quire_router.discovery.kubernetes import KubernetesDiscovery, WatchSettings
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings

from tests.support.kube_api import Json, KubeApiServer, endpoint, kube_api, slice_of
from tests.support.scripted_engine import ScriptedEngine

ROUNDS = 20
SLICES, ENDPOINTS = 10, 100
BOOKMARKS = 60.0  # seconds between two


async def delays(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each round."""
    engine = ScriptedEngine()
    host, _, port = (await engine.start()).rpartition(":")
    times: dict[str, list[float]] = {"new and ready": [], "terminating": [], "known, and becomes ready": []}
    async with kube_api() as server:
        service = KubernetesService(None, "engines", int(port))
        fleet = EnginePool(
            KubernetesDiscovery(service, KubeAccess(server.kubeconfig(folder))), ["m"], ConnectionSettings()
        )
        await fleet.start()
        await until(lambda: server.watching > 0)
        for _ in range(ROUNDS):
            server.put(slice_of("a", [endpoint(host, ready=True)]))
            times["new and ready"].append(await until(lambda: fleet.ready("m") == 1))
            server.put(slice_of("a", [endpoint(host, ready=False, terminating=True)]))
            times["terminating"].append(await until(lambda: fleet.ready("m") == 0))
            server.delete("a")
            await until(lambda: not list(fleet.table))
            await engine.stop()
            server.put(slice_of("a", [endpoint(host, ready=False)]))
            await asyncio.sleep(2.0)  # its tries to connect are far apart by now
            await engine.start()
            server.put(slice_of("a", [endpoint(host, ready=True)]))
            times["known, and becomes ready"].append(await until(lambda: fleet.ready("m") == 1))
            server.delete("a")
            await until(lambda: not list(fleet.table))
        await fleet.close()
    await engine.stop()
    return times


async def until(condition: Callable[[], bool]) -> float:
    """Milliseconds until it holds."""
    began = perf_counter()
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.0005)
    return (perf_counter() - began) * 1000


def slices(busy: int = 0) -> list[Json]:
    """1,000 engines; ``busy`` is the number of the change that one of them went through."""
    return [
        slice_of(
            f"engines-{one}", [told(one, other, ready=(one or other or busy % 2 == 0)) for other in range(ENDPOINTS)]
        )
        for one in range(SLICES)
    ]


def told(one: int, other: int, *, ready: object) -> Json:
    """An endpoint with all that a cluster writes there."""
    entry = endpoint(f"10.1.{one}.{other}", zone="eu-1a", ready=bool(ready), serving=bool(ready), terminating=False)
    name = f"quire-engine-llama-6f7d8b9c5-{one:02}{other:02}"
    reference = {
        "kind": "Pod",
        "namespace": "default",
        "name": name,
        "uid": f"00000000-0000-0000-0000-{one:06}{other:06}",
    }
    return {**entry, "nodeName": f"node-{other}", "targetRef": reference}


def serve(control: Connection, folder: str) -> None:
    """The API server's process. Each word that comes is a change; an empty one is the end."""
    uvloop.run(_serve(control, Path(folder)))


async def _serve(control: Connection, folder: Path) -> None:
    async with kube_api() as server:
        for item in slices():
            server.put(item)
        control.send(server.kubeconfig(folder))
        bookmarks = asyncio.create_task(_bookmarks(server))
        while (number := await asyncio.to_thread(control.recv)) is not None:
            server.put(slices(number)[0])
        bookmarks.cancel()


async def _bookmarks(server: KubeApiServer) -> None:
    while True:
        await asyncio.sleep(BOOKMARKS)
        server.bookmark()


async def cost(control: Connection, kubeconfig: str, seconds: float) -> tuple[float, float, float]:
    """Milliseconds of CPU of the first list and of a change, and the part of a core while nothing happens."""
    discovery = KubernetesDiscovery(KubernetesService(None, "engines"), KubeAccess(kubeconfig), WatchSettings())
    views = discovery.watch()
    began = process_time()
    assert len(await anext(views)) == SLICES * ENDPOINTS
    listed = (process_time() - began) * 1000
    changes = []
    for number in range(1, 1 + ROUNDS):
        began = process_time()
        control.send(number)
        await anext(views)
        changes.append((process_time() - began) * 1000)
    quiet = asyncio.ensure_future(anext(views))
    began, since = process_time(), perf_counter()
    await asyncio.sleep(seconds)
    share = (process_time() - began) / (perf_counter() - since)
    quiet.cancel()
    await asyncio.wait([quiet])
    return listed, median(changes), share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of quiet")
    seconds = parser.parse_args().seconds
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of each engine that leaves
    with tempfile.TemporaryDirectory() as folder:
        for what, times in uvloop.run(delays(Path(folder))).items():
            print(f"an engine that is {what}: seen after {median(times):.1f} ms, {max(times):.1f} at most")
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, folder))
        process.start()
        listed, change, share = uvloop.run(cost(here, here.recv(), seconds))
        here.send(None)
        process.join()
    print(
        f"{SLICES * ENDPOINTS} endpoints: {listed:.0f} ms of CPU for the first list, {change:.2f} for a change of one"
    )
    print(f"{100 * share:.3f} % of a core in {seconds:.0f} s of quiet")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB at most, in all")


if __name__ == "__main__":
    main()
