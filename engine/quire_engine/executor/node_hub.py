"""``NodeHub``: node 0's end of the links to the other nodes of an engine. It takes nodes in that run the same model
with the same settings, and refuses all others with the reason. ``RemoteRank`` is a rank there, for ``RankWorkers``.

The links have an event loop on a thread of their own.
"""

import asyncio
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import Any

from quire_proto.cli import join_host_port

from quire_engine.config import NodeArgs
from quire_engine.errors import ModelError
from quire_engine.executor.node_link import (
    HANDSHAKE_SECONDS,
    Frame,
    FrameKind,
    LinkEndedError,
    NodeLink,
    check_peer,
    own_names,
    read_frame,
    tls_context,
    tls_reason,
    write_frame,
)

log = logging.getLogger(__name__)

# After which it is said again which nodes are waited for.
WAITING_SECONDS = 15.0
# Connections that have not joined yet; more are closed at once.
MAX_STRANGERS = 64


class NodeHub:
    """Waits for the other nodes at ``own_addr`` and ``master_port`` of ``nodes``; each runs ``ranks_per_node`` ranks.
    ``facts`` are what a node must have in common with this one. Raises ``ModelError``, also for files of TLS.
    """

    def __init__(self, nodes: NodeArgs, facts: Mapping[str, Any], ranks_per_node: int) -> None:
        self._nodes = nodes
        self._facts = facts
        self._ranks_per_node = ranks_per_node
        self._own_address = nodes.own_addr or nodes.master_addr
        self._names = None if nodes.tls is None else own_names(nodes.tls)
        self._joined: dict[int, JoinedNode] = {}
        self._changed = Condition()
        self._strangers = 0
        self._start_error: OSError | None = None
        self._started = Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run_loop, name="rank-nodes", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise ModelError(f"Other nodes cannot join here: {self._start_error.strerror or self._start_error}.")

    def wait_joined(self) -> "list[RemoteRank]":
        """The ranks of all other nodes, once those have joined. Raises ``ModelError`` when one has not in time."""
        missing: list[int] = []

        def all_joined() -> bool:
            missing[:] = [rank for rank in range(1, self._nodes.nnodes) if rank not in self._joined]
            return not missing

        address = join_host_port(self._own_address, self._nodes.master_port)
        deadline = time.monotonic() + self._nodes.dist_timeout
        with self._changed:
            while not all_joined():
                names, left = ", ".join(map(str, missing)), deadline - time.monotonic()
                if left <= 0:
                    raise ModelError(f"Nodes {names} have not joined within {self._nodes.dist_timeout:g} seconds.")
                # A warning, as what is started by hand shows nothing less, and nothing else can be seen meanwhile.
                log.warning("waiting for nodes %s to join at %s, for up to %.0f seconds", names, address, left)
                self._changed.wait_for(all_joined, min(left, WAITING_SECONDS))
            return [rank for _, node in sorted(self._joined.items()) for rank in node.ranks]

    @property
    def addresses(self) -> list[str]:
        """The address of each node for the others, by node. All have joined."""
        return [self._own_address, *(node.address for _, node in sorted(self._joined.items()))]

    def announce_ready(self) -> None:
        """Tells all nodes that the engine serves."""
        for node in self._joined.values():
            self._loop.call_soon_threadsafe(node.link.send, FrameKind.READY)

    def close(self) -> None:
        """Ends all links. Nodes whose ranks were not closed before find node 0 gone."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # On the loop's thread

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._on_connection, self._own_address, self._nodes.master_port)
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        async with server:
            await self._stop.wait()
            for node in self._joined.values():
                node.link.abort()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection, to its end."""
        name = writer.get_extra_info("peername")  # None where it has closed the connection again
        peer = name[0] if name else "somebody"
        if self._strangers >= MAX_STRANGERS:
            writer.transport.abort()
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                node = await self._admit(reader, writer, peer)
        except (LinkEndedError, OSError, TimeoutError) as error:
            log.warning("a connection of %s is refused: it %s", peer, _describe(error))
            writer.transport.abort()
            return
        finally:
            self._strangers -= 1
        await self._run_node(node)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> "JoinedNode":
        if self._nodes.tls is not None and self._names is not None:
            await writer.start_tls(tls_context(self._nodes.tls, server=True))
            check_peer(writer, self._names)
        hello = await read_frame(reader)
        if hello.kind != FrameKind.HELLO or not isinstance(hello.value, dict):
            raise LinkEndedError("has sent what is no message")
        rank = hello.value.get("node_rank")
        if not isinstance(rank, int):
            raise LinkEndedError("has sent what is no message")
        if (refusal := self._refusal(rank, hello.value)) is not None:
            write_frame(writer, FrameKind.REFUSED, refusal)
            await writer.drain()
            raise LinkEndedError(f"is told: {refusal}")
        first = rank * self._ranks_per_node
        node = JoinedNode(rank, str(hello.value.get("address", peer)), self._loop, reader, writer)
        node.add_ranks(range(first, first + self._ranks_per_node))
        write_frame(writer, FrameKind.ACCEPTED, [each.rank for each in node.ranks])
        with self._changed:
            self._joined[rank] = node
            self._changed.notify_all()
        log.info("node %d (%s) has joined", rank, node.address)
        return node

    def _refusal(self, rank: int, hello: Mapping[str, Any]) -> str | None:
        if not 0 < rank < self._nodes.nnodes:
            return f"There is no node {rank} besides node 0: --nnodes is {self._nodes.nnodes}."
        if (difference := describe_difference(rank, self._facts, hello.get("facts"))) is not None:
            return difference
        if rank in self._joined:
            return f"Node {rank} has joined already, from {self._joined[rank].address}."
        return None

    async def _run_node(self, node: "JoinedNode") -> None:
        reason = "cannot be spoken to"
        try:
            reason = await node.link.run()
        finally:
            node.end(reason)
            with self._changed:
                if len(self._joined) < self._nodes.nnodes - 1:  # it can join again
                    log.warning("node %d (%s) %s", node.rank, node.address, reason)
                    del self._joined[node.rank]
            node.ended.set()


class JoinedNode:
    """Another node, at ``address``, and its ``ranks``."""

    def __init__(
        self,
        rank: int,
        address: str,
        loop: asyncio.AbstractEventLoop,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.rank = rank
        self.address = address
        self.ranks: list[RemoteRank] = []
        self.ended = Event()
        self.exit_reason = ""
        self._loop = loop
        self._closing = False
        self._sockets: dict[int, socket.socket] = {}
        self.link = NodeLink(reader, writer, self._sockets, self._on_frame, self._on_end)

    def add_ranks(self, ranks: range) -> None:
        """Makes its ranks, before the link runs."""
        for rank in ranks:
            ours, self._sockets[rank] = socket.socketpair()
            self.ranks.append(RemoteRank(rank, ours, self))

    def end(self, reason: str) -> None:
        """Sets why it has ended, unless that is known better, and closes its ranks' sockets, at which rank 0 asks."""
        if not self.exit_reason:
            name = f"Node {self.rank} ({self.address})"
            self.exit_reason = f"{name} {reason}, and the engine cannot go on without it."
        for each in self._sockets.values():
            each.close()

    def abort(self) -> None:
        """Ends the link from another thread: the node finds that at once, and kills its ranks."""
        with suppress(RuntimeError):  # the loop has ended, and all links with it
            self._loop.call_soon_threadsafe(self.link.abort)

    async def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.RANK_ENDED:
            self.exit_reason = f"On node {self.rank} ({self.address}): {frame.value}"
            raise LinkEndedError("has lost a rank")
        if frame.kind == FrameKind.LEAVING:
            log.info("node %d was told to stop: this engine leaves with it", self.rank)
            os.kill(os.getpid(), signal.SIGTERM)

    async def _on_end(self, _: int) -> None:
        """Rank 0 has closed one of the ranks' sockets, as it then does with all."""
        if not self._closing:
            self._closing = True
            self.link.send(FrameKind.CLOSE)


class RemoteRank:
    """A rank on another node: what ``RankWorkers`` asks of a ``RankProcess``."""

    def __init__(self, rank: int, link: socket.socket, node: JoinedNode) -> None:
        self.rank = rank
        self.link = link
        self._node = node

    @property
    def place(self) -> str:
        """Where it runs, for the log."""
        return f"node {self._node.rank}"

    def exit_reason(self) -> str:
        """How it ended, as a sentence. Call it once the link is closed."""
        return self._node.exit_reason

    def kill(self) -> None:
        """Kills all ranks of its node."""
        self._node.abort()

    def close_link(self) -> None:
        """Shuts the link down, at which the process ends."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        """Waits for its node to end, and drops it at ``deadline`` (monotonic clock)."""
        if not self._node.ended.wait(max(0.0, deadline - time.monotonic())):
            self.kill()
        self.link.close()


def describe_difference(rank: int, mine: Mapping[str, Any], theirs: object) -> str | None:
    """What node ``rank`` has otherwise than node 0, as a sentence; None where all is equal."""
    if not isinstance(theirs, dict):
        return f"Node {rank} does not say what it runs."
    for name, value in mine.items():
        if theirs.get(name) != value:
            other = theirs.get(name)
            return f"Node {rank} has another {name} than node 0: {other} instead of {value}."
    return None


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"has not joined within {HANDSHAKE_SECONDS:g} seconds"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that does not pass --tls-client-ca ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"shows no certificate that passes --tls-client-ca ({tls_reason(error)})"
    return str(error) if isinstance(error, LinkEndedError) else "has closed the connection"
