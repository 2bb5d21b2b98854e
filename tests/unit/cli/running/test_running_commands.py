"""``quire ps`` and ``quire stop``."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from quire_cli.machine.running import RunningServer, registered
from quire_cli.running.ps_command import ps
from quire_cli.running.stop_command import stop

from tests.support.ports import free_port
from tests.support.running_servers import a_server


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "ok", "ready_engines": {"demo": 2, "other": 2}}).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def router() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", free_port()), Health) as listening:
        Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield listening.server_port
        listening.shutdown()


@contextmanager
def program(server_url: str = "http://127.0.0.1:8000") -> Iterator[tuple[RunningServer, subprocess.Popen[bytes]]]:
    """A process that ends by Ctrl-C alone, as a server that is listed."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server = a_server(server_url, process.pid)
        try:
            with registered(server):
                yield server, process
        finally:
            process.kill()


def test_servers_are_listed_with_their_ready_engines(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as port, registered(a_server(metrics_port=port, since=0.0)):
        ps([])
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["PID", "MODEL", "URL", "ENGINES", "DEVICE", "SINCE"]
        assert "demo   http://127.0.0.1:8000  2 of 2 ready  cpu" in row
        ps(["--json"])
        [listed] = json.loads(capsys.readouterr().out)
        assert (listed["url"], listed["engines"], listed["ready_engines"]) == ("http://127.0.0.1:8000", 2, 2)


def test_a_server_that_does_not_answer_yet_has_no_ready_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(a_server(metrics_port=free_port())):
        ps([])
    assert "0 of 2 ready" in capsys.readouterr().out


def test_nothing_to_list_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    ps([])
    assert capsys.readouterr() == ("", "no server runs here; quire serve MODEL starts one\n")


@pytest.mark.parametrize("named", [False, True])
def test_a_server_ends_as_by_ctrl_c(named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with program() as (server, process):
        stop(["127.0.0.1:8000/v1"] if named else [])
        assert process.wait(10) == -signal.SIGINT
        first, second = capsys.readouterr().out.splitlines()
        assert first == f"stopping demo at {server.url}"
        assert second.startswith("stopped after ")


def test_of_several_servers_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with program("http://127.0.0.1:1") as (first, process), program("http://127.0.0.1:2") as (second, other):
        with pytest.raises(SystemExit, match="2"):
            stop([])
        told = capsys.readouterr().err
        assert told.startswith("error: 2 servers run here\ntip: ")
        assert f"quire stop {first.pid} (demo)" in told
        assert f"quire stop {second.pid} (demo)" in told
        stop([str(second.pid)])
        assert other.wait(10) == -signal.SIGINT
        assert process.poll() is None


def test_what_is_not_a_server_is_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        with pytest.raises(SystemExit, match="1"):
            stop([str(stranger.pid)])
        assert stranger.poll() is None
        stranger.kill()
    assert capsys.readouterr().err == (
        f"error: no server of quire serve runs at {stranger.pid}\ntip: quire ps lists those of this user\n"
    )
