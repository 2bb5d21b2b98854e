"""Two real servers of vLLM, on the CPU, behind a router: one is killed in the middle of an answer, and its client sees
a pause. What the stand-in of the other tests says is what these say. Skipped where ``make peers`` has not installed
vLLM.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.service.test_other_engines import Service, ready, serving
from tests.support.forked_engines import ForkedEngine
from tests.support.ports import free_port
from tests.support.processes import Process, eventually, metric, wait_healthy
from tests.support.vllm_contract import MODEL, ROOT, ask_about, ask_all, recorded, shapes

PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
STORY = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
LONG_STORY = {**STORY, "max_tokens": 1800}  # of which a server has not written the end when it is killed

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make peers")


class VllmProcess(Process):
    """A server of vLLM with the demo model in float32, and small pools."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = f"vllm+{self.url}"
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO)]
        command += ["--served-model-name", "m", MODEL, "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--block-size", "32"]
        self.kv_events_port, self.kv_events_replay_port = free_port(), free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.kv_events_port}",
            "replay_endpoint": f"tcp://*:{self.kv_events_replay_port}",
        }
        command += ["--kv-events-config", json.dumps(events)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(folder / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(command, folder / f"vllm-{self.port}.log", environment)

    def wait_ready(self) -> "VllmProcess":
        wait_healthy(self, self.port)
        return self

    def kill(self) -> None:
        """With the processes of its engine."""
        os.killpg(self.popen.pid, signal.SIGKILL)
        super().kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmProcess]]:
    """Two, each of which a test may kill."""
    folder = tmp_path_factory.mktemp("vllm")
    started = [VllmProcess(folder) for _ in range(2)]
    try:
        yield [server.wait_ready() for server in started]
    finally:
        for server in started:
            if server.popen.poll() is None:
                server.kill()


async def test_a_real_server_answers_as_was_recorded(servers: list[VllmProcess]) -> None:
    real, then = await ask_all(servers[0].url), recorded()
    for name, answer in real.items():
        assert answer["status"] == then["answers"][name]["status"], name
        assert shapes(answer) == shapes(then["answers"][name]), name
    about = await ask_about(servers[0].url)
    assert shapes({**about, "/metrics": []}) == shapes({**then["about"], "/metrics": []})
    names, recorded_names = (
        {line.split("{")[0].split()[0] for line in each["/metrics"]} for each in (about, then["about"])
    )
    assert recorded_names <= names


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": 3},
        {"stop": ["fox", "bear", "green"]},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 30},
        {"stop_token_ids": [289, 345]},
        {"n": 2},
        {"structured_outputs": {"choice": ["a fox", "a bear"]}},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_an_engine_of_quire(
    body: dict[str, Any], quire_alone: Service, vllm_alone: Service
) -> None:
    request = {"prompt": "Once upon a time", "max_tokens": 40, **body}
    expected, answer = (service.complete(**request) for service in (quire_alone, vllm_alone))
    assert answer["choices"] == nearly(expected["choices"])
    assert {**answer["usage"], "prompt_tokens_details": None} == {**expected["usage"], "prompt_tokens_details": None}


@pytest.fixture(scope="module")
def quire_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("quire")
    engine = ForkedEngine(DEMO, folder, *SMALL_POOLS, *FLOAT32, name="m")
    with serving(folder, engine) as service:
        ready(service, 1)
        yield service


@pytest.fixture(scope="module")
def vllm_alone(servers: list[VllmProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("router"), servers[0], ends_servers=False) as service:
        ready(service, 1)
        yield service


def nearly(value: Any) -> Any:
    """What equals the same with log-probabilities that two programs agree in."""
    if isinstance(value, float):
        return pytest.approx(value, rel=0, abs=1e-3)
    if isinstance(value, dict):
        return {key: nearly(inner) for key, inner in value.items()}
    return [nearly(inner) for inner in value] if isinstance(value, list) else value


def test_an_object_of_json_is_one(vllm_alone: Service) -> None:
    text = vllm_alone.complete(prompt="Once", response_format={"type": "json_object"}, max_tokens=12)["choices"][0]
    assert text["text"].startswith("{")


def test_a_seed_draws_the_same_again(vllm_alone: Service) -> None:
    draws = [vllm_alone.complete(**STORY, temperature=1.0, seed=7)["choices"][0]["text"] for _ in range(2)]
    assert draws[0] == draws[1]
    assert vllm_alone.complete(**STORY, temperature=1.0, seed=8)["choices"][0]["text"] != draws[0]


def test_a_prefix_that_was_sent_there_is_cached_there(servers: list[VllmProcess], vllm_alone: Service) -> None:
    """What the router expects to be cached at the server is what the server finds."""
    before = hits(servers[0])
    prompt = list(range(100, 400))
    for _ in range(2):
        with vllm_alone.post({"prompt": prompt, "max_tokens": 1}) as answer:
            route = answer.headers["x-quire-route"]
            answer.read()
    assert "cached=288" in route
    assert hits(servers[0]) - before == 288


def test_a_prefix_that_others_sent_there_is_found_by_its_kv_events(servers: list[VllmProcess], tmp_path: Path) -> None:
    """A router that starts later, and reads what the server reports, knows what a client of the server had computed."""
    prompt = list(range(500, 800))
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{servers[0].url}/v1/completions", body, headers), timeout=60) as answer:
        assert answer.status == 200
    flags = ["--engine-kv-events-port", str(servers[0].kv_events_port)]
    flags += ["--engine-kv-events-replay-port", str(servers[0].kv_events_replay_port)]
    with serving(tmp_path, servers[0], ends_servers=False, flags=flags) as service:
        ready(service, 1)
        eventually(lambda: service.router.metric("quire_index_blocks") >= 9)
        with service.post({"prompt": prompt, "max_tokens": 1}) as answer:
            assert "cached=288" in answer.headers["x-quire-route"]
            answer.read()


def hits(server: VllmProcess) -> float:
    return metric(server.port, "vllm:prefix_cache_hits_total")


def test_a_client_that_leaves_ends_its_request_at_the_server(servers: list[VllmProcess], vllm_alone: Service) -> None:
    with vllm_alone.post({**STORY, "max_tokens": 1500, "stream": True}) as answer:
        next(answer)
    eventually(lambda: metric(servers[0].port, "vllm:num_requests_running") == 0)


# The tests below kill a server each.


def test_a_client_sees_a_pause_when_its_server_is_killed(servers: list[VllmProcess], tmp_path: Path) -> None:
    with serving(tmp_path, *servers, ends_servers=False) as service:
        ready(service, 2)
        undisturbed = service.stream(**LONG_STORY)
        began = monotonic()
        assert service.stream(kill_after=20, **LONG_STORY) == undisturbed
        print(f"the stream took {monotonic() - began:.1f} s", file=sys.stderr)
        ready(service, 1)
        assert service.router.metric("quire_attempts_lost_total", reason="engine_lost") >= 1


def test_an_engine_of_quire_goes_on_where_a_server_of_vllm_was(servers: list[VllmProcess], tmp_path: Path) -> None:
    left = next(server for server in servers if server.popen.poll() is None)
    own = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, *FLOAT32, name="m")
    try:
        own.wait_ready()
        own.popen.send_signal(signal.SIGSTOP)  # the stream begins at the other, and this one is there soon enough
        with serving(tmp_path, left, own, ends_servers=False) as service:
            ready(service, 1)
            undisturbed = service.stream(**LONG_STORY)

            def resume() -> None:
                own.popen.send_signal(signal.SIGCONT)
                ready(service, 2)

            assert service.stream(kill_after=20, before=resume, **LONG_STORY) == undisturbed
            assert service.router.metric("quire_attempts_lost_total", reason="engine_lost") == 1
    finally:
        own.kill()
