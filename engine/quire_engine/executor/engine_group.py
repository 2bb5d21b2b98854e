"""``EngineGroup``: an engine's membership in a group of data-parallel engines that share the experts of an MoE model.
Each engine has its own scheduler, KV memory and other weights. The engines run their forward passes together.

Engine 0 runs the coordinator. Each other engine has one connection to it, served by its own thread, which carries the
timing of passes and the addresses of ranks. Tokens travel directly between the ranks.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from quire_proto.tls import TlsError

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.config.capabilities import OFFLINE, Feature
from quire_engine.core.data_parallel import SERVING, DPCoordinator, DPMessage, DPMessageKind, Lockstep
from quire_engine.core.executor import ExecutorError
from quire_engine.distributed.rank_group import EnginePlace, RankGroup, RankStore
from quire_engine.errors import ModelError, first_line
from quire_engine.executor.node_link import NO_MESSAGE, Frame, FrameKind, LinkEndedError, LinkThread, NodeLink
from quire_engine.executor.rendezvous import Rendezvous, RendezvousHub, facts_in_common, join

log = logging.getLogger(__name__)
T = TypeVar("T")

# After a failed exchange, the time to wait for the report of which engine is lost.
LOSS_SECONDS = 3.0


def engine_rendezvous(config: EngineArgs, nodes: NodeArgs) -> Rendezvous:
    """Returns where the engines of a group meet."""
    size, rank = config.data_parallel_size, nodes.data_parallel_rank
    address, port = nodes.data_parallel_address, nodes.data_parallel_rpc_port
    own_address = nodes.node_addr or (address if rank == 0 else None)
    return Rendezvous(
        *("engine", "--data-parallel-size", size, rank, address, port, own_address, nodes.dist_timeout),
        *(nodes.tls, nodes.engine_token_file),
    )


def join_engines(
    config: EngineArgs,
    model_config: ModelConfig,
    device: torch.device,
    nodes: NodeArgs | None,
    on_lost: Callable[[str], None] | None,
) -> "EngineGroup":
    """Joins the data-parallel group of ``config``. Returns when all its engines have joined. Raises ``ModelError``."""
    if nodes is None:
        raise ModelError(OFFLINE.refused[Feature.DATA_PARALLEL])
    facts = facts_in_common(config, model_config, device, {})
    try:
        return EngineGroup(engine_rendezvous(config, nodes), facts, on_lost)
    except TlsError as error:
        raise ModelError(f"{error}.") from error


class EngineGroup:
    """This engine's membership in the group that meets at ``rendezvous``. Waits for all engines; all must have the same
    ``facts``. ``lockstep`` synchronizes their forward passes, and ``store`` is where their ranks exchange addresses.

    ``on_lost`` is called on another thread, with a sentence, when an engine is lost. Without it the sentence is logged.
    Raises ``ModelError``, and ``TlsError`` if the TLS files cannot be used.
    """

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], on_lost: Callable[[str], None] | None) -> None:
        self._on_lost = on_lost
        self._is_over = False
        self._ranks: RankGroup | None = None
        self.store = RankStore()
        self.lockstep = Lockstep(self._send)
        kind = _Coordinating if rendezvous.rank == 0 else _Following
        self._end: _Coordinating | _Following = kind(rendezvous, facts, self)
        self.place = EnginePlace(rendezvous.rank, rendezvous.count, self._end.own_address)
        log.info("engine %d of a group of %d", self.place.dp_rank, self.place.dp_size)

    def connect(self, ranks: RankGroup) -> None:
        """Sets the ``RankGroup`` of this engine's rank 0. If an engine is lost, the group aborts its exchanges."""
        self._ranks = ranks

    def run_pass(self, forward: Callable[[], T], execute_dummy_batch: Callable[[], object]) -> T:
        """Runs ``forward`` as this engine's part of a forward pass of all engines.

        If ``forward`` fails before its first exchange with other engines, as it does for a wrong batch, this engine
        completes the pass with ``execute_dummy_batch`` and raises the error. Raises ``ExecutorError`` if the engines
        cannot continue.
        """
        assert self._ranks is not None, "connect comes first"
        self.lockstep.begin()
        before = self._ranks.num_expert_exchanges
        try:
            result = forward()
        except ExecutorError:
            raise
        except Exception as error:
            if self._ranks.num_expert_exchanges != before:
                raise self._cannot_go_on(error) from error
            self._complete_pass(execute_dummy_batch)
            raise
        self.lockstep.end()
        return result

    @property
    def has_most_tokens(self) -> bool:
        """Whether no other engine had more tokens in the last pass."""
        assert self._ranks is not None, "connect comes first"
        return self._ranks.has_most_tokens

    def execute_dummy_batch(self, execute: Callable[[], object]) -> None:
        """Takes part in a due forward pass without tokens. Raises ``ExecutorError``."""
        self.lockstep.begin()
        self._complete_pass(execute)

    def close(self) -> None:
        """Ends the links. The other engines lose this one, unless all have finished."""
        self._is_over = True
        self._end.close()

    def _complete_pass(self, execute_dummy_batch: Callable[[], object]) -> None:
        try:
            execute_dummy_batch()
        except ExecutorError:
            raise
        except Exception as error:
            raise self._cannot_go_on(error) from error
        self.lockstep.end()

    def _cannot_go_on(self, error: Exception) -> ExecutorError:
        """Returns why the pass cannot complete: an engine is lost, or this engine failed where the others did not."""
        reason = self.lockstep.wait_for_loss(LOSS_SECONDS)
        own = f"This engine failed in a step in which others did not: {type(error).__name__}: {first_line(error)}."
        return ExecutorError(reason or own)

    def _send(self, message: DPMessage) -> None:
        self._end.send(message)

    # On the thread of the links

    def receive(self, message: DPMessage) -> None:
        """Handles a message from the coordinator."""
        if message.kind == DPMessageKind.LOST:
            self.lose(message.reason)
        else:
            self._is_over |= message == DPMessage(DPMessageKind.FINISHED, SERVING)
            self.lockstep.receive(message)

    def lose(self, reason: str) -> None:
        """Ends the group, unless it has ended already."""
        if self._is_over:
            return
        self._is_over = True
        self.store.fail(ModelError(reason))
        self.lockstep.receive(DPMessage(DPMessageKind.LOST, reason=reason))
        if self._ranks is not None:
            self._ranks.abort()
        if self._on_lost is None:
            log.error("%s", reason)
        else:
            self._on_lost(reason)


class EngineLink:
    """A link between engine 0 and another engine, from either side. Passes what arrives to ``receiver``. ``started`` is
    set when engine 0 says that all engines have joined. Use it on the thread of the link.
    """

    def __init__(
        self, link: NodeLink, receiver: "EngineGroup | _Coordinating", started: "Future[None] | None" = None
    ) -> None:
        self._link = link
        self._receiver = receiver
        self._started = started

    async def run(self) -> str:
        """See ``NodeLink.run``."""
        return await self._link.run(self._on_frame)

    def send(self, message: DPMessage) -> None:
        """Sends a message. An end of the link is noticed by ``run``."""
        self._send(FrameKind.DP_MESSAGE, [message.kind, message.number, message.reason])

    def send_stored(self, key: str, value: bytes) -> None:
        """Sends a value of the store."""
        self._send(FrameKind.STORED, [key, value.hex()])

    def send_ready(self) -> None:
        """Tells the engine that all have joined."""
        self._send(FrameKind.READY, None)

    def _send(self, kind: FrameKind, value: object) -> None:
        with suppress(OSError):
            self._link.send(kind, value)

    async def _on_frame(self, frame: Frame) -> None:
        try:
            match frame.kind, frame.value:
                case FrameKind.DP_MESSAGE, [kind, number, reason]:
                    message = DPMessage(DPMessageKind(kind), int(number), str(reason))
                case FrameKind.STORED, [str(key), str(value)]:
                    self._receiver.store.put(key, bytes.fromhex(value), self)
                    return
                case FrameKind.READY, None if self._started is not None and not self._started.done():
                    self._started.set_result(None)
                    return
                case _:
                    raise LinkEndedError(NO_MESSAGE)
        except (TypeError, ValueError):
            raise LinkEndedError(NO_MESSAGE) from None
        self._receiver.receive(message)


class JoinedEngine(EngineLink):
    """Another engine, from engine 0's side. Implements ``Member``."""

    accepted = None

    def __init__(self, rank: int, address: str, link: NodeLink, receiver: "_Coordinating") -> None:
        super().__init__(link, receiver)
        self.rank = rank
        self.address = address

    def end(self, reason: str) -> None:
        """See ``Member.end``."""
        self._receiver.lose(_lost(f"Engine {self.rank} ({self.address})", reason))


class _Coordinating(RendezvousHub[JoinedEngine]):
    """Engine 0's side of the links, for its ``group``."""

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], group: EngineGroup) -> None:
        self._group = group
        self.store = group.store
        self._coordinator = DPCoordinator(rendezvous.count)
        super().__init__(rendezvous, facts)
        try:
            self.wait_joined()
        except BaseException:
            self.close()
            raise
        # If an engine restarts, it must find the next engine 0 and not this one, which is about to end.
        self.stop_listening()
        for engine in self.members:
            self.store.attach(engine, partial(self.call, engine.send_stored))
            self.call(engine.send_ready)

    def send(self, message: DPMessage) -> None:
        """Passes a message of engine 0 to the coordinator."""
        self.call(self.receive, message)

    def make_member(self, rank: int, address: str, link: NodeLink) -> JoinedEngine:
        """See ``RendezvousHub.make_member``."""
        return JoinedEngine(rank, address, link, self)

    def receive(self, message: DPMessage) -> None:
        """Passes a message of any engine to the coordinator, and its answer to all engines."""
        if (answer := self._coordinator.receive(message)) is not None:
            self._send_all(answer)
            self._group.receive(answer)

    def lose(self, reason: str) -> None:
        """Ends the group because an engine is lost."""
        self._send_all(DPMessage(DPMessageKind.LOST, reason=reason))
        self._group.lose(reason)

    def _send_all(self, message: DPMessage) -> None:
        for engine in self.members:
            engine.send(message)


class _Following:
    """Another engine's side of its link to engine 0, for its ``group``."""

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], group: EngineGroup) -> None:
        self._group = group
        self._thread = LinkThread("engine-link", partial(self._serve, rendezvous, facts))
        group.store.attach(self._link, partial(self._thread.call, self._link.send_stored))

    def send(self, message: DPMessage) -> None:
        """Sends a message of this engine to the coordinator."""
        self._thread.call(self._link.send, message)

    def close(self) -> None:
        """Ends the link."""
        self._thread.close()

    async def _serve(self, rendezvous: Rendezvous, facts: Mapping[str, Any], started: "Future[None]") -> None:
        master = rendezvous.sentence_start
        try:
            joined = await join(rendezvous, facts, asyncio.Event())
        except LinkEndedError as error:
            raise ModelError(f"{master} {error}, and this engine ends.") from None
        self.own_address = joined.own_address
        self._link = EngineLink(joined.link, self._group, started)
        reason = await self._link.run()
        if not started.done():
            raise ModelError(f"{master} {reason}, and this engine ends.")
        self._group.lose(_lost(master, reason))


def _lost(name: str, reason: str) -> str:
    return f"{name} {reason}, and the engines of its group cannot go on without it."
