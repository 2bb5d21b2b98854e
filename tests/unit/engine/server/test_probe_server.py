"""The engine's port of metrics and probes, at the addresses that its gRPC port takes."""

import urllib.request
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry
from quire_engine.server.metrics import ProbeServer

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
