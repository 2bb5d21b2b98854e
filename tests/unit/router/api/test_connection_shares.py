"""Which connection is evicted when a port has its maximum of connections."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_router.api.request_limits import ConnectionShares, peer_key
from quire_router.api.rest.http_server import ConnectionLimits

from tests.support.scripted_api import ask, open_stage, read_answer

LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = 20


class Connection:
    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


@given(
    limit=st.integers(1, 12),
    share=st.floats(0.05, 1),
    steps=st.lists(
        st.tuples(st.sampled_from(["open", "mark_idle", "mark_busy", "remove"]), st.sampled_from("abc"), st.integers(0))
    ),
)
def test_only_idle_connections_are_evicted_and_none_of_peers_within_their_share(limit, share, steps):
    shares, most = ConnectionShares(limit, share), max(1, int(limit * share))
    is_idle: dict[Connection, bool] = {}  # the idlest first
    peers: dict[Connection, str] = {}

    def forget(connection: Connection) -> None:
        del is_idle[connection], peers[connection]

    for step, peer, number in steps:
        if step == "open":
            before, counts = dict(is_idle), Counter(peers.values())
            connection = Connection()
            taken = shares.add(connection, peer)
            evicted = [each for each in before if each.evicted]
            idle = Counter(peers[each] for each in before if before[each])
            if len(before) < limit:
                assert taken
                assert not evicted
            elif counts[peer] >= most:
                assert taken == bool(idle[peer])
                assert {peers[each] for each in evicted} <= {peer}
            else:
                assert taken == bool(idle)
                assert all(idle[peers[each]] == max(idle.values()) for each in evicted)
            for each in evicted:
                assert before[each]
                assert each == next(other for other in before if before[other] and peers[other] == peers[each])
                forget(each)
            if taken:
                is_idle[connection], peers[connection] = False, peer
        elif is_idle:
            connection = list(is_idle)[number % len(is_idle)]
            getattr(shares, step)(connection)
            if step == "remove":
                forget(connection)
            else:
                del is_idle[connection]
                is_idle[connection] = step == "mark_idle"
        assert len(shares) == len(is_idle) <= limit


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "10.0.0.1", False),
    ],
)
def test_a_peer_is_an_address_or_an_ipv6_network(one: str, other: str, same: bool) -> None:
    assert (peer_key(one) == peer_key(other)) is same


@pytest.mark.parametrize(
    "sent", [b"", b"GET /live HTTP/1.1\r\nx-slow: ", LIVE], ids=["nothing", "half a head", "answered"]
)
async def test_idle_connections_of_one_peer_do_not_block_others(sent: bytes) -> None:
    async with open_stage(limits=ConnectionLimits(connections=8)) as stage:
        held = [await asyncio.open_connection("127.0.0.1", stage.port, local_addr=("127.0.0.2", 0)) for _ in range(8)]
        for reader, writer in held:
            writer.write(sent)
            if sent == LIVE:
                assert (await asyncio.wait_for(read_answer(reader), LONG)).status == 200
        await asyncio.sleep(0.05)
        answers = [await asyncio.wait_for(ask(stage.port, "GET", "/live"), LONG) for _ in range(20)]
        ended = await asyncio.wait_for(held[0][0].read(), LONG)  # the idlest
        for _, writer in held:
            writer.close()

    assert {answer.status for answer in answers} == {200}
    assert ended == b""


async def test_a_peer_at_its_share_evicts_no_other_peers_connection() -> None:
    limits = ConnectionLimits(connections=8, peer_share=0.5)
    async with open_stage(limits=limits) as stage:
        others = [
            await asyncio.open_connection("127.0.0.1", stage.port, local_addr=(f"127.0.0.{number}", 0))
            for number in range(10, 14)
        ]
        flood = [await asyncio.open_connection("127.0.0.1", stage.port, local_addr=("127.0.0.2", 0)) for _ in range(30)]
        for reader, writer in others:
            writer.write(LIVE)
            assert (await asyncio.wait_for(read_answer(reader), LONG)).status == 200
        for _, writer in (*others, *flood):
            writer.close()
