"""The server that commands talk to: its address as users write it, and the key that is sent there."""

import subprocess

import pytest
from quire_cli.machine.running import registered
from quire_cli.machine.server import DEFAULT_URL, base_url, find_server, key_of_environment, no_server

from tests.support.running_servers import a_server


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY", "QUIRE_ROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", ["h:1", "h:1/", "http://h:1", "http://h:1/v1", "http://h:1/v1/", " h:1/v1"])
def test_an_address_may_lack_its_scheme_and_have_the_path_of_the_api(text: str) -> None:
    assert base_url(text) == "http://h:1"


def test_the_path_of_a_proxy_stays() -> None:
    assert base_url("https://h/team/v1") == "https://h/team"


def test_the_clients_keys_count_before_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of_environment(DEFAULT_URL) is None
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "first , second")
    assert key_of_environment(DEFAULT_URL) == "first"
    monkeypatch.setenv("OPENAI_API_KEY", "a,b")
    assert key_of_environment(DEFAULT_URL) == "a,b", "a client's key is one"
    monkeypatch.setenv("QUIRE_API_KEY", "own")
    assert key_of_environment(DEFAULT_URL) == "own"


@pytest.mark.parametrize("url", ["http://localhost:8000", "http://[::1]:1", "http://127.8.8.8"])
def test_the_servers_keys_go_to_this_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "k")
    assert key_of_environment(url) == "k"


@pytest.mark.parametrize("url", ["http://1.2.3.4", "https://h.example", "http://localhost.example", "http://[::1"])
def test_the_servers_keys_go_to_no_other_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "k")
    assert key_of_environment(url) is None


def test_the_servers_keys_go_to_its_own_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "k")
    with registered(a_server("http://192.0.2.7:8000")):
        assert key_of_environment("http://192.0.2.7:8000") == "k"
        assert key_of_environment("http://192.0.2.8:8000") is None


def test_the_server_that_runs_here_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_server(None) == DEFAULT_URL
    assert "quire serve MODEL starts one" in no_server(DEFAULT_URL)
    with registered(a_server("http://127.0.0.1:1")):
        assert find_server(None) == "http://127.0.0.1:1"
        assert find_server("h:2/v1") == "http://h:2"
        assert no_server("http://h:2") == "no server answers at http://h:2; one runs at http://127.0.0.1:1."
    assert capsys.readouterr() == ("", "")


def test_of_several_servers_the_newest_is_taken_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        old, new = a_server("http://127.0.0.1:1"), a_server("http://127.0.0.1:2", other.pid, since=2.0, model="new")
        with registered(new), registered(old):
            assert find_server(None) == "http://127.0.0.1:2"
        other.kill()
    assert capsys.readouterr().err == (
        "2 servers run here; this is new at http://127.0.0.1:2, the newest: --url chooses\n"
    )
