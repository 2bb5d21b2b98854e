"""Routers that were told to stop say so to whoever looks, and take new requests until everybody had time to look. (Of
engines: ``tests/unit/engine/server/test_drain.py``.)
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.bench.router_stage import SteadyEngineProcess, body
from tests.service.conftest import DEMO
from tests.support.forked_engines import ForkedRouter
from tests.support.processes import Process, Router, eventually, fetch

LONG = ("--shutdown-delay", "600")  # a second signal ends it
PROBES = ("/started", "/ready", "/live")


def probes(port: int) -> list[int]:
    return [fetch(port, path)[0] for path in PROBES]


@contextmanager
def killed(process: Process) -> Iterator[None]:
    """Ends it, also where it would take its time."""
    try:
        yield
    finally:
        process.kill()


def complete(router: Router) -> tuple[int, str | None]:
    """How many tokens a new request is answered with, and what is said of the connection."""
    connection = HTTPConnection("127.0.0.1", router.http_port, timeout=30)
    data = body(3, stream=False).partition(b"\r\n\r\n")[2]
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    answer = connection.getresponse()
    tokens = int(json.load(answer)["usage"]["completion_tokens"])
    connection.close()
    return tokens, answer.headers["connection"]


def test_a_router_in_its_shutdown_delay_still_serves_and_is_not_ready(tmp_path: Path) -> None:
    engine = SteadyEngineProcess(tmp_path, 0.002)
    with killed(engine):
        router = ForkedRouter(DEMO, [f"127.0.0.1:{engine.port}"], tmp_path, *LONG)
        with killed(router):
            router.wait_ready()
            assert probes(router.metrics_port) == [200, 200, 200]
            assert complete(router) == (3, None)
            router.signal(signal.SIGTERM)
            eventually(lambda: probes(router.metrics_port) == [200, 503, 200])
            assert fetch(router.http_port, "/health")[0] == 503
            assert complete(router) == (3, "close")
            assert "shutting down: new requests are accepted for 600 more seconds" in router.text
            assert "stopping:" not in router.text
            assert router.stop() == 0, router.text


def test_a_router_without_an_engine_is_ready_because_it_holds_requests_for_one(tmp_path: Path) -> None:
    router = ForkedRouter(DEMO, [], tmp_path, "--shutdown-delay", "0.2")
    eventually(lambda: probes(router.metrics_port) == [200, 200, 200], 60, router.text)
    assert fetch(router.metrics_port, "/health")[0] == 503
    assert router.stop() == 0
    said = [word for line in router.text.splitlines() for word in ("shutting down:", "stopping:") if word in line]
    assert said == ["shutting down:", "stopping:"]
