"""The engine's port of metrics and probes, at the addresses that its gRPC port takes."""

import logging
import socket
import struct
import threading
import urllib.request
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry
from quire_engine.server import probes
from quire_engine.server.probes import ProbeServer

from tests.support.processes import eventually

ADDRESSES = [
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    ("::1", "[::1]"),
    ("::", "[::1]"),
    ("::", "127.0.0.1"),
]


@pytest.mark.parametrize(("host", "asked"), ADDRESSES)
def test_it_answers_over_ipv4_and_ipv6(host: str, asked: str) -> None:
    server = ProbeServer(host, 0, CollectorRegistry(), {"/live": lambda: True})
    try:
        with urllib.request.urlopen(f"http://{asked}:{server.port}/live", timeout=10) as response:
            assert response.status == 200
    finally:
        server.close()


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 403), ("0.0.0.0", 200)])
def test_on_a_loopback_address_it_is_asked_by_names_of_this_machine_alone(host: str, status: int) -> None:
    server = ProbeServer(host, 0, CollectorRegistry(), {"/live": lambda: True})
    try:
        for name, expected in (("evil.example", status), ("host.docker.internal:9002", 200), ("localhost", 200)):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", "/live", headers={"host": name})
            assert connection.getresponse().status == expected, name
            connection.close()
    finally:
        server.close()


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(OSError, match=r"--metrics-port: \[2001:db8::1\]:9 cannot be listened on: "):
        ProbeServer("2001:db8::1", 9, CollectorRegistry(), {})


def threads_of(server: ProbeServer) -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def answers(server: ProbeServer) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/live", timeout=20) as response:
        return bool(response.status == 200)


def test_idle_connections_take_a_bounded_number_of_threads_and_no_probe_waits_for_them() -> None:
    server = ProbeServer("127.0.0.1", 0, CollectorRegistry(), {"/live": lambda: True})
    before = threads_of(server)
    try:
        with ExitStack() as clients:
            for _ in range(3 * probes.MAX_CONNECTIONS):
                clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            assert answers(server)
            eventually(lambda: threads_of(server) - before <= probes.MAX_CONNECTIONS, timeout=5)
        assert answers(server)
    finally:
        server.close()


def test_a_client_that_breaks_off_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server = ProbeServer("127.0.0.1", 0, CollectorRegistry(), {"/live": lambda: True})
    try:
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert answers(server)
        eventually(lambda: not threads_of(server))
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_a_fault_of_a_page_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise RuntimeError("a fault")

    server = ProbeServer("127.0.0.1", 0, CollectorRegistry(), {"/live": fail})
    try:
        with pytest.raises(OSError):
            answers(server)
        eventually(lambda: "a fault" in caplog.text)
    finally:
        server.close()
