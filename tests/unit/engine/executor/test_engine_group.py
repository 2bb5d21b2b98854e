"""Engines of a group find each other and hear of each other's end: only those of the same model and settings, each
once, and what anybody else sends ends nothing but his own connection.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.executor.engine_group import EngineGroup, JoinedEngine, engine_rendezvous
from quire_engine.executor.node_link import Frame, FrameKind, LinkEndedError, NodeLink, tls_context
from quire_engine.executor.rendezvous import Rendezvous, RendezvousHub
from quire_proto.tls import CertKeyFiles

from tests.support.certificates import ROUTER_NAME, Authority
from tests.support.nodes import MASTER, NODE_NAME
from tests.support.ports import free_port
from tests.support.processes import eventually

FACTS = {"version of Quire": "1", "--max-num-seqs": 64}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def rendezvous(size: int, authority: Authority, files: CertKeyFiles, seconds: float = 10.0) -> Rendezvous:
    nodes = NodeArgs(
        data_parallel_address=MASTER,
        data_parallel_rpc_port=free_port(),
        dist_timeout=seconds,
        tls_cert=files.certificate,
        tls_key=files.key,
        tls_client_ca=authority.ca,
    )
    return engine_rendezvous(EngineArgs(model=Path("m"), data_parallel_size=size), nodes)


@dataclass
class Member:
    """An engine of a group, and what it was told of a loss."""

    group: EngineGroup
    told: list[str] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)


def join(place: Rendezvous, rank: int, facts: dict[str, Any] = FACTS) -> Member:
    told: list[str] = []
    own = MASTER if rank == 0 else f"127.0.0.{rank + 2}"
    return Member(EngineGroup(replace(place, rank=rank, own_address=own), facts, told.append), told)


@pytest.fixture
def place(authority: Authority) -> Rendezvous:
    return rendezvous(3, authority, authority.issue(NODE_NAME))


@pytest.fixture
def members(place: Rendezvous) -> Iterator[list[Member]]:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda rank: join(place, rank), range(3)))
    yield made
    for member in made:
        member.group.close()


def stranger(place: Rendezvous, talk: Callable[..., Any], tls: bool = True) -> Any:
    """What ``talk`` returns, which is given a connection to engine 0."""

    async def run() -> Any:
        assert place.tls is not None
        context = tls_context(place.tls, server=False) if tls else None
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(MASTER, place.port, ssl=context)
            return await talk(NodeLink(reader, writer), writer)

    return asyncio.run(run())


def test_engines_have_places_and_share_what_ranks_store(members: list[Member]) -> None:
    assert [(each.group.place.dp_rank, each.group.place.dp_size, each.group.place.address) for each in members] == [
        (0, 3, MASTER),
        (1, 3, "127.0.0.3"),
        (2, 3, "127.0.0.4"),
    ]
    members[1].group.store.set("before", b"\0\xff")
    assert members[0].group.store.get("before") == members[2].group.store.get("before") == b"\0\xff"
    for member in members:  # and ranks that ask later get what came earlier
        member.group.store.attach(member.group, lambda key, value, member=member: member.values.update({key: value}))  # type: ignore[misc]
    members[0].group.store.put("behind", b"1", members[0].group)
    for member in members[1:]:
        eventually(lambda member=member: member.values == {"before": b"\0\xff", "behind": b"1"})
    assert members[0].values == {"before": b"\0\xff"}, "what a rank stores it has already"


def test_a_pass_that_one_asks_for_is_due_for_all_and_a_phase_ends_for_all(members: list[Member]) -> None:
    locksteps = [member.group.lockstep for member in members]
    for asking in (2, 0):
        locksteps[asking].begin()
        for lockstep in locksteps:
            eventually(lambda lockstep=lockstep: lockstep.is_due)
            lockstep.end()
    with ThreadPoolExecutor(3) as pool:
        finished = [pool.submit(lockstep.finish, lambda: None) for lockstep in locksteps]
        assert [each.result(10) for each in finished] == [None] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_an_engine_that_leaves_before_all_have_finished_is_a_loss_for_all(members: list[Member], rank: int) -> None:
    members[rank].group.close()
    others = [member for member in members if member is not members[rank]]
    for member in others:
        eventually(lambda member=member: member.told)
        assert f"Engine {rank} (" in member.told[0]
        assert member.told[0].endswith(
            "has closed the connection, and the engines of its group cannot go on without it."
        )
        with pytest.raises(ExecutorError, match=f"Engine {rank}"):
            member.group.lockstep.begin()
        with pytest.raises(ModelError, match=f"Engine {rank}"):
            member.group.store.get("never stored")
    assert members[rank].told == []


def test_engines_that_have_finished_end_in_any_order(members: list[Member]) -> None:
    for _ in range(2):  # loading and serving
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda member: member.group.lockstep.finish(lambda: None), members))
    for member in members:
        member.group.close()
    assert [member.told for member in members] == [[], [], []]


@pytest.mark.parametrize(
    ("kind", "babble"),
    [
        (FrameKind.DP_MESSAGE, [99, 1, ""]),
        (FrameKind.DP_MESSAGE, [1, [], ""]),
        (FrameKind.DP_MESSAGE, [1, 1]),
        (FrameKind.STORED, ["key", "no hex"]),
        (FrameKind.STORED, [1, "00"]),
        (FrameKind.READY, None),
        (FrameKind.CLOSE, None),
    ],
)
def test_an_engine_that_sends_what_is_no_message_is_lost(place: Rendezvous, kind: FrameKind, babble: object) -> None:
    async def join_and_babble(link: NodeLink, _: Any) -> None:
        link.send(FrameKind.HELLO, {"rank": 1, "address": "127.0.0.3", "facts": FACTS})
        while (await link.receive()).kind != FrameKind.READY:
            pass
        link.send(kind, babble)
        with suppress(LinkEndedError):
            while True:
                await link.receive()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, replace(place, count=2), 0)
        eventually(lambda: is_open(place))
        stranger(place, join_and_babble)
        member = first.result(10)
    eventually(lambda: member.told)
    assert member.told == [
        "Engine 1 (127.0.0.3) has sent something that is not a message, and the engines of its group cannot go on "
        "without it."
    ]
    member.group.close()


def test_an_engine_that_is_lost_as_soon_as_all_have_joined_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, place: Rendezvous
) -> None:
    """Engine 0 hears of it before it has taken note that all are there."""
    has_ended, wait_joined, end = Event(), RendezvousHub.wait_joined, JoinedEngine.end

    def wait_longer(hub: RendezvousHub[Any]) -> Any:
        joined = wait_joined(hub)
        assert has_ended.wait(10)
        return joined

    def end_early(engine: JoinedEngine, reason: str) -> None:
        try:
            end(engine, reason)
        finally:
            has_ended.set()

    async def join_and_leave(link: NodeLink, _: Any) -> None:
        link.send(FrameKind.HELLO, {"rank": 1, "address": "127.0.0.3", "facts": FACTS})
        assert (await link.receive()).kind == FrameKind.ACCEPTED

    monkeypatch.setattr(RendezvousHub, "wait_joined", wait_longer)
    monkeypatch.setattr(JoinedEngine, "end", end_early)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, replace(place, count=2), 0)
        eventually(lambda: is_open(place))
        stranger(place, join_and_leave)
        member = first.result(20)
    said = (
        r"Engine 1 \(127\.0\.0\.3\) has closed the connection, and the engines of its group cannot go on without it\."
    )
    eventually(lambda: member.told)
    with pytest.raises(ModelError, match=said):
        member.group.store.get("never stored")
    member.group.close()


def is_open(place: Rendezvous) -> bool:
    with suppress(OSError), socket.create_connection((MASTER, place.port), 1):
        return True
    return False


def test_nobody_joins_a_group_that_is_complete(members: list[Member], place: Rendezvous) -> None:
    """Who comes then is of the next group, and has to find its engine 0."""
    eventually(lambda: not is_open(place))
    late = replace(place, timeout=0.2)
    with pytest.raises(ModelError, match=r"^Engine 0 \(127\.0\.0\.2:\d+\) could not be joined within 0\.2 seconds"):
        join(late, 1)
    assert [member.told for member in members] == [[], [], []]


def test_strangers_are_refused_and_hold_nobody_up(place: Rendezvous, authority: Authority) -> None:
    foreign = rendezvous(2, authority, authority.issue(ROUTER_NAME)).tls

    async def say(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<BHI", FrameKind.HELLO, 0, 1 << 30))
        await writer.drain()

    async def hello(link: NodeLink, _: Any) -> Frame:
        link.send(FrameKind.HELLO, {"rank": 1, "address": "x", "facts": {**FACTS, "--max-num-seqs": 7}})
        return await link.receive()

    two = replace(place, count=2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, two, 0)
        eventually(lambda: is_open(place))
        stranger(two, say)
        stranger(two, say, tls=False)
        with pytest.raises(LinkEndedError):
            stranger(replace(two, tls=foreign), hello)
        answer = stranger(two, hello)
        assert (answer.kind, answer.value) == (
            FrameKind.REFUSED,
            "Engine 1 has another --max-num-seqs than engine 0: 7 instead of 64.",
        )
        with pytest.raises(ModelError, match="Engine 1 has another --max-num-seqs than engine 0: 7 instead of 64"):
            join(two, 1, {**FACTS, "--max-num-seqs": 7})
        with pytest.raises(ModelError, match="There is no engine 2 besides engine 0: --data-parallel-size is 2"):
            join(two, 2)
        both = [first.result(10) if rank == 0 else join(two, 1) for rank in (1, 0)]
    for member in both:
        member.group.close()


def test_an_engine_that_is_missing_is_named(authority: Authority) -> None:
    alone = rendezvous(3, authority, authority.issue(NODE_NAME), seconds=0.3)
    with pytest.raises(ModelError, match=r"^Engines 1, 2 have not joined within 0\.3 seconds\.$"):
        join(alone, 0)


def test_one_that_joined_hears_that_the_group_did_not_come_together(place: Rendezvous) -> None:
    brief = replace(place, timeout=1.0)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(join, brief, rank) for rank in (0, 1)]
        with pytest.raises(ModelError, match=r"^Engine 2 has not joined within 1 seconds\.$"):
            ends[0].result(10)
        with pytest.raises(ModelError, match=r"^Engine 0 \(.*\) has closed the connection, and this engine ends\.$"):
            ends[1].result(10)
