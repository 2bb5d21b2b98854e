"""Discovery by DNS: every address of a name in the last answer, and never fewer because a server is silent."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import pytest
from prometheus_client import REGISTRY
from quire_router.discovery.base import DnsName, Endpoint
from quire_router.discovery.dns import DnsDiscovery, system_resolver

from tests.support.dns_server import DnsServer, dns_server
from tests.support.waiting import until

SOURCE = DnsName("engines.test", 9000)
NAME = "engines.test."


class Seen:
    """What a discovery said last."""

    def __init__(self) -> None:
        self.view: Sequence[Endpoint] | None = None
        self.times = 0

    async def follow(self, discovery: DnsDiscovery) -> None:
        async for self.view in discovery.watch():
            self.times += 1

    @property
    def addresses(self) -> list[str] | None:
        return None if self.view is None else [each.address for each in self.view]


@asynccontextmanager
async def asking(server: DnsServer) -> AsyncIterator[Seen]:
    seen = Seen()
    task = asyncio.create_task(seen.follow(DnsDiscovery(SOURCE, period=0.01, resolver=server.resolver)))
    try:
        yield seen
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)


class Alternating(dict[str, list[str]]):
    """Records of which another part is said each time."""

    def __init__(self, *answers: list[str]) -> None:
        super().__init__()
        self._answers = cycle(answers)

    def get(self, kind: str, default: Any = None) -> Any:
        return next(self._answers) if kind == "A" else default


async def asked_again(server: DnsServer, times: int = 3) -> None:
    count = len(server.asked) + times
    await until(lambda: len(server.asked) >= count)


def connected() -> float | None:
    return REGISTRY.get_sample_value("quire_discovery_connected", {"source": str(SOURCE)})


async def test_every_address_is_an_engine_and_another_order_is_no_change() -> None:
    async with dns_server() as server:
        server.records[NAME] = {"A": ["10.0.0.2", "10.0.0.1"]}
        async with asking(server) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000", "10.0.0.2:9000"])
            server.records[NAME]["A"].reverse()
            await asked_again(server)
            assert seen.times == 1
            assert seen.view == (Endpoint("10.0.0.1:9000"), Endpoint("10.0.0.2:9000"))
            server.records[NAME] = {"A": ["10.0.0.2", "10.0.0.3"]}
            await until(lambda: seen.addresses == ["10.0.0.2:9000", "10.0.0.3:9000"])
            assert connected() == 1


@pytest.mark.parametrize("trouble", ["silent", "fails"])
async def test_known_engines_stay_while_no_server_answers(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    async with dns_server() as server:
        server.records[NAME] = {"A": ["10.0.0.1"]}
        async with asking(server) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])
            setattr(server, trouble, True)
            await until(lambda: "cannot query" in caplog.text)
            assert connected() == 0
            assert seen.addresses == ["10.0.0.1:9000"]
            server.records[NAME] = {"A": ["10.0.0.2"]}
            setattr(server, trouble, False)
            await until(lambda: seen.addresses == ["10.0.0.2:9000"])
            assert connected() == 1


@pytest.mark.parametrize("trouble", ["silent", "fails"])
async def test_no_answer_yet_does_not_mean_no_engines(trouble: str) -> None:
    async with dns_server() as server:
        setattr(server, trouble, True)
        async with asking(server) as seen:
            await asked_again(server)
            assert seen.view is None


@pytest.mark.parametrize("records", [{}, {NAME: {}}, {NAME: {"TXT": ["x"]}}])
async def test_an_empty_answer_means_no_engines(records: dict[str, dict[str, list[str]]]) -> None:
    async with dns_server() as server:
        server.records[NAME] = {"A": ["10.0.0.1"]}
        async with asking(server) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])
            server.records = records
            await until(lambda: seen.view == ())
            assert connected() == 1


async def test_servers_that_disagree_make_no_engine_flap() -> None:
    async with dns_server() as server:
        server.records[NAME] = {"A": ["10.0.0.1", "10.0.0.2"]}
        async with asking(server) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000", "10.0.0.2:9000"])
            server.records[NAME] = Alternating(["10.0.0.1"], ["10.0.0.2"], [])
            await asked_again(server, 12)
            assert seen.times == 1
            server.records[NAME] = {"A": ["10.0.0.2"]}
            await until(lambda: seen.addresses == ["10.0.0.2:9000"])


async def test_a_server_that_answers_every_other_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with dns_server() as server:
        server.records[NAME] = {"A": ["10.0.0.1"]}
        async with asking(server) as seen:
            while "keeps breaking off" not in caplog.text:
                server.fails = not server.fails
                await asked_again(server, 1)
            assert seen.addresses == ["10.0.0.1:9000"]
            assert seen.times == 1


async def test_ipv6_counts_where_there_is_no_ipv4() -> None:
    async with dns_server() as server:
        server.records[NAME] = {"AAAA": ["fd00::2", "fd00::1"]}
        async with asking(server) as seen:
            await until(lambda: seen.addresses == ["[fd00::1]:9000", "[fd00::2]:9000"])
            server.records[NAME]["A"] = ["10.0.0.1"]
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])


async def test_an_answer_too_long_for_a_datagram_is_fetched_over_tcp() -> None:
    async with dns_server() as server:
        addresses = [f"10.0.0.{number}" for number in range(200)]
        server.patience = 10
        server.records[NAME] = {"A": addresses}
        async with asking(server) as seen:
            await until(lambda: seen.view is not None)
            assert set(seen.addresses or ()) == {f"{address}:9000" for address in addresses}
            assert {over for _, _, over in server.asked} == {"udp", "tcp"}


async def test_the_systems_resolver_uses_its_search_list() -> None:
    async with dns_server() as server:
        server.records["engines.prod.svc.test."] = {"A": ["10.0.0.1"]}

        def resolver():
            made = system_resolver()
            made.read_resolv_conf(io.StringIO("search prod.svc.test svc.test\nnameserver 127.0.0.1\noptions ndots:5\n"))
            made.port = server.port
            return made

        discovery = DnsDiscovery(DnsName("engines", 7), resolver=resolver)
        async for view in discovery.watch():
            assert view == (Endpoint("10.0.0.1:7"),)
            break
        assert server.asked[0][0] == "engines.prod.svc.test."
