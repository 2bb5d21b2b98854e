"""Only nodes of the same engine join node 0, each once and in time; all others learn why not, and none holds it up."""

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quire_engine.config import EngineConfig, NodeArgs
from quire_engine.distributed.communicator import make_process_group
from quire_engine.errors import ModelError
from quire_engine.executor import node_link, rendezvous
from quire_engine.executor.node_hub import NodeHub, node_rendezvous
from quire_engine.executor.node_link import Frame, FrameKind, LinkEndedError, NodeLink, tls_context
from quire_engine.executor.rendezvous import join
from quire_proto.tls import CertKeyFiles, ServerTls, TlsError
from torch import distributed

from tests.support.certificates import ROUTER_NAME, Authority
from tests.support.nodes import MASTER, NODE_NAME
from tests.support.ports import free_port
from tests.support.processes import eventually

FACTS = {"version of Quire": "1", "--max-num-seqs": 64, "revision of the model": "abc"}
RANKS_PER_NODE = 2


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def node_args(authority: Authority, files: CertKeyFiles, nnodes: int = 2, seconds: float = 5.0) -> NodeArgs:
    return NodeArgs(
        nnodes=nnodes,
        master_addr=MASTER,
        master_port=free_port(),
        dist_timeout=seconds,
        tls_cert=files.certificate,
        tls_key=files.key,
        tls_client_ca=authority.ca,
    )


class Hub:
    """Node 0, and whoever connects to it."""

    def __init__(self, args: NodeArgs) -> None:
        self.args = args
        self.hub = NodeHub(args, FACTS, RANKS_PER_NODE)

    def connect(self, tls: ServerTls | None, hello: object, then: Callable[..., Any] | None = None) -> Any:
        """The first answer to ``hello``, or what ``then`` returns; ``hello`` may be bytes."""

        async def talk() -> Any:
            context = None if tls is None else tls_context(tls, server=False)
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(MASTER, self.args.master_port, ssl=context)
                link = NodeLink(reader, writer)
                if isinstance(hello, bytes):
                    writer.write(hello)
                else:
                    link.send(FrameKind.HELLO, hello)
                answer = await link.receive()
                return answer if then is None else await then(answer, link, writer)

        return asyncio.run(talk())


@pytest.fixture
def hub(authority: Authority) -> Iterator[Hub]:
    made = Hub(node_args(authority, authority.issue(NODE_NAME)))
    yield made
    made.hub.close()


def hello(rank: int = 1, **facts: object) -> dict[str, Any]:
    return {"rank": rank, "address": "127.0.0.3", "facts": {**FACTS, **facts}}


def test_a_node_of_the_same_engine_is_given_its_ranks(hub: Hub) -> None:
    async def rank_3_speaks(answer: Frame, link: NodeLink, writer: Any) -> Any:
        ranks = await asyncio.to_thread(hub.hub.wait_for_ranks)
        writer.write(struct.pack("<BHI", FrameKind.DATA, 3, 5) + b"hello")
        ranks[0].link.sendall(b"rank 2")
        heard = await asyncio.to_thread(ranks[1].link.recv, 100)
        while (frame := await link.receive()).kind != FrameKind.DATA:
            pass
        return answer.value, [rank.rank for rank in ranks], heard, (frame.rank, frame.data)

    made = hub.connect(hub.args.tls, hello(), rank_3_speaks)
    assert made == ([2, 3], [2, 3], b"hello", (2, b"rank 2"))
    assert hub.hub.addresses == [MASTER, "127.0.0.3"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"--max-num-seqs": 32}, "Node 1 has another --max-num-seqs than node 0: 32 instead of 64."),
        ({"revision of the model": "x"}, "Node 1 has another revision of the model than node 0: x instead of abc."),
        ({"version of Quire": None}, "Node 1 has another version of Quire than node 0: None instead of 1."),
    ],
)
def test_a_node_that_runs_anything_else_is_refused_with_what_differs(hub: Hub, facts: Any, said: str) -> None:
    answer = hub.connect(hub.args.tls, hello(**facts))
    assert (answer.kind, answer.value) == (FrameKind.REFUSED, said)


def test_a_node_that_does_not_exist_or_joins_twice_is_refused(hub: Hub) -> None:
    for rank in (0, 2, -1):
        assert f"There is no node {rank}" in hub.connect(hub.args.tls, hello(rank)).value

    async def again(*_: Any) -> Any:
        return await asyncio.to_thread(hub.connect, hub.args.tls, hello())

    assert hub.connect(hub.args.tls, hello(), again).value == "Node 1 has joined already, from 127.0.0.3."


def test_without_a_nodes_certificate_nothing_is_answered(
    hub: Hub, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router, foreign = authority.issue(ROUTER_NAME), Authority(tmp_path, "foreign").issue(NODE_NAME, files="foreign")
    expired = authority.issue(NODE_NAME, files="expired", expired=True)
    for files in (router, foreign, expired):
        with pytest.raises(LinkEndedError):
            hub.connect(ServerTls(files, authority.ca), hello())
    with pytest.raises(LinkEndedError):
        hub.connect(None, hello())
    nobody = ssl.create_default_context(cafile=str(authority.ca))
    nobody.check_hostname = False
    with (
        suppress(OSError),  # an alert, or the end
        socket.create_connection((MASTER, hub.args.master_port)) as plain,
        nobody.wrap_socket(plain) as link,
    ):
        assert link.recv(1) == b""
    eventually(lambda: caplog.text.count("is refused") == 5)
    assert "none of the names" in caplog.text
    assert hub.connect(hub.args.tls, hello()).kind == FrameKind.ACCEPTED, "the control"


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 20,
        struct.pack("<BHI", 1, 0, 1 << 30),
        struct.pack("<BHI", 1, 0, 1) + b"{",
        struct.pack("<BHI", 1, 0, 100_000) + b"[" * 100_000,
    ],
)
def test_what_is_no_message_ends_the_connection_alone(hub: Hub, data: bytes) -> None:
    with pytest.raises(LinkEndedError):
        hub.connect(hub.args.tls, data)
    assert hub.connect(hub.args.tls, hello()).kind == FrameKind.ACCEPTED


def test_those_who_say_nothing_are_sent_away_and_hold_nobody_up(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire_engine.executor.rendezvous.HANDSHAKE_SECONDS", 0.5)
    silent = [socket.create_connection((MASTER, hub.args.master_port)) for _ in range(20)]
    assert hub.connect(hub.args.tls, hello()).kind == FrameKind.ACCEPTED
    for link in silent:
        link.settimeout(10)
        with suppress(OSError):
            assert link.recv(1) == b""
        link.close()
    assert "has not joined within 0.5 seconds" in caplog.text


def test_nodes_that_come_late_are_waited_for_no_longer_and_named_meanwhile(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "WAITING_SECONDS", 0.01)
    hub = Hub(node_args(authority, authority.issue(NODE_NAME), nnodes=4, seconds=0.5))
    try:

        async def others(*_: Any) -> None:
            with pytest.raises(ModelError, match=r"^Nodes 1, 3 have not joined within 0.5 seconds.$"):
                await asyncio.to_thread(hub.hub.wait_for_ranks)

        hub.connect(hub.args.tls, hello(2), others)
    finally:
        hub.hub.close()
    lines = [each.message for each in caplog.records if each.levelname == "WARNING" and "waiting" in each.message]
    assert len(lines) > 1, "it is said again"
    address = f"{MASTER}:{hub.args.master_port}"
    assert all(line.startswith(f"waiting for nodes 1, 3 to join at {address}, for up to ") for line in lines)


def test_a_node_says_that_it_waits_for_node_0(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "WAITING_SECONDS", 0.0)
    place = node_rendezvous(node_args(authority, authority.issue(NODE_NAME), seconds=0.2))
    with pytest.raises(ModelError, match=r"^Node 0 \(.*\) could not be joined within 0\.2 seconds"):
        asyncio.run(join(place, FACTS, asyncio.Event()))
    lines = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(lines) > 1, "it is said again"
    assert set(lines) == {f"waiting for node 0 ({MASTER}:{place.port}) to take connections"}


@pytest.mark.parametrize("broken", ["certificate", "key", "missing"])
def test_files_of_ones_own_that_were_replaced_are_no_fault_of_the_other_node(
    authority: Authority, hub: Hub, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    other = ServerTls(authority.issue("other"), authority.ca)
    files = hub.args.tls.identity
    if broken == "missing":
        Path(files.key).unlink()
    else:
        Path(getattr(files, broken)).write_text("what is no PEM")
    with pytest.raises((LinkEndedError, OSError)):
        hub.connect(other, hello())
    eventually(lambda: "refused" in caplog.text)
    said = caplog.text
    assert f"this node's own {files.certificate}, {files.key} or {authority.ca} cannot be used: " in said
    with pytest.raises(LinkEndedError, match=r"^cannot be spoken to, as this node's own "):
        tls_context(hub.args.tls, server=False)


def test_a_node_without_the_token_of_node_0_does_not_join(tmp_path: Path) -> None:
    """On one machine nodes need no certificates, and every user of it reaches the port."""
    file = tmp_path / "token"
    file.write_text("a-token-of-enough-letters")
    hub = Hub(NodeArgs(nnodes=2, master_addr=MASTER, master_port=free_port(), engine_token_file=file))
    try:
        for token in ({}, {"token": "a-token-of-enough-letters"}, {"token": "Bearer another"}, {"token": [1]}):
            answer = hub.connect(None, {**hello(), **token})
            assert answer.kind == FrameKind.REFUSED
            assert (
                answer.value == "This node does not have the token of node 0: give both the same --engine-token-file."
            )
        place = node_rendezvous(hub.args.model_copy(update={"node_rank": 1}))
        joined = asyncio.run(join(place, FACTS, asyncio.Event()))
        assert joined.accepted == [2, 3]
    finally:
        hub.hub.close()


def test_a_node_that_leaves_before_all_are_there_can_join_again(authority: Authority) -> None:
    hub = Hub(node_args(authority, authority.issue(NODE_NAME), nnodes=3))
    try:
        for _ in range(2):
            eventually(lambda: hub.connect(hub.args.tls, hello()).kind == FrameKind.ACCEPTED)
    finally:
        hub.hub.close()


def test_a_node_that_falls_silent_is_lost_and_one_that_is_busy_is_not(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_link, "SILENCE_SECONDS", 0.6)

    async def stay(_: Frame, __: Any, writer: Any) -> tuple[bool, str]:
        (first, _other) = await asyncio.to_thread(hub.hub.wait_for_ranks)
        first.link.settimeout(10)
        for _ in range(12):
            writer.write(struct.pack("<BHI", FrameKind.HEARTBEAT, 0, 4) + b"null")
            await asyncio.sleep(0.1)
        first.link.setblocking(False)
        try:
            first.link.recv(1)
            busy = False
        except BlockingIOError:
            busy = True
        first.link.settimeout(10)
        assert await asyncio.to_thread(first.link.recv, 1) == b""
        return busy, first.exit_reason()

    busy, reason = hub.connect(hub.args.tls, hello(), stay)
    assert busy
    assert reason.startswith("Node 1 (127.0.0.3) has sent nothing for 0.6 seconds, and the engine cannot")


def test_time_in_which_node_0_itself_stood_still_is_no_silence_of_others(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine with all of its nodes is paused: each has missed all heartbeats of the others."""
    monkeypatch.setattr(node_link, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_link, "SILENCE_SECONDS", 0.6)

    async def pause_all(_: Frame, link: NodeLink, __: Any) -> bytes:
        (first, _other) = await asyncio.to_thread(hub.hub.wait_for_ranks)
        hub.hub.call(time.sleep, 2.0)
        await asyncio.sleep(2.0)
        running = asyncio.create_task(link.run(lambda _: asyncio.sleep(0)))
        await asyncio.sleep(1.0)
        first.link.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.link.recv(1)
        assert not running.done()
        running.cancel()
        return b"joined"

    assert hub.connect(hub.args.tls, hello(), pause_all) == b"joined"


def test_a_rank_that_reads_nothing_for_long_does_not_make_its_node_silent(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other node sends for it fills all buffers, and its heartbeats are behind that."""
    monkeypatch.setattr(node_link, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_link, "SILENCE_SECONDS", 0.6)
    size, count = 1 << 16, 64

    async def send_all(_: Frame, __: Any, writer: Any) -> int:
        (first, _other) = await asyncio.to_thread(hub.hub.wait_for_ranks)
        first.link.settimeout(10)
        for _ in range(count):
            writer.write(struct.pack("<BHI", FrameKind.DATA, first.rank, size) + bytes(size))
        for _ in range(15):
            writer.write(struct.pack("<BHI", FrameKind.HEARTBEAT, 0, 4) + b"null")
            await asyncio.sleep(0.1)
        received = 0
        while received < count * size and (data := await asyncio.to_thread(first.link.recv, 1 << 20)):
            received += len(data)
        return received

    assert hub.connect(hub.args.tls, hello(), send_all) == count * size


def test_how_a_rank_of_a_node_ended_is_what_rank_0_hears(hub: Hub) -> None:
    async def lose(_: Frame, link: NodeLink, __: Any) -> str:
        (first, _other) = await asyncio.to_thread(hub.hub.wait_for_ranks)
        link.send(FrameKind.RANK_ENDED, "Rank 2 (process 7) was killed.")
        assert await asyncio.to_thread(first.link.recv, 1) == b""
        return first.exit_reason()

    assert hub.connect(hub.args.tls, hello(), lose) == "On node 1 (127.0.0.3): Rank 2 (process 7) was killed."


def test_a_node_is_told_when_the_engine_serves_and_when_it_ends(hub: Hub) -> None:
    async def hear(_: Frame, link: NodeLink, __: Any) -> list[int]:
        ranks = await asyncio.to_thread(hub.hub.wait_for_ranks)
        hub.hub.announce_ready()
        threading.Timer(0.3, lambda: [rank.close_link() for rank in ranks]).start()
        kinds: list[int] = []
        while FrameKind.CLOSE not in kinds:
            kinds.append((await link.receive()).kind)
        return [kind for kind in kinds if kind != FrameKind.HEARTBEAT]

    assert hub.connect(hub.args.tls, hello(), hear) == [FrameKind.READY, FrameKind.CLOSE]


def test_a_port_in_use_is_said(authority: Authority) -> None:
    args = node_args(authority, authority.issue(NODE_NAME))
    with socket.create_server((MASTER, args.master_port)), pytest.raises(ModelError, match="cannot join here"):
        NodeHub(args, FACTS, 1)


def test_a_certificate_that_other_nodes_would_refuse_is_found_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue(NODE_NAME)
    assert node_link.own_names(ServerTls(own, authority.ca)) == {NODE_NAME}
    foreign = Authority(tmp_path, "foreign")
    with pytest.raises(TlsError, match=r"does not pass --tls-client-ca \(.*\) at other nodes"):
        node_link.own_names(ServerTls(own, foreign.ca))


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": "/m", "pipeline_parallel_size": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nnodes": 3}, "--nnodes 3 does not divide the ranks"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank is not below --nnodes"),
        ({"headless": True}, "--headless needs a --node-rank above 0"),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, "--nnodes needs --tls-cert, --tls-key and --tls-client-ca"),
        ({"nnodes": 2, "master_addr": "node-0.engine"}, "--nnodes needs --tls-cert"),
        ({"nnodes": 2, "node_rank": 1, "node_addr": "10.0.0.2"}, "--nnodes needs --tls-cert"),
    ],
)
def test_settings_that_nodes_cannot_have_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**settings)


def test_without_certificates_nodes_may_be_on_one_machine_alone() -> None:
    for host in ("127.0.0.2", "localhost", "::1"):
        config(nnodes=2, master_addr=host)


def test_an_address_that_gloo_cannot_have_is_said() -> None:
    with pytest.raises(ModelError, match=r"^gloo cannot listen at 203\.0\.113\.1: "):
        make_process_group(distributed.HashStore(), 0, 1, torch.device("cpu"), "203.0.113.1")
