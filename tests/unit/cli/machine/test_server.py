"""The server that commands talk to: its address as users write it, and the key that is sent there."""

import pytest
from quire_cli.machine.server import DEFAULT_URL, base_url, key_of_environment


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
