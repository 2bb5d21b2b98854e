"""``quire ps`` and ``quire stop``."""

import json
import re
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
from tests.support.terminals import in_terminal, plain


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
def program(
    server_url: str = "http://127.0.0.1:8000", *, ends: bool = True
) -> Iterator[tuple[RunningServer, subprocess.Popen[bytes]]]:
    """A process, as a server that is listed. Ctrl-C does not end it, and SIGTERM only if it ``ends``."""
    numbers = ("SIGINT",) if ends else ("SIGINT", "SIGTERM")
    ignored = "".join(f"signal.signal(signal.{number}, signal.SIG_IGN); " for number in numbers)
    code = f"import signal; {ignored}print(flush=True)\nwhile True: signal.pause()"
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
def test_a_server_ends(named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with program() as (server, process):
        stop(["127.0.0.1:8000/v1"] if named else [])
        assert process.wait(10) == -signal.SIGTERM
        first, second = capsys.readouterr().out.splitlines()
        assert first == f"stopping demo at {server.url}"
        assert second.startswith("stopped after ")


def test_a_server_that_does_not_end_is_left_running_and_the_sentence_says_how_to_kill_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with program(ends=False) as (server, process):
        with pytest.raises(SystemExit, match="1"):
            stop(["--timeout", "0.2"])
        assert process.poll() is None
        told = capsys.readouterr()
        assert told.out == f"stopping demo at {server.url}\n"
        assert told.err == (
            f"error: demo at {server.url} has not ended after 0.2 s\n"
            f"tip: quire stop --force {server.pid} kills it, and --timeout SECONDS waits longer\n"
        )


def test_a_server_that_does_not_end_in_time_is_killed_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    with program(ends=False) as (_, process):
        stop(["--timeout", "0.2", "--force"])
        assert process.wait(10) == -signal.SIGKILL
        assert re.fullmatch(r"killed after 0\.[2-9] s", capsys.readouterr().out.splitlines()[1])


def test_force_leaves_a_server_the_time_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    with program() as (_, process):
        stop(["--force"])
        assert process.wait(10) == -signal.SIGTERM
        assert "stopped after" in capsys.readouterr().out


def test_in_a_terminal_a_line_counts_the_seconds() -> None:
    with program(ends=False) as (server, _):
        command = [sys.executable, "-m", "quire_cli.main", "stop", "--timeout", "2", str(server.pid)]
        shown = plain(in_terminal(command, status=1))
    assert f"waiting for the end of demo at {server.url} (1 s)" in shown
    assert "has not ended after 2 s" in shown


def test_of_several_servers_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with program("http://127.0.0.1:1") as (first, process), program("http://127.0.0.1:2") as (second, other):
        with pytest.raises(SystemExit, match="2"):
            stop([])
        told = capsys.readouterr().err
        assert told.startswith("error: 2 servers run here\ntip: ")
        assert f"quire stop {first.pid} (demo)" in told
        assert f"quire stop {second.pid} (demo)" in told
        stop([str(second.pid)])
        assert other.wait(10) == -signal.SIGTERM
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
