"""Routers that share their load through a real Redis: what one dispatches is in the others' tables."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import sleep

import pytest
from prometheus_client import REGISTRY
from quire_router.clients.membership import CHANNEL, ROUTERS, PeerRegister
from quire_router.core.retry import BURST
from quire_router.engines.load import LedgerEntry, LoadLedger
from quire_router.engines.load_messages import LoadMessage, RouterLoad, SpeculativeBlocks, SpeculativePrefix
from quire_router.engines.load_sharing import LoadSharing, LoadSharingSettings
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex
from redis.asyncio import Redis

from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until

QUICK = LoadSharingSettings(heartbeat=0.1, tick=0.02, lease=0.5, timeout=0.3)
PATIENT = LoadSharingSettings(lease=3600, timeout=30)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def server(shared_server: RedisServer) -> RedisServer:
    async with Redis.from_url(shared_server.url) as client:
        await client.flushall()
    return shared_server


@dataclass
class Replica:
    """One router, as far as its load goes, that knows one engine."""

    peers: LoadSharing
    ledger: LoadLedger
    table: EngineTable
    index: PrefixIndex
    expectations: SpeculativeBlocks

    def begin(self, pending: int = 10) -> LedgerEntry:
        return self.ledger.begin("e:1", pending_tokens=pending, sequences=2)

    @property
    def counted(self) -> tuple[float, ...]:
        row = self.table.row_of("e:1")
        return self.table.requests[row], self.table.pending_tokens[row], self.table.decoding[row]

    def expects(self, *names: bytes) -> bool:
        return self.index.match(names, 0.0, 1).device[self.table.row_of("e:1")] == len(names)

    async def dies(self) -> None:
        """Without a word."""
        for task in self.peers._tasks:
            await task.stop()
        self.peers.available = False


@asynccontextmanager
async def replica(server: RedisServer, settings: LoadSharingSettings = QUICK) -> AsyncIterator[Replica]:
    table, index = EngineTable(), PrefixIndex()
    ledger = LoadLedger(table)
    ledger.add("e:1")
    expectations = SpeculativeBlocks(table, index, lambda: 0.0)
    peers = LoadSharing(server.url, ledger, expectations, settings=settings)
    peers.start()
    try:
        yield Replica(peers, ledger, table, index, expectations)
    finally:
        await peers.close()


async def test_requests_in_flight_at_one_router_count_at_the_others(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second:
        await until(lambda: len(first.ledger) == len(second.ledger) == 1)
        entry = first.begin()
        mine = second.begin(5)
        await until(lambda: first.counted == second.counted == (2, 15, 0))
        entry.on_first_output()
        await until(lambda: first.counted == second.counted == (2, 5, 2))
        entry.end()
        mine.end()
        await until(lambda: first.counted == second.counted == (0, 0, 0))


async def test_a_router_that_comes_later_knows_what_is_in_flight(server: RedisServer) -> None:
    async with replica(server, LoadSharingSettings(heartbeat=3600, timeout=3600)) as first:
        first.begin()
        await until(lambda: first.peers.available)
        await asyncio.sleep(0.2)  # until it was published: nothing more follows
        async with replica(server) as second:
            await until(lambda: second.peers.available)
            assert second.counted == (1, 10, 0)


async def test_speculative_blocks_of_one_router_reach_the_others_but_not_later_ones(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second:
        await until(lambda: len(first.ledger) == len(second.ledger) == 1)
        first.expectations.add("e:1", [b"a" * 16, b"b" * 16])
        first.expectations.add("unknown", [b"c" * 16])
        first.begin()
        await until(lambda: second.expects(b"a" * 16, b"b" * 16))
        assert first.expectations.pop_all() == ()
        async with replica(server) as third:
            await until(lambda: third.counted == (1, 10, 0))
            assert not third.expects(b"a" * 16)


async def test_speculative_blocks_of_an_outage_are_not_published_afterwards() -> None:
    with redis_server() as server:
        async with replica(server) as first, replica(server) as second:
            await until(lambda: len(first.ledger) == len(second.ledger) == 1)
            server.kill()
            await until(lambda: not first.peers.available)
            first.expectations.add("e:1", [b"a" * 16])
            first.begin()
            server.start()
            await until(lambda: second.counted == (1, 10, 0))
            assert not second.expects(b"a" * 16)


async def test_a_share_with_damaged_speculative_blocks_still_counts(server: RedisServer) -> None:
    async with replica(server) as first, Redis.from_url(server.url) as client:
        await until(lambda: first.peers.available)
        message = LoadMessage("other", 1, RouterLoad({"e:1": (7, 0, 0)}), (SpeculativePrefix("e:1", (b"a" * 15,)),))
        await client.publish(CHANNEL, message.encode())
        await until(lambda: first.counted == (7, 0, 0))
        assert not first.expects(b"a" * 16)


async def test_a_router_that_dies_is_forgotten_with_its_lease_and_one_that_lives_is_not(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second, replica(server) as third:
        first.begin()
        third.begin()
        await until(lambda: second.counted == (2, 20, 0))
        await first.dies()
        assert second.counted == (2, 20, 0)
        await until(lambda: second.counted == third.counted == (1, 10, 0))
        await asyncio.sleep(2 * QUICK.lease)
        assert second.counted == third.counted == (1, 10, 0)


async def test_a_router_that_closes_is_forgotten_at_once(server: RedisServer) -> None:
    async with replica(server, PATIENT) as first:
        async with replica(server, PATIENT) as second:
            second.begin()
            await until(lambda: first.counted == (1, 10, 0) and second.peers.available)
        await until(lambda: first.counted == (0, 0, 0))
        async with Redis.from_url(server.url) as client:
            assert await client.smembers(ROUTERS) == {first.peers.router_id.encode()}
            assert await client.exists(f"quire:load:{second.peers.router_id}") == 0


async def test_a_router_that_closes_before_it_knows_the_others_is_forgotten_at_once_too(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(server, PATIENT) as first:
        await until(lambda: first.peers.available)
        monkeypatch.setattr(PeerRegister, "read", lambda *_: asyncio.Event().wait())
        async with replica(server, PATIENT) as second:
            second.begin()
            await until(lambda: first.counted == (1, 10, 0))
            assert not second.peers.available
        await until(lambda: first.counted == (0, 0, 0))


async def test_a_burst_of_changes_is_published_at_once_and_a_flood_rarely(server: RedisServer) -> None:
    """Changes are merged while the cadence allows no message."""
    settings = LoadSharingSettings(interval=3600, heartbeat=7200, lease=7200)
    async with replica(server) as first, replica(server, settings) as second:
        await until(lambda: len(first.ledger) == 1 and second.peers.available)
        for count in range(1, BURST):
            second.begin()
            await until(lambda count=count: first.counted[0] == count)
        second.begin()
        second.begin()
        await asyncio.sleep(0.1)
        assert first.counted[0] == BURST - 1, "shares with an engine in them cost a little more than one each"


async def test_load_that_others_add_while_shares_are_in_transit_is_estimated(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second:
        await until(lambda: len(first.ledger) == len(second.ledger) == 1)
        assert first.table.unseen_tokens == 0
        first.begin()
        await until(lambda: second.counted[0] == 1)
        second.begin(1000)
        await until(lambda: first.counted[0] == 2)
        assert first.ledger.unseen.tokens() > 0
        assert 0 < first.table.unseen_tokens < 1000


async def test_routers_whose_keys_have_expired_leave_the_set(server: RedisServer) -> None:
    async with Redis.from_url(server.url) as client:
        await client.sadd(ROUTERS, "long-gone", b"\xff", "wrong")
        await client.lpush("quire:load:wrong", "type")
        async with replica(server) as first:
            await until(lambda: first.peers.available)
            assert await client.smembers(ROUTERS) == {first.peers.router_id.encode()}


@pytest.mark.parametrize("payload", [b"", b"\xff" * 100, b"\x08\x02", b"a" * 2**21])
async def test_a_malformed_share_is_ignored_and_counted(server: RedisServer, payload: bytes) -> None:
    async with replica(server) as first, replica(server) as second, Redis.from_url(server.url) as client:
        await until(lambda: len(first.ledger) == 1 and first.peers.available)
        before = ignored()
        await client.publish(CHANNEL, payload)
        await until(lambda: ignored() == before + 2)
        second.begin()
        await until(lambda: first.counted == (1, 10, 0))


async def test_a_share_that_arrives_late_is_ignored(server: RedisServer) -> None:
    async with replica(server) as first, Redis.from_url(server.url) as client:
        await until(lambda: first.peers.available)
        for sequence, requests in ((2, 7), (1, 9)):
            await client.publish(
                CHANNEL, LoadMessage("other", sequence, RouterLoad({"e:1": (requests, 0, 0)})).encode()
            )
        before = ignored()
        await client.publish(CHANNEL, b"?")
        await until(lambda: ignored() > before)
        assert first.counted == (7, 0, 0)


async def test_without_redis_each_router_counts_its_own_load_and_finds_the_others_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "quire_router")
    with redis_server() as server:
        async with replica(server) as first, replica(server) as second:
            first.begin()
            second.begin(5)
            await until(lambda: first.counted == second.counted == (2, 15, 0))
            server.kill()
            await until(lambda: (first.counted, second.counted) == ((1, 10, 0), (1, 5, 0)))
            assert not first.peers.available
            first.begin(7)
            assert first.counted == (2, 17, 0)
            server.start()
            await until(lambda: first.counted == second.counted == (3, 22, 0))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot share the load with other routers (ConnectionError); requests continue"
    ] * 2


async def test_a_redis_that_hangs_counts_as_unavailable(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second:
        second.begin()
        await until(lambda: first.counted == (1, 10, 0))
        server.signal(signal.SIGSTOP)
        try:
            await until(lambda: first.counted == (0, 0, 0))
        finally:
            server.signal(signal.SIGCONT)
        await until(lambda: first.counted == (1, 10, 0))


async def test_a_router_that_was_frozen_does_not_take_the_others_for_dead(server: RedisServer) -> None:
    async with replica(server) as first, replica(server) as second:
        second.begin()
        await until(lambda: first.counted == (1, 10, 0))
        sleep(2 * QUICK.lease)  # noqa: ASYNC251 - nothing of this process runs
        for _ in range(20):
            assert first.counted == (1, 10, 0)
            await asyncio.sleep(QUICK.interval)


async def test_a_malformed_url_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ValueError, match="not of the form") as refusal:
        LoadSharing(
            "redis://:secret/word@host:x/0", LoadLedger(EngineTable()), SpeculativeBlocks(EngineTable(), PrefixIndex())
        )
    assert "secret" not in str(refusal.value)


def ignored() -> float:
    return REGISTRY.get_sample_value("quire_load_shares_ignored_total") or 0
