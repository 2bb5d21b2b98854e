"""Several router processes on one port: they share the work, are started again, end with their supervisor, and are told
of together.
"""

import json
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.bench.router_stage import SteadyEngineProcess, body
from tests.service.conftest import DEMO, MODEL
from tests.support.ports import free_port
from tests.support.processes import Process, Router, eventually, fetch
from tests.support.redis_server import redis_server

WORKERS = 2


@contextmanager
def workers(folder: Path, *more: str) -> Iterator[Router]:
    """A router of two workers that are ready, before a steady engine."""
    with redis_server() as redis, ExitStack() as ending:
        engine = SteadyEngineProcess(folder, 0.002)
        ending.callback(engine.kill)
        flags = (
            "--workers",
            str(WORKERS),
            "--redis-url",
            redis.url,
            "--shutdown-timeout",
            "1",
            "--host",
            "0.0.0.0",
            *more,
        )
        router = Router(DEMO, [f"127.0.0.1:{engine.port}"], folder, *flags)
        ending.callback(lambda: router.popen.poll() is None and router.stop())
        router.wait_ready()
        eventually(lambda: both_serve(router), 60, "one of the workers does not serve")
        yield router


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with workers(tmp_path_factory.mktemp("workers")) as router:
        yield router


def processes(router: Router) -> list[psutil.Process]:
    return [each for each in psutil.Process(router.popen.pid).children() if each.status() != psutil.STATUS_ZOMBIE]


def connections(worker: psutil.Process, port: int) -> int:
    try:
        found = worker.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return 0
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)


def both_serve(router: Router) -> bool:
    """Whether the kernel gives connections to each of them: of 64, none gets no one by chance."""
    found = processes(router)
    with ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(socket.create_connection(("127.0.0.1", router.http_port)))
        return len(found) == WORKERS and all(connections(each, router.http_port) for each in found)


def complete(router: Router, tokens: int = 3) -> int:
    """How many tokens the answer to a new request on a new connection has."""
    data = body(tokens, stream=False).partition(b"\r\n\r\n")[2]
    url = f"{router.url}/v1/completions"
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def run(folder: Path, *flags: str) -> tuple[int, list[str]]:
    """The exit status of a router that cannot start, and what it says."""
    command = [sys.executable, "-m", "quire_router.main", "--model", f"{MODEL}={DEMO}", *flags]
    process = Process(command, folder / "refused.log")
    status = process.wait()
    return status, process.text.splitlines()


def test_a_log_line_names_its_worker(router: Router) -> None:
    lines = [line for line in router.text.splitlines() if "REST on" in line]
    spoken = [found[1] for line in lines if (found := re.search(r"\[worker (\d)\]", line))]
    assert sorted(spoken) == [str(number) for number in range(1, WORKERS + 1)]
    assert [", metrics on " in line for line in lines] == ["[worker" not in line for line in lines]


def test_missing_api_keys_are_warned_of_once(router: Router) -> None:
    (warning,) = [line for line in router.text.splitlines() if "no API key is configured" in line]
    assert "[worker" not in warning


def test_metrics_are_those_of_all_workers(router: Router) -> None:
    before = router.metric("quire_requests_total", model=MODEL)
    tokens = router.metric("quire_generation_tokens_total", model=MODEL)
    assert [complete(router) for _ in range(24)] == [3] * 24
    assert router.metric("quire_requests_total", model=MODEL) == before + 24
    assert router.metric("quire_generation_tokens_total", model=MODEL) == tokens + 72
    assert router.metric("quire_engines_ready", model=MODEL) == 1


def test_a_worker_that_is_killed_is_started_again_and_the_other_serves_meanwhile(router: Router) -> None:
    served = router.metric("quire_requests_total", model=MODEL)
    victim, other = processes(router)
    victim.kill()
    victim.wait(60)
    assert [complete(router) for _ in range(4)] == [3] * 4
    probes = ("/started", "/ready", "/health", "/live")
    assert [fetch(router.metrics_port, path)[0] for path in probes] == [200] * 4
    eventually(lambda: both_serve(router), 60, "it was not started again")
    assert other in processes(router)
    assert router.metric("quire_requests_total", model=MODEL) == served + 4, "what a dead worker counted is kept"


def test_files_of_metrics_are_not_more_with_each_worker_that_dies(router: Router) -> None:
    folder = Path(processes(router)[0].environ()["PROMETHEUS_MULTIPROC_DIR"])
    assert [complete(router) for _ in range(24)] == [3] * 24
    before = sorted(path.name for path in folder.glob("*.db"))
    for victim in processes(router):
        victim.kill()
        victim.wait(60)
        eventually(lambda: both_serve(router), 60, "it was not started again")
    assert sorted(path.name for path in folder.glob("*.db")) == before


def test_a_worker_that_cannot_be_started_does_not_end_the_others(router: Router) -> None:
    supervisor = psutil.Process(router.popen.pid)
    limits, (victim, other) = supervisor.rlimit(psutil.RLIMIT_NOFILE), processes(router)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    try:
        victim.kill()
        victim.wait(60)
        eventually(lambda: "cannot start worker" in router.text, 60, "it was started all the same")
        assert [complete(router) for _ in range(4)] == [3] * 4
    finally:
        supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    eventually(lambda: both_serve(router), 60, "it was not started again")
    assert other in processes(router)


@pytest.mark.parametrize(
    ("host", "status"),
    [("x/?", 400), ("a b", 400), ("", 200), ("x#y", 400), ("localhost:y", 200), ("x:y", 200), ("\xff", 400)],
)
def test_a_page_of_the_metrics_port_does_not_hang_on_the_host(router: Router, host: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", router.metrics_port), timeout=10) as client:
        client.sendall(f"GET /live HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode("latin-1"))
        assert client.recv(4096).startswith(b"HTTP/1.1 %d" % status)


def test_the_metrics_port_serves_nothing_else(router: Router) -> None:
    assert fetch(router.metrics_port, "/v1/models")[0] == 404


@pytest.mark.soak
def test_the_ports_of_workers_are_in_use_for_others(router: Router, tmp_path: Path) -> None:
    others = {"--http-port": router.http_port, "--grpc-port": router.grpc_port, "--metrics-port": router.metrics_port}
    for taken, port in others.items():
        flags = {flag: free_port() for flag in others} | {taken: port}
        arguments = [str(part) for pair in flags.items() for part in pair]
        shared = ("--workers", "2", "--redis-url", "redis://127.0.0.1:1")
        for more in (shared, ()) if taken == "--http-port" else (shared,):
            status, said = run(tmp_path, *arguments, *more)
            assert status == 1
            assert str(port) in said[-1], said
            assert not any("Traceback" in line for line in said)


def test_workers_end_with_their_supervisor_however_it_ends(tmp_path: Path) -> None:
    with workers(tmp_path) as router:
        left = processes(router)
        router.popen.kill()
        router.popen.wait(60)
        _, alive = psutil.wait_procs(left, timeout=20)
        assert not alive


def test_workers_and_supervisor_end_in_order(tmp_path: Path) -> None:
    with workers(tmp_path, "--shutdown-delay", "600") as router:
        left = processes(router)
        router.signal(signal.SIGTERM)
        eventually(lambda: fetch(router.metrics_port, "/ready")[0] == 503)
        assert [fetch(router.metrics_port, path)[0] for path in ("/started", "/live")] == [200, 200]
        assert complete(router) == 3
        assert router.stop() == 0, router.text  # the second signal, which ends the delay
        assert not any(each.is_running() for each in left)
        assert "Traceback" not in router.text


@pytest.mark.parametrize(
    ("flags", "expected", "said"),
    [
        (("--workers", "2"), 2, "error: --workers needs --redis-url"),
        (("--workers", "0", "--redis-url", "redis://127.0.0.1"), 2, "error: --workers:"),
        (("--workers", "2", "--redis-url", "redis://127.0.0.1", "--tenants", "no/such/file"), 1, "error: "),
    ],
)
def test_an_impossible_setting_is_a_one_line_error(
    flags: tuple[str, ...], expected: int, said: str, tmp_path: Path
) -> None:
    status, lines = run(tmp_path, *flags)
    assert (status, len(lines)) == (expected, 1), lines
    assert lines[0].startswith(said)
