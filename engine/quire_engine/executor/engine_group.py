"""``EngineGroup``: an engine's membership in a group of data-parallel engines that share the experts of an MoE model.
Each engine has its own scheduler, KV memory and other weights. The engines run their forward passes together.

Engine 0 runs the coordinator. Each other engine has one connection to it, served by its own thread, which carries the
timing of passes and the addresses of ranks. Tokens travel directly between the ranks.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Condition, Event, Thread
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
from quire_engine.executor.node_link import Frame, FrameKind, LinkEndedError, NodeLink
from quire_engine.executor.rendezvous import Rendezvous, RendezvousHub, facts_in_common, join

log = logging.getLogger(__name__)
T = TypeVar("T")

# After a failed exchange, the time to wait for the report of which engine is lost.
LOSS_SECONDS = 3.0
# A value may be stored between a lookup and the wait for it.
STORED_POLL_SECONDS = 0.05


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
        self._changed = Condition()
        self._loss: str | None = None
        self._is_over = False
        self._ranks: RankGroup | None = None
        self._put_stored: Callable[[str, bytes], None] | None = None
        self._values: dict[str, bytes] = {}
        self.store = RankStore(self.publish, self._wait_for_stored)
        self.lockstep = Lockstep(self._send)
        kind = _Coordinating if rendezvous.rank == 0 else _Following
        self._end: _Coordinating | _Following = kind(rendezvous, facts, self._receive, self._lose)
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

    def publish(self, key: str, value: bytes) -> None:
        """Stores a value for the ranks of all other engines. Thread-safe."""
        self._end.post(FrameKind.STORED, [key, value.hex()])

    def share_store(self, put_stored: Callable[[str, bytes], None]) -> None:
        """Calls ``put_stored`` with each value that other engines have stored or will store."""
        with self._changed:
            self._put_stored, values = put_stored, dict(self._values)
        for key, value in values.items():
            put_stored(key, value)

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
        self._end.post(FrameKind.DP_MESSAGE, [message.kind, message.number, message.reason])

    def _wait_for_stored(self) -> None:
        with self._changed:
            if self._loss is not None:
                raise ModelError(self._loss)
            self._changed.wait(STORED_POLL_SECONDS)

    # On the thread of the links

    def _receive(self, kind: FrameKind, value: Any) -> None:
        """Handles what another engine or the coordinator sent to this engine."""
        if kind == FrameKind.STORED:
            key, stored = _to_stored(value)
            self.store.put(key, stored)
            with self._changed:
                self._values[key], put_stored = stored, self._put_stored
                self._changed.notify_all()
            if put_stored is not None:
                put_stored(key, stored)
            return
        message = to_message(value)
        if message.kind == DPMessageKind.LOST:
            self._lose(message.reason)
        else:
            self._is_over |= message == DPMessage(DPMessageKind.FINISHED, SERVING)
            self.lockstep.receive(message)

    def _lose(self, reason: str) -> None:
        """Ends the group, unless it has ended already."""
        with self._changed:
            if self._is_over or self._loss is not None:
                return
            self._loss = reason
            self._changed.notify_all()
        self.lockstep.receive(DPMessage(DPMessageKind.LOST, reason=reason))
        if self._ranks is not None:
            self._ranks.abort()
        if self._on_lost is None:
            log.error("%s", reason)
        else:
            self._on_lost(reason)


def to_message(value: Any) -> DPMessage:
    """Parses a DP_MESSAGE frame. Raises ``LinkEndedError``."""
    try:
        kind, number, reason = value
        return DPMessage(DPMessageKind(kind), int(number), str(reason))
    except (TypeError, ValueError):
        raise LinkEndedError("has sent something that is not a message") from None


def _to_stored(value: Any) -> tuple[str, bytes]:
    """Returns the key and value of a STORED frame. Raises ``LinkEndedError``."""
    try:
        key, stored = value
        return str(key), bytes.fromhex(stored)
    except (TypeError, ValueError):
        raise LinkEndedError("has sent something that is not a message") from None


def _lost(name: str, reason: str) -> str:
    return f"{name} {reason}, and the engines of its group cannot go on without it."


Receive = Callable[[FrameKind, Any], None]
Lose = Callable[[str], None]
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Coordinating:
    """Engine 0's side of the links. Calls ``receive`` and ``lose`` on the thread of the links."""

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], receive: Receive, lose: Lose) -> None:
        self._receive_own = receive
        self._lose = lose
        self._coordinator = DPCoordinator(rendezvous.count)
        self._engines: dict[int, JoinedEngine] = {}  # by rank; exists before an engine can join and be lost
        self._hub: RendezvousHub[JoinedEngine] = RendezvousHub(rendezvous, facts, self._make_engine)
        try:
            self._hub.wait_joined()
        except BaseException:
            self._hub.close()
            raise
        # If an engine restarts, it must find the next engine 0 and not this one, which is about to end.
        self._hub.stop_listening()
        self.own_address = self._hub.addresses[0]
        self._hub.call(self._send_all, FrameKind.READY, None, 0)

    def post(self, kind: FrameKind, value: Any) -> None:
        """Passes a message of engine 0 to the coordinator."""
        self._hub.call(self._receive, 0, kind, value)

    def close(self) -> None:
        """Ends all links."""
        self._hub.close()

    def _make_engine(
        self, rank: int, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> "JoinedEngine":
        engine = JoinedEngine(rank, address, (reader, writer), self._receive, self._lose_engine)
        self._engines[rank] = engine
        return engine

    def _receive(self, rank: int, kind: FrameKind, value: Any) -> None:
        """Handles a message of engine ``rank``: relays stored values, and passes the rest to the coordinator."""
        if kind == FrameKind.STORED:
            self._send_all(kind, value, but=rank)
        elif (answer := self._coordinator.receive(to_message(value))) is not None:
            self._send_all(FrameKind.DP_MESSAGE, [answer.kind, answer.number, answer.reason])

    def _lose_engine(self, reason: str) -> None:
        self._send_all(FrameKind.DP_MESSAGE, [DPMessageKind.LOST, 0, reason], but=0)
        self._lose(reason)

    def _send_all(self, kind: FrameKind, value: Any, but: int | None = None) -> None:
        for engine in self._engines.values():
            if engine.rank != but:
                with suppress(OSError):  # it is gone; its link notices that too
                    engine.link.send(kind, value)
        if but != 0:
            self._receive_own(kind, value)


class JoinedEngine:
    """Another engine, from engine 0's side. Implements ``Member``. Calls ``receive`` with the engine's rank and each
    message.
    """

    def __init__(
        self, rank: int, address: str, link: Link, receive: Callable[[int, FrameKind, Any], None], lose: Lose
    ) -> None:
        self.rank = rank
        self.address = address
        self.accepted = None
        self.link = NodeLink(*link, {}, self._on_frame, _no_sockets)
        self._receive = receive
        self._lose = lose

    def end(self, reason: str) -> None:
        """See ``Member.end``."""
        self._lose(_lost(f"Engine {self.rank} ({self.address})", reason))

    async def _on_frame(self, frame: Frame) -> None:
        self._receive(self.rank, _checked(frame), frame.value)


class _Following:
    """The link of another engine to engine 0. Calls ``receive`` and ``lose`` on the thread of the link."""

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], receive: Receive, lose: Lose) -> None:
        self._rendezvous = rendezvous
        self._receive = receive
        self._lose = lose
        self.own_address = ""
        self._link: NodeLink | None = None
        self._failures: list[BaseException] = []
        self._started = Event()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run_loop, args=(facts,), name="engine-link", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failures:
            self._thread.join()
            raise self._failures[0]

    def post(self, kind: FrameKind, value: Any) -> None:
        """Sends a message of this engine to the coordinator."""
        assert self._link is not None, "it has joined"
        with suppress(RuntimeError):  # the link has ended
            self._loop.call_soon_threadsafe(self._link.send, kind, value)

    def close(self) -> None:
        """Ends the link."""
        assert self._link is not None, "it has joined"
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._link.abort)
        self._thread.join()

    def _run_loop(self, facts: Mapping[str, Any]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._run(facts))
            except BaseException as failure:  # noqa: BLE001 - the constructor raises it
                self._failures.append(failure)
            finally:
                self._started.set()

    async def _run(self, facts: Mapping[str, Any]) -> None:
        master = self._rendezvous.sentence_start
        try:
            joined = await join(self._rendezvous, facts, asyncio.Event())
        except LinkEndedError as error:
            raise ModelError(f"{master} {error}, and this engine ends.") from None
        self.own_address = joined.own_address
        self._link = NodeLink(joined.reader, joined.writer, {}, self._on_frame, _no_sockets)
        reason = await self._link.run()
        if not self._started.is_set():
            raise ModelError(f"{master} {reason}, and this engine ends.")
        self._lose(_lost(master, reason))

    async def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READY:
            self._started.set()
        else:
            self._receive(_checked(frame), frame.value)


def _checked(frame: Frame) -> FrameKind:
    """Returns the kind of ``frame``. Raises ``LinkEndedError`` for kinds that engines do not send to each other."""
    if frame.kind not in (FrameKind.DP_MESSAGE, FrameKind.STORED):
        raise LinkEndedError("has sent something that is not a message")
    return FrameKind(frame.kind)


async def _no_sockets(_: int) -> None:
    """Does nothing: links between engines carry no rank sockets."""
