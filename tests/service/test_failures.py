"""Parts die while clients stream: the answer goes on, or ends with a typed error; never silently."""

import json
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import NET_NAMESPACE, ForkedEngine, ForkedRouter
from tests.support.net_namespace import net_namespace
from tests.support.processes import Engine, Process, Router, eventually, fetch
from tests.support.redis_server import RedisServer, redis_server

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 600, "temperature": 1.2, "seed": 11}
# Which an engine that was frozen could go on with for long after it has thawed.
LONGER = {**LONG, "max_tokens": 1200}
IGNORE_EOS = {"extra_body": {"ignore_eos": True}}


@dataclass
class Fleet:
    """Parts that a test may kill."""

    folder: Path
    redis: RedisServer
    engines: list[Engine]
    router: Router

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=120)

    def busy_engine(self) -> Engine:
        eventually(lambda: any(self.is_busy(engine) for engine in self.engines))
        return next(engine for engine in self.engines if self.is_busy(engine))

    @staticmethod
    def is_busy(engine: Engine) -> bool:
        return engine.metric("quire_engine_running_sequences") > 0


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """With the router's flags that a test is parametrized with."""
    flags = getattr(request, "param", ())
    with redis_server() as redis:
        engines = [ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, *FLOAT32) for _ in range(2)]
        addresses = [engine.address for engine in engines]
        router = ForkedRouter(DEMO, addresses, tmp_path, "--redis-url", redis.url, *flags)
        try:
            for process in (*engines, router):
                process.wait_ready()
            yield Fleet(tmp_path, redis, engines, router)
        finally:
            for process in (router, *engines):
                end(process)


def end(process: Process) -> None:
    if process.popen.poll() is None:
        process.stop()


def texts(stream: Iterable[Completion]) -> Iterator[str]:
    return (chunk.choices[0].text for chunk in stream if chunk.choices)


def test_an_engine_that_is_killed_changes_neither_a_token_nor_the_stop_string(fleet: Fleet) -> None:
    undisturbed = fleet.client.completions.create(**LONG, **IGNORE_EOS).choices[0].text
    stop = undisturbed[-40:-20]
    stream = fleet.client.completions.create(**LONG, **IGNORE_EOS, stop=stop, stream=True)
    seen = [next(stream) for _ in range(20)]
    fleet.busy_engine().kill()
    seen += stream
    assert "".join(texts(seen)) == undisturbed.partition(stop)[0]
    end = seen[-1].choices[0]
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)


def test_an_engine_that_freezes_changes_no_token_and_drops_what_others_go_on_with(fleet: Fleet) -> None:
    undisturbed = fleet.client.completions.create(**LONGER, **IGNORE_EOS).choices[0].text
    stream = texts(fleet.client.completions.create(**LONGER, **IGNORE_EOS, stream=True))
    seen = [next(stream) for _ in range(20)]
    frozen = fleet.busy_engine()
    made = frozen.metric("quire_engine_generation_tokens_total")
    frozen.signal(signal.SIGSTOP)
    try:
        seen += stream
    finally:
        frozen.signal(signal.SIGCONT)
    assert "".join(seen) == undisturbed
    assert fleet.router.metric("quire_attempts_lost_total", reason="engine_silent") >= 1
    eventually(lambda: fleet.router.metric("quire_engines_ready") == 2)
    eventually(lambda: not fleet.is_busy(frozen), message="it goes on with what was moved")
    assert frozen.metric("quire_engine_generation_tokens_total") < made + 1000, "it went on to the end"


def test_an_engine_whose_node_is_cut_off_changes_no_token(fleet: Fleet) -> None:
    """One of two, each with a stream."""
    undisturbed = fleet.client.completions.create(**LONG, **IGNORE_EOS).choices[0].text
    with net_namespace() as network:
        flags = (*SMALL_POOLS, *FLOAT32, "--host", network.address, "--insecure")
        far = ForkedEngine(DEMO, fleet.folder, *flags, **{NET_NAMESPACE: network.name})
        address = f"{network.address}:{far.port}"
        router = ForkedRouter(DEMO, [fleet.engines[0].address, address], fleet.folder)
        try:
            eventually(lambda: router.metric("quire_engines_ready") == 2, timeout=60)
            client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120)
            streams = [texts(client.completions.create(**LONG, **IGNORE_EOS, stream=True)) for _ in range(2)]
            seen = [[next(stream) for _ in range(20)] for stream in streams]
            network.cut_off()
            whole = ["".join([*begun, *stream]) for begun, stream in zip(seen, streams, strict=True)]
            assert whole == [undisturbed] * 2
            assert router.metric("quire_attempts_lost_total", reason="engine_silent") >= 1
            network.heal()
            eventually(lambda: router.metric("quire_engines_ready") == 2, timeout=60)
        finally:
            for process in (router, far):
                end(process)


@pytest.mark.parametrize("fleet", [("--hold-timeout", "2")], indirect=True)
def test_without_any_engine_the_end_is_a_typed_error(fleet: Fleet) -> None:
    stream = texts(fleet.client.completions.create(**LONG, **IGNORE_EOS, stream=True))
    next(stream)
    for engine in fleet.engines:
        engine.kill()
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert failed.value.body["type"] == "service_unavailable_error"
    with pytest.raises(openai.InternalServerError) as refused:
        fleet.client.completions.create(**LONG)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_engines_that_freeze_while_idle_are_not_counted_until_they_resume(fleet: Fleet) -> None:
    """Their kernels still take and acknowledge what is sent to them, so that no connection breaks by itself."""
    eventually(lambda: fleet.router.metric("quire_engines_ready") == 2)
    for engine in fleet.engines:
        engine.signal(signal.SIGSTOP)
    try:
        eventually(lambda: fetch(fleet.router.http_port, "/health")[0] == 503, timeout=40)
        eventually(lambda: fleet.router.metric("quire_engines_ready") == 0)  # which is set a moment later
    finally:
        for engine in fleet.engines:
            engine.signal(signal.SIGCONT)
    eventually(lambda: fleet.router.metric("quire_engines_ready") == 2)
    assert fleet.client.completions.create(model=MODEL, prompt="Once", max_tokens=4).usage.completion_tokens == 4


def test_redis_may_die_and_come_back(fleet: Fleet) -> None:
    stream = texts(fleet.client.completions.create(**LONG, **IGNORE_EOS, stream=True))
    seen = [next(stream) for _ in range(10)]
    fleet.redis.kill()
    seen += stream
    assert len("".join(seen)) > 500, "the running stream did not go on"
    assert fleet.client.completions.create(model=MODEL, prompt="Once", max_tokens=4).usage.completion_tokens == 4
    eventually(lambda: fleet.router.metric("quire_journal_available") == 0)
    fleet.redis.start()
    eventually(lambda: fleet.router.metric("quire_journal_available") == 1, message="the journal did not come back")


def test_a_router_that_starts_before_its_engines_waits_for_them(tmp_path: Path) -> None:
    late = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS)
    early = ForkedRouter(DEMO, [late.address], tmp_path)
    try:
        early.wait_ready()
        client = OpenAI(base_url=f"{early.url}/v1", api_key="none")
        assert client.completions.create(model=MODEL, prompt="Once", max_tokens=2).usage.completion_tokens == 2
    finally:
        end(early)
        end(late)


def test_a_stopping_router_ends_its_streams_with_a_typed_error(fleet: Fleet) -> None:
    router = ForkedRouter(
        DEMO, [engine.address for engine in fleet.engines], fleet.folder, "--shutdown-timeout", "0.5"
    ).wait_ready()
    body = json.dumps({**LONG, "stream": True, "ignore_eos": True, "max_tokens": 2000}).encode()
    request = urllib.request.Request(f"{router.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        router.popen.terminate()
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["type"] == "service_unavailable_error"
    assert router.stop() == 0
    eventually(lambda: not any(fleet.is_busy(engine) for engine in fleet.engines), message="work was left behind")
