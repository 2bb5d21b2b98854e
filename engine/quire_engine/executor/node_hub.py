"""``NodeHub``: node 0's side of the links to the other nodes of an engine. ``RemoteRank`` represents a rank on another
node for ``RankWorkers``.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Event
from typing import Any

from quire_engine.config import NodeArgs
from quire_engine.executor.node_link import Frame, FrameKind, LinkEndedError, NodeLink
from quire_engine.executor.rendezvous import Rendezvous, RendezvousHub

log = logging.getLogger(__name__)


def node_rendezvous(nodes: NodeArgs) -> Rendezvous:
    """Returns where the nodes of an engine meet."""
    rank, address, port = nodes.node_rank, nodes.master_addr, nodes.master_port
    timeout, own_address = nodes.dist_timeout, nodes.own_addr
    return Rendezvous(
        *("node", "--nnodes", nodes.nnodes, rank, address, port, own_address, timeout),
        *(nodes.tls, nodes.engine_token_file),
    )


class NodeHub(RendezvousHub["JoinedNode"]):
    """Waits for the other machines of ``nodes``, each of which runs ``ranks_per_node`` ranks."""

    def __init__(self, nodes: NodeArgs, facts: Mapping[str, Any], ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        super().__init__(node_rendezvous(nodes), facts)

    def make_member(self, rank: int, address: str, link: NodeLink) -> "JoinedNode":
        """See ``RendezvousHub.make_member``."""
        first = rank * self._ranks_per_node
        return JoinedNode(rank, address, link, range(first, first + self._ranks_per_node))

    def wait_for_ranks(self) -> "list[RemoteRank]":
        """Waits for all other nodes. Returns their ranks. Raises ``ModelError`` if a node has not joined in time."""
        return [rank for node in self.wait_joined() for rank in node.ranks]

    def announce_ready(self) -> None:
        """Tells all nodes that the engine serves."""
        for node in self.members:
            self.call(node.link.send, FrameKind.READY)


class JoinedNode:
    """Another node, at ``address``, and its ``ranks``. Implements ``Member``. Create it on the thread of the links."""

    def __init__(self, rank: int, address: str, link: NodeLink, ranks: range) -> None:
        self.rank = rank
        self.address = address
        self.link = link
        self.ranks: list[RemoteRank] = []
        self.ended = Event()
        self.exit_reason = ""
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._sockets: dict[int, socket.socket] = {}
        for each in ranks:
            ours, self._sockets[each] = socket.socketpair()
            self.ranks.append(RemoteRank(each, ours, self))

    @property
    def accepted(self) -> list[int]:
        """The ranks that the node must run."""
        return [each.rank for each in self.ranks]

    async def run(self) -> str:
        """See ``Member.run``. Carries what rank 0 and the node's ranks send to each other."""
        return await self.link.run(self._on_frame, self._sockets, self._on_end)

    def end(self, reason: str) -> None:
        """Sets ``reason`` as the exit reason, unless a better one is known, and closes the sockets of its ranks. Rank 0
        then asks for the reason.
        """
        if not self.exit_reason:
            name = f"Node {self.rank} ({self.address})"
            self.exit_reason = f"{name} {reason}, and the engine cannot go on without it."
        for each in self._sockets.values():
            each.close()
        self.ended.set()

    def abort(self) -> None:
        """Ends the link from another thread. The node notices at once and kills its ranks."""
        with suppress(RuntimeError):  # the loop has ended, and with it all links
            self._loop.call_soon_threadsafe(self.link.abort)

    async def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.RANK_ENDED:
            self.exit_reason = f"On node {self.rank} ({self.address}): {frame.value}"
            raise LinkEndedError("has lost a rank")
        if frame.kind == FrameKind.LEAVING:
            log.info("node %d is stopping: this engine stops with it", self.rank)
            os.kill(os.getpid(), signal.SIGTERM)

    async def _on_end(self, _: int) -> None:
        """Tells the node to end, once, when rank 0 closes the sockets of its ranks."""
        if not self._closing:
            self._closing = True
            self.link.send(FrameKind.CLOSE)


class RemoteRank:
    """A rank on another node, with the interface of ``RankProcess`` that ``RankWorkers`` needs."""

    def __init__(self, rank: int, link: socket.socket, node: JoinedNode) -> None:
        self.rank = rank
        self.link = link
        self._node = node

    @property
    def place(self) -> str:
        """Where the rank runs, for the log."""
        return f"node {self._node.rank}"

    def exit_reason(self) -> str:
        """Returns how the rank ended, as a sentence. Call it after the link has closed."""
        return self._node.exit_reason

    def kill(self) -> None:
        """Kills all ranks of its node."""
        self._node.abort()

    def close_link(self) -> None:
        """Shuts down the link, which ends the process."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        """Waits for its node to end, and drops the node at ``deadline`` (monotonic clock)."""
        if not self._node.ended.wait(max(0.0, deadline - time.monotonic())):
            self.kill()
        self.link.close()
