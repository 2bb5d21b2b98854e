"""Many engines that come, go and come back at once, before routers that start together. The engines have no model."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bench.scale_engines import CACHED, Engines, engines
from tests.bench.steady_engine import MODEL
from tests.service.conftest import DEMO
from tests.support.ports import free_port
from tests.support.processes import Router, eventually
from tests.support.redis_server import redis_server

COUNT = 40
READY = "quire_engines_ready"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Engines]:
    with engines(COUNT, free_port(), processes=1) as fleet:
        yield fleet


def router_of(fleet: Engines, folder: Path, stack: ExitStack, *flags: str) -> Router:
    router = Router(DEMO, [f"{host}:{fleet.port}" for host in fleet.addresses], folder, *flags)
    stack.callback(lambda: router.popen.poll() is None and router.stop())
    return router


def complete(router: Router, number: int) -> str:
    body = {"model": MODEL, "prompt": [100 + number, 7, 8], "max_tokens": 3, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{router.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["finish_reason"])


def test_all_engines_are_killed_and_come_back_at_once(fleet: Engines, tmp_path: Path) -> None:
    with ExitStack() as stack:
        router = router_of(fleet, tmp_path, stack)
        eventually(lambda: router.metric(READY) == COUNT, 60, "not all engines were seen")
        fleet.set_pace(50.0)
        assert fleet.take_opened().sessions == COUNT
        assert complete(router, 1) == "length"
        fleet.stop()
        eventually(lambda: router.metric(READY) == 0, 60, "engines that are gone count as ready")
        finished: list[str] = []
        held = threading.Thread(target=lambda: finished.append(complete(router, 2)))
        held.start()
        fleet.start()
        eventually(lambda: router.metric(READY) == COUNT, 60, "not all engines came back")
        held.join()
        assert finished == ["length"]
        assert fleet.take_opened().sessions == COUNT
        assert router.metric("quire_router_task_restarts_total") == 0
        assert "ERROR" not in router.text


def test_routers_that_start_together_open_one_session_each_at_every_engine(fleet: Engines, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet.take_opened()
        routers = [router_of(fleet, tmp_path, stack) for _ in range(3)]
        for router in routers:
            eventually(lambda each=router: each.metric(READY) == COUNT, 60, "not all engines were seen")
        assert fleet.take_opened().sessions == 3 * COUNT


def test_of_several_workers_one_hears_each_engine_and_all_know_of_it(fleet: Engines, tmp_path: Path) -> None:
    with redis_server() as redis, ExitStack() as stack:
        fleet.set_pace(50.0)
        router = router_of(fleet, tmp_path, stack, "--workers", "2", "--redis-url", redis.url)
        eventually(lambda: router.metric(READY) == COUNT, 60, "not all engines were seen")
        eventually(lambda: fleet.sessions() == [(1, 1)] * COUNT, 60, "an engine is not heard by one worker")
        # The metric is the sum over workers: each has all blocks, whoever hears the engine.
        blocks = 2 * COUNT * CACHED
        eventually(lambda: router.metric("quire_index_blocks") == blocks, 60, "a worker does not have all blocks")
        assert complete(router, 3) == "length"
