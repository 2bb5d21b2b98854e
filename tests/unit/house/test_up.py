"""``make up`` starts several engines on one machine, bounds what each of them takes, and ends all in their order."""

import os
import re
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Semaphore, Thread

import pytest

from scripts import up
from scripts.up import ROOT, Plan, Programs, commands

PLAN = Plan(Path("model"), "model", 2, 1, 2, 3, [(4, 5), (14, 15)], None)


def engines(tmp: Path) -> list[list[str]]:
    return [command for name, command in commands(PLAN, tmp) if name.startswith("engine")]


@pytest.mark.parametrize(
    ("variable", "bounded"),
    [(None, True), ("QUIRE_ENGINE_KV_CACHE_MEMORY", False), ("QUIRE_ENGINE_GPU_MEMORY_UTILIZATION", False)],
)
def test_every_engine_has_a_bounded_pool_unless_someone_decided_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, bounded: bool
) -> None:
    for name in ("QUIRE_ENGINE_KV_CACHE_MEMORY", "QUIRE_ENGINE_GPU_MEMORY_UTILIZATION"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    started = engines(tmp_path)
    assert len(started) == 2
    for command in started:
        assert ("--kv-cache-memory" in command) == bounded
        if bounded:
            assert command[command.index("--kv-cache-memory") + 1] == str(512 << 20)


# Says when it is there, and ends a while after it was told to.
LINGERS = """
import signal, sys, time
def end(*_):
    time.sleep(float(sys.argv[1]))
    print("ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("began", flush=True)
signal.pause()
"""


def lingering(name: str, seconds: float) -> tuple[str, list[str]]:
    return name, [sys.executable, "-c", LINGERS, str(seconds)]


def test_the_router_ends_before_the_engines_and_redis_last(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, began = Programs(), Semaphore(0)
    ended: list[str] = []

    def hear(text: str, speaker: str = "quire") -> None:
        if text == "ended":
            ended.append(speaker)
        else:
            began.release()

    monkeypatch.setattr(up, "say", hear)
    names = ["redis", "engine-1", "engine-2", "router"]
    stopper = Thread(target=lambda: [began.acquire(timeout=30) for _ in names] and programs.stop(130))
    stopper.start()
    status = programs.run([lingering(name, 0.1 * number) for number, name in enumerate(names)])
    stopper.join()
    assert status == 130
    assert (ended[0], sorted(ended[1:3]), ended[3]) == ("router", ["engine-1", "engine-2"], "redis")


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("raise SystemExit(7)", 7, "router ended with status 7; the others are stopped"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "router was killed by SIGKILL, as the system does when memory runs out; the others are stopped",
        ),
    ],
)
def test_when_one_process_ends_all_do_and_the_first_is_named(
    monkeypatch: pytest.MonkeyPatch, end: str, status: int, told: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(up, "say", lambda text, speaker="quire": lines.append(text))
    assert Programs().run([lingering("redis", 0), ("router", [sys.executable, "-c", end])]) == status
    assert told in lines


@pytest.mark.parametrize(("keys", "shown"), [("a" * 16, "a" * 16), ("a" * 16 + "," + "b" * 16, "a" * 16)])
def test_the_command_to_try_sends_one_of_the_keys(monkeypatch: pytest.MonkeyPatch, keys: str, shown: str) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", keys)
    assert keys not in up.how_to_try(PLAN)
    header = re.search(r'"Authorization: Bearer (.*)"', up.how_to_try(PLAN))
    assert header is not None
    said = subprocess.run(["sh", "-c", f'printf %s "{header[1]}"'], capture_output=True, text=True, check=True)
    assert said.stdout == shown


def test_health_checks_of_local_processes_bypass_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert up.is_up(server.server_address[1])
        finally:
            server.shutdown()


def test_a_port_is_named_with_the_variable_that_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "is_free", lambda port: port != 15)
    with pytest.raises(SystemExit, match="Port 15 is in use, which engine 2 needs; QUIRE_ENGINE_METRICS_PORT chooses"):
        up.refuse_busy_ports(PLAN)


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "STOP_TIMEOUT", 0.05)
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('began', flush=True); signal.pause()"
    )
    programs, heard = Programs(), Semaphore(0)
    monkeypatch.setattr(up, "say", lambda *_: heard.release())
    stopper = Thread(target=lambda: heard.acquire(timeout=30) and programs.stop(130))
    stopper.start()
    assert programs.run([("router", [sys.executable, "-c", stubborn])]) == 130
    stopper.join()


# The environment


def make_environment(folder: Path, **variables: str) -> str:
    """What ``make`` prints while it makes the environment, with a Python that only says that it was started."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "python $*"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PIP_"))}
    command = ["make", f"VENV={folder / 'venv'}", str(folder / "venv/.ready")]
    made = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return made.stdout


def test_the_download_size_and_how_to_reduce_it_are_printed_before_pip_starts(tmp_path: Path) -> None:
    said, installs, _ = make_environment(tmp_path).partition("python -m pip install")
    assert installs
    assert "5.4 GiB" in said
    assert "PIP_EXTRA_INDEX_URL" in said


def test_a_users_own_package_index_is_used_without_a_message(tmp_path: Path) -> None:
    assert "GiB" not in make_environment(tmp_path, PIP_EXTRA_INDEX_URL="https://index.example/cpu")
