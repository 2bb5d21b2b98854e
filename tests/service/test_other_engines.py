"""Servers that others have written behind a real router: their streams survive them, and what they cannot do runs
elsewhere. The servers are stand-ins, each a process; ``test_vllm_servers`` does the same with real ones.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from quire_proto.text.tokenizer import ModelTokenizer

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.http_engines import OpenAIEngine, continuation
from tests.support.ports import free_port
from tests.support.processes import Process, Router, eventually

TOKENIZER = ModelTokenizer.load(DEMO)
PROMPT = TOKENIZER.encode("Once upon a time there was")
PATH = "/v1/completions"


class Server(Process):
    """A stand-in, named as ``--engine`` names it."""

    def __init__(self, kind: str, folder: Path, seconds_per_token: float = 0.005) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.http_engines", kind, str(port), "m", str(seconds_per_token)]
        super().__init__(command, folder / f"{kind}-{port}.log", {})
        self.address = f"{kind}+http://127.0.0.1:{port}"


class AnyServer(Protocol):
    """What ``--engine`` names, as a process."""

    address: str
    popen: Any

    def kill(self) -> None: ...


class Service:
    """A router and its servers; each test has its own."""

    def __init__(self, router: Router, servers: dict[str, AnyServer]) -> None:
        self.router = router
        self.servers = servers

    def post(self, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": "m", "prompt": PROMPT, "temperature": 0, **body}).encode()
        request = urllib.request.Request(self.router.url + PATH, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, **body: Any) -> dict[str, Any]:
        with self.post(body) as answer:
            whole: dict[str, Any] = json.load(answer)
            return whole

    def refusal(self, **body: Any) -> tuple[int, dict[str, Any]]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(body)
        return refused.value.code, json.load(refused.value)["error"]

    def stream(self, kill_after: int = 0, before: Callable[[], None] = lambda: None, **body: Any) -> list[str]:
        """The texts of a stream's choices. After so many events the server that it runs on is killed, once ``before``
        has returned.
        """
        texts, events = [""] * body.get("n", 1), 0
        with self.post({"stream": True, **body}) as answer:
            server = self.servers[answer.headers["x-quire-route"].partition(";")[0]]
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                    events += 1
                    if events == kill_after:
                        before()
                        server.kill()
        return texts


@contextmanager
def serving(
    folder: Path, *servers: AnyServer, ends_servers: bool = True, flags: Sequence[str] = ()
) -> Iterator[Service]:
    """A router with these ``flags`` in front of servers, which end with it if ``ends_servers``."""
    router = ForkedRouter(DEMO, [server.address for server in servers], folder, "--debug-route", *flags, name="m")
    try:
        router.wait_ready()
        yield Service(router, {server.address: server for server in servers})
        assert router.stop() == 0, router.text
    finally:
        for process in (router, *servers) if ends_servers else (router,):
            if process.popen.poll() is None:
                process.kill()


def ready(service: Service, count: int) -> None:
    eventually(lambda: service.router.metric("quire_engines_ready") == count)


def text_of(count: int) -> str:
    return TOKENIZER.decode(continuation(PROMPT, count))


@pytest.mark.parametrize("kinds", [("vllm", "vllm"), ("vllm", "sglang")])
def test_a_stream_goes_on_at_another_server_when_its_own_is_killed(kinds: tuple[str, str], tmp_path: Path) -> None:
    with serving(tmp_path, *(Server(kind, tmp_path) for kind in kinds)) as service:
        ready(service, 2)
        assert service.stream(kill_after=10, max_tokens=60) == [text_of(60)]
        ready(service, 1)
        assert service.stream(max_tokens=20, n=2) == [text_of(20)] * 2


def test_a_stream_of_text_goes_on_behind_the_text_that_was_delivered(tmp_path: Path) -> None:
    with serving(tmp_path, Server("openai", tmp_path), Server("openai", tmp_path)) as service:
        ready(service, 2)
        text = TOKENIZER.decode(OpenAIEngine().continuation(PROMPT, 40))
        assert service.stream(kill_after=10, max_tokens=40) == [text]


def test_choices_go_on_each_where_it_was(tmp_path: Path) -> None:
    with serving(tmp_path, Server("vllm", tmp_path), Server("vllm", tmp_path)) as service:
        ready(service, 2)
        assert service.stream(kill_after=11, max_tokens=30, n=3) == [text_of(30)] * 3


def test_what_such_servers_cannot_do_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, Server("vllm", tmp_path), Server("sglang", tmp_path)) as service:
        ready(service, 2)
        status, error = service.refusal(beam_width=2, n=2)
        assert (status, error["param"]) == (400, "beam_width")
        assert "need an engine of Quire" in error["message"]


def test_a_structured_output_that_was_begun_ends_with_an_error_that_says_why(tmp_path: Path) -> None:
    """What the stand-in writes is no such output: it is enough that it would be one."""
    body = {"stream": True, "structured_outputs": {"regex": "[a-z]+"}, "max_tokens": 1000}
    with serving(tmp_path, Server("vllm", tmp_path), Server("vllm", tmp_path)) as service:
        ready(service, 2)
        with service.post(body) as answer:
            server = service.servers[answer.headers["x-quire-route"].partition(";")[0]]
            answer.readline()
            server.kill()
            events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: {")]
        assert "cannot go on in the middle" in events[-1]["error"]["message"]
        assert events[-1]["error"]["resumable"]


def test_prompts_go_where_they_went_before(tmp_path: Path) -> None:
    with serving(tmp_path, Server("vllm", tmp_path, 0.0), Server("vllm", tmp_path, 0.0)) as service:
        ready(service, 2)
        prompts = [[100 + number] * 200 for number in range(6)]
        routes = []
        for _ in range(2):
            for prompt in prompts:
                with service.post({"prompt": prompt, "max_tokens": 2}) as answer:
                    routes.append(answer.headers["x-quire-route"])
        first, again = routes[:6], routes[6:]
        assert [route.partition(";")[0] for route in first] == [route.partition(";")[0] for route in again]
        assert all("cached=192" in route for route in again)


def test_a_fleet_may_have_engines_of_quire_too_and_what_only_they_can_do_runs_there(tmp_path: Path) -> None:
    own = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, *FLOAT32, name="m")
    with serving(tmp_path, Server("vllm", tmp_path), own) as service:
        ready(service, 2)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: service.complete(use_beam_search=True, n=2, max_tokens=8), range(4)))
        assert len({json.dumps([choice["text"] for choice in answer["choices"]]) for answer in answers}) == 1
        assert service.router.metric("quire_attempts_lost_total", reason="engine_lost") == 0
