"""A service without keys on a loopback address: who is served, and who is not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.cli import read_settings
from quire_proto.local_hosts import CONTAINER_HOSTS, is_local_host
from quire_router.app import Router
from quire_router.config import Settings

from tests.support.http_engines import DEMO, demo_tokenizer
from tests.support.scripted_api import ask

KEY = "a-long-enough-key"
LOCAL = [
    "",
    "localhost",
    "LOCALHOST.:8000",
    "a.localhost:1",
    "127.0.0.1",
    "127.8.9.1:80",
    "[::1]:8000",
    *CONTAINER_HOSTS,
]
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8000", "10.0.0.1",
    "[2001:db8::1]:8000", "evillocalhost", "host.docker.internal.evil.example", ":80", "[::1", "2130706433", "x:y",
]  # fmt: skip
FORM = "multipart/form-data; boundary=x"
CROSS = {"sec-fetch-site": "cross-site"}
OPENED = {**CROSS, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Sequence[int]]:
    """The ports of the API and of metrics, as a router opens them."""
    settings = read_settings(Settings, [f"--model=m={DEMO}", "--http-port=0", "--metrics-port=0", *flags])
    servers = Router(settings, {"m": demo_tokenizer()})._http_servers()
    async with asyncio.TaskGroup() as serving:
        for server in servers:
            serving.create_task(server.run_until_stopped())
        try:
            yield [server.port for server in servers]
        finally:
            for server in servers:
                server.should_exit = True


async def statuses(port: int, path: str, hosts: Sequence[str], method: str = "GET") -> dict[str, int]:
    return {host: (await ask(port, method, path, None, {"host": host})).status for host in hosts}


async def test_it_is_asked_by_names_of_this_machine_alone_on_each_port_and_path():
    async with served() as (api, metrics):
        for port, path in ((api, "/v1/models"), (api, "/"), (api, "/live"), (metrics, "/metrics"), (metrics, "/live")):
            assert set((await statuses(port, path, LOCAL)).values()) == {200}, path
            assert set((await statuses(port, path, FOREIGN)).values()) <= {400, 403}, path
        answer = await ask(api, "GET", "/v1/models", None, {"host": "evil.example"})
        anthropic = await ask(api, "POST", "/v1/messages", None, {"host": "evil.example"})
    assert answer.error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.error["message"]
    assert anthropic.json["type"] == "error"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", {}, 200),
        ("GET", "/v1/models", {"sec-fetch-site": "same-origin"}, 200),
        ("GET", "/v1/models", {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 200),
        ("GET", "/v1/models", {**CROSS, "origin": "http://127.0.0.1:3000"}, 200),
        ("GET", "/v1/models", {**CROSS, "origin": "https://chat.example"}, 200),
        ("GET", "/v1/models", {"origin": "https://evil.example"}, 403),
        ("GET", "/v1/models", {"origin": "null"}, 403),
        ("GET", "/v1/models", {"origin": "https://chat.example.evil.example"}, 403),
        ("GET", "/v1/models", CROSS, 403),
        ("GET", "/v1/files", OPENED, 403),
        (
            "POST",
            "/v1/files",
            {"origin": "https://evil.example", "content-type": FORM},
            403,
        ),
        ("DELETE", "/v1/files/file-1", {"origin": "https://evil.example"}, 403),
        ("OPTIONS", "/v1/files", {"origin": "https://evil.example", "access-control-request-method": "POST"}, 403),
        ("GET", "/", OPENED, 200),
        ("GET", "/", {**OPENED, "sec-fetch-dest": "iframe"}, 403),
        ("POST", "/", OPENED, 403),
    ],
    ids=str,
)
async def test_pages_of_other_sites_are_served_only_where_they_are_named(method, path, headers, status):
    async with served("--allowed-origins=https://chat.example") as (api, _):
        answer = await ask(api, method, path, None, {"host": "localhost", **headers})
    assert answer.status == status


@pytest.mark.parametrize(
    ("flags", "api_status", "metrics_status"),
    [
        (("--allowed-hosts", "gpu.example,[2001:db8::1]"), 200, 200),
        (("--allowed-hosts", "*"), 200, 200),
        (("--allowed-hosts", "other.example"), 403, 403),
        (("--host", "0.0.0.0"), 200, 200),
        (("--host", "0.0.0.0", "--allowed-hosts", "other.example"), 403, 403),
        (("--api-key", KEY), 401, 403),
    ],
    ids=str,
)
async def test_other_hosts_are_served_where_they_are_named_or_keys_are_needed(flags, api_status, metrics_status):
    async with served(*flags) as (api, metrics):
        asked = await ask(api, "GET", "/v1/models", None, {"host": "GPU.example:80"})
        scraped = await ask(metrics, "GET", "/metrics", None, {"host": "GPU.example:80"})
    assert (asked.status, scraped.status) == (api_status, metrics_status)


@pytest.mark.parametrize("entry", ["a b", "http://x", "x:80", "x/", "é"])
def test_what_is_no_host_is_an_error(entry, capsys):
    with pytest.raises(SystemExit):
        read_settings(Settings, ["--model=/m", "--allowed-hosts", entry])
    assert "is not a host" in capsys.readouterr().err


@given(st.text(max_size=40))
def test_any_text_is_or_is_not_a_host_of_this_machine(text):
    assert is_local_host(text) in (True, False)
    assert not is_local_host(f"{text}.evil.example")
