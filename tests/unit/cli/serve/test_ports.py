"""Ports are those that were named, or free ones that nobody else is about to take."""

import socket
from threading import Timer

import pytest
from quire_cli.serve.ports import PortError, Ports

from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_cli.serve.ports.PATIENCE", 0.0)


def ports(said: list[str] | None = None) -> Ports:
    return Ports(lambda text, _: (said if said is not None else []).append(text))


def test_a_named_port_in_use_is_refused_with_the_flag_that_moves_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} is in use, which the router's REST API needs; --port"):
            ports().named(port, "the router's REST API", "--port")


def test_a_port_wanted_twice_names_both() -> None:
    ours, port = ports(), free_port()
    ours.named(port, "the router", "--port")
    with pytest.raises(PortError, match=rf"port {port} is wanted twice: for the router and for engine 1"):
        ours.named(port, "engine 1", "--engine-port")


def test_a_port_that_does_not_exist_is_named() -> None:
    with pytest.raises(PortError, match="port 65536, for engine 7, does not exist"):
        ports().named(65536, "engine 7", "--engine-port")
    ours = ports()
    ours.free(65535, "engine 1")
    with pytest.raises(PortError, match="no port from 65535 on is free"):
        ours.free(65535, "engine 2")


def test_a_port_that_was_not_named_moves_and_says_so() -> None:
    said: list[str] = []
    with socket.socket() as taken:
        first = free_port()
        taken.bind(("127.0.0.1", first))
        taken.listen()
        port = ports(said).free(first, "the router's REST API", tell=True)
    assert port > first
    assert said == [f"port {first} is in use: the router's REST API takes {port}"]


def test_two_trees_that_start_at_once_take_different_ports() -> None:
    first, second, port = ports(), ports(), free_port()
    assert first.free(port, "a") == port
    assert second.free(port, "b") > port
    with pytest.raises(PortError, match="is in use"):
        second.named(port, "b", "--port")


def test_a_port_that_is_about_to_be_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a tree was killed, whose clients come back to the same port."""
    monkeypatch.setattr("quire_cli.serve.ports.PATIENCE", 60.0)
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        Timer(0.3, taken.close).start()
        assert ports().free(port, "the router", tell=True) == port
