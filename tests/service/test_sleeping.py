"""Engines that sleep behind a real router: they are woken up by requests, give way to others of their device, and lose
nothing.
"""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from quire.v1 import engine_pb2 as pb
from quire.v1.engine_pb2_grpc import EngineStub

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Engine, Router, eventually, fetch

FLAGS = (*FLOAT32, *SMALL_POOLS)
SECONDS = 60


@contextmanager
def stub(engine: Engine) -> Iterator[EngineStub]:
    with grpc.insecure_channel(engine.address) as channel:
        yield EngineStub(channel)


def put_to_sleep(engine: Engine, wait_seconds: float = 0.0) -> None:
    with stub(engine) as asked:
        asked.Sleep(pb.SleepRequest(wait_seconds=wait_seconds), timeout=SECONDS)


def is_sleeping(engine: Engine) -> bool:
    with stub(engine) as asked:
        return bool(asked.IsSleeping(pb.IsSleepingRequest(), timeout=SECONDS).is_sleeping)


def post(router: Router, max_tokens: int, model: str) -> urllib.request.Request:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    return urllib.request.Request(f"{router.url}/v1/completions", data, {"content-type": "application/json"})


def complete(router: Router, max_tokens: int = 24, model: str = "quire-demo") -> str:
    with urllib.request.urlopen(post(router, max_tokens, model), timeout=SECONDS) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def sleeping(router: Router, model: str = "quire-demo") -> int:
    return int(router.metric("quire_engines_sleeping", model=model))


@pytest.fixture(scope="module")
def started_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    started: list[Engine] = [ForkedEngine(DEMO, folder, *FLAGS) for _ in range(2)]
    try:
        yield [engine.wait_ready() for engine in started]
    finally:
        for engine in started:
            engine.kill()


@pytest.fixture
def engines(started_engines: list[Engine]) -> list[Engine]:
    """Both awake: the test before may have left either of them asleep."""
    for engine in started_engines:
        if is_sleeping(engine):
            with stub(engine) as asked:
                asked.WakeUp(pb.WakeUpRequest(), timeout=SECONDS)
    return started_engines


@contextmanager
def routing(folder: Path, engines: list[Engine], *flags: str) -> Iterator[Router]:
    router = ForkedRouter(DEMO, [engine.address for engine in engines], folder, "--hold-timeout", "30", *flags)
    try:
        yield router.wait_ready()
    finally:
        router.stop()


def test_a_request_wakes_the_only_engine_and_is_answered_as_before(engines: list[Engine], tmp_path: Path) -> None:
    engine = engines[0]
    with routing(tmp_path, [engine]) as router:
        expected = complete(router)
        put_to_sleep(engine)
        eventually(lambda: sleeping(router) == 1)
        assert router.metric("quire_engines_ready", model="quire-demo") == 0
        assert fetch(router.http_port, "/health")[0] == 200  # a request would be served
        assert engine.metric("quire_engine_sleeping", model="quire-demo") == 1
        assert complete(router) == expected
        assert not is_sleeping(engine)
        assert engine.metric("quire_engine_wake_ups_total", model="quire-demo") >= 1
        eventually(lambda: sleeping(router) == 0)


def test_an_engine_that_sleeps_is_let_sleep_while_another_serves(engines: list[Engine], tmp_path: Path) -> None:
    with routing(tmp_path, engines) as router:
        eventually(lambda: router.metric("quire_engines_ready", model="quire-demo") == 2)
        expected = complete(router)
        put_to_sleep(engines[0])
        eventually(lambda: sleeping(router) == 1)
        assert [complete(router) for _ in range(5)] == [expected] * 5
        assert is_sleeping(engines[0])
        with stub(engines[0]) as asked:
            asked.WakeUp(pb.WakeUpRequest(), timeout=SECONDS)
        eventually(lambda: sleeping(router) == 0)


def test_sleep_waits_for_what_runs_and_what_comes_meanwhile_is_answered_too(
    engines: list[Engine], tmp_path: Path
) -> None:
    engine = engines[0]
    with routing(tmp_path, [engine]) as router, ThreadPoolExecutor() as threads:
        expected, short = complete(router, 1200), complete(router)
        running = threads.submit(complete, router, 1200)  # more than a second
        eventually(lambda: engine.metric("quire_engine_running_sequences", model="quire-demo") > 0)
        with pytest.raises(grpc.RpcError) as refused:
            put_to_sleep(engine)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        falling_asleep = threads.submit(put_to_sleep, engine, 30.0)
        eventually(lambda: sleeping(router) == 1)
        later = threads.submit(complete, router)  # it waits, and wakes the engine when that sleeps
        falling_asleep.result(SECONDS)
        assert running.result(SECONDS) == expected
        assert later.result(SECONDS) == short


def test_engines_that_were_idle_go_to_sleep_but_one(engines: list[Engine], tmp_path: Path) -> None:
    with routing(tmp_path, engines, "--sleep-after", "0.5", "--min-awake", "1") as router:
        eventually(lambda: sleeping(router) == 1, SECONDS)
        expected = complete(router)
        assert sorted(map(is_sleeping, engines)) == [False, True]
        eventually(lambda: sleeping(router) == 1, SECONDS)
    with routing(tmp_path, engines, "--sleep-after", "0.5", "--min-awake", "0") as router:
        eventually(lambda: sleeping(router) == 2, SECONDS)
        assert complete(router) == expected


def test_an_engine_that_is_killed_in_its_sleep_is_no_engine_any_more(engines: list[Engine], tmp_path: Path) -> None:
    mortal = ForkedEngine(DEMO, tmp_path, *FLAGS)
    try:
        with routing(tmp_path, [mortal.wait_ready()]) as router:
            expected = complete(router)
            put_to_sleep(mortal)
            eventually(lambda: sleeping(router) == 1)
            mortal.kill()
            eventually(lambda: sleeping(router) == 0)
        with routing(tmp_path, [engines[0], mortal]) as router:
            assert complete(router) == expected
        with router_without_engines(tmp_path, mortal) as router, pytest.raises(urllib.error.HTTPError) as refused:
            complete(router)
        assert refused.value.code == 503
    finally:
        mortal.kill()


def test_a_sleeper_that_is_frozen_does_not_keep_the_other_asleep(engines: list[Engine], tmp_path: Path) -> None:
    frozen = min(engines, key=lambda engine: engine.address)  # which would be woken up
    with routing(tmp_path, engines) as router:
        eventually(lambda: router.metric("quire_engines_ready", model="quire-demo") == 2)
        expected = complete(router)
        for engine in engines:
            put_to_sleep(engine)
        eventually(lambda: sleeping(router) == 2)
        frozen.signal(signal.SIGSTOP)
        try:
            assert complete(router) == expected
        finally:
            frozen.signal(signal.SIGCONT)


@contextmanager
def router_without_engines(folder: Path, engine: Engine) -> Iterator[Router]:
    """A router whose only engine is gone: it is not healthy, and holds requests for a moment."""
    router = ForkedRouter(DEMO, [engine.address], folder, "--hold-timeout", "0.5")
    try:
        eventually(lambda: "REST on" in router.text, SECONDS)
        yield router
    finally:
        router.stop()


def test_two_models_have_one_device_in_turns(tmp_path: Path) -> None:
    shared = (*FLAGS, "--shared-device", "gpu-0")
    first = ForkedEngine(DEMO, tmp_path, *shared, name="first").wait_ready()
    second = None
    try:
        put_to_sleep(first)
        second = ForkedEngine(DEMO, tmp_path, *shared, name="second").wait_ready()
        router = ForkedRouter(
            DEMO,
            [first.address, second.address],
            tmp_path,
            *("--model", f"second={DEMO}", "--hold-timeout", "30"),
            name="first",
        )
        try:
            router.wait_ready()
            expected = complete(router, model="second")
            for model, awake, asleep in (("first", first, second), ("second", second, first)):
                assert complete(router, model=model) == expected
                assert not is_sleeping(awake)
                assert is_sleeping(asleep)
        finally:
            router.stop()
    finally:
        first.kill()
        if second is not None:
            second.kill()
