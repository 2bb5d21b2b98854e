"""``make up``: two commands from a clone to an answer, and nothing left behind afterwards."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.service.conftest import ROOT
from tests.support.ports import free_port
from tests.support.processes import Process, eventually


def start(tmp_path: Path, stdout: int | None = None, **variables: str) -> Process:
    ports = {
        "QUIRE_ROUTER_HTTP_PORT": free_port(),
        "QUIRE_ROUTER_GRPC_PORT": free_port(),
        "QUIRE_ROUTER_METRICS_PORT": free_port(),
        "QUIRE_ENGINE_PORT": free_port(),
        "QUIRE_ENGINE_METRICS_PORT": free_port(),
        "QUIRE_REDIS_PORT": free_port(),
    }
    environment = {name: str(port) for name, port in ports.items()}
    pools = {"QUIRE_ENGINE_KV_CACHE_MEMORY": str(32 << 20), "QUIRE_ENGINE_SWAP_SPACE": "0.01"}
    command = [sys.executable, str(ROOT / "scripts/up.py")]
    return Process(command, tmp_path / "up.log", {**environment, **pools, **variables}, stdout=stdout)


def printed_command(text: str) -> list[str] | None:
    """The curl that is printed once everything is ready."""
    found = re.search(r"^  (curl .*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    return shlex.split(found[1].replace("\\\n", " ")) if found else None


def stop(up: Process, number: int = signal.SIGINT) -> None:
    children = psutil.Process(up.popen.pid).children(recursive=True)
    assert len(children) >= 3
    up.signal(number)
    up.wait(30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"left behind: {alive}"


def test_the_printed_command_streams_an_answer_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    up = start(tmp_path)
    try:
        eventually(lambda: printed_command(up.text) or up.popen.poll() is not None, timeout=180)
        command = printed_command(up.text)
        assert command is not None, up.text
        if shutil.which("curl") is None:
            pytest.skip("the printed command is curl, which is not installed")
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        answer = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in data[:-1])
        assert "12" in answer
    finally:
        stop(up)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "closed terminal"])
def test_no_process_is_left_when_the_output_is_closed(tmp_path: Path, number: int) -> None:
    """As with ``make up | head``: every line that is printed fails."""
    up = start(tmp_path, ENGINES="1", stdout=subprocess.PIPE)
    assert up.popen.stdout is not None
    while b"ready: " not in up.popen.stdout.readline():
        assert up.popen.poll() is None
    up.popen.stdout.close()
    stop(up, number)


def test_a_port_that_is_wanted_twice_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    up = start(tmp_path, QUIRE_ROUTER_HTTP_PORT=port, QUIRE_ENGINE_PORT=port)
    assert up.wait(30) != 0
    assert f"Port {port} is wanted twice" in up.text


def test_a_port_that_does_not_exist_is_named(tmp_path: Path) -> None:
    up = start(tmp_path, QUIRE_ROUTER_HTTP_PORT="99999")
    assert up.wait(30) != 0
    assert "Port 99999" in up.text
    assert "Traceback" not in up.text


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = start(tmp_path, QUIRE_ROUTER_HTTP_PORT=str(port))
        assert up.wait(30) != 0
    assert f"Port {port} is in use" in up.text


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    up = start(tmp_path, MODEL=str(tmp_path))
    assert up.wait(30) != 0
    assert "no config.json" in up.text


def test_without_redis_it_warns_and_works(tmp_path: Path) -> None:
    """A PATH without redis-server and without a way to install it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "bash", "env"):
        os.symlink(shutil.which(name) or "", tools / name)
    up = start(tmp_path, PATH=str(tools), ENGINES="1")
    try:
        eventually(lambda: "ready: " in up.text or up.popen.poll() is not None, timeout=180)
        assert "kept in memory" in up.text
        assert "ready: " in up.text
    finally:
        children = psutil.Process(up.popen.pid).children(recursive=True)
        up.signal(signal.SIGTERM)
        up.wait(30)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
