"""``EngineGroup``: an engine's place among data-parallel engines, which share the experts of a mixture. Each has a
scheduler, KV memory and all other weights of its own; they meet at engine 0, and make their forward passes together.

Engine 0 has the coordinator. Each other engine has one connection to it, with a thread of its own, which carries when
passes are made and how ranks find each other. Tokens do not go there, but straight to the ranks of their experts.
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

# In which it is known which engine is lost, once an exchange with it has failed.
LOSS_SECONDS = 3.0
# A value may have been stored between a look and the wait for it.
STORED_POLL_SECONDS = 0.05


def engine_rendezvous(config: EngineArgs, nodes: NodeArgs) -> Rendezvous:
    """Where the engines of a group meet."""
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
    """The group of an engine with these settings, once all its engines are there. Raises ``ModelError``."""
    if nodes is None:
        raise ModelError(OFFLINE.refused[Feature.DATA_PARALLEL])
    facts = facts_in_common(config, model_config, device, {})
    try:
        return EngineGroup(engine_rendezvous(config, nodes), facts, on_lost)
    except TlsError as error:
        raise ModelError(f"{error}.") from error


class EngineGroup:
    """This engine's place among those that meet at ``rendezvous`` and have ``facts`` in common, all of which are waited
    for. ``on_lost`` is called with a sentence, on another thread, when one of them is lost; without it, that is logged.
    Raises ``ModelError``, and ``TlsError`` for files of TLS.

    ``lockstep`` is this engine's part in their forward passes, and ``store`` is where their ranks find each other.
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
        """``ranks`` are the links of this engine's rank 0, whose exchanges end with the group."""
        self._ranks = ranks

    def run_pass(self, forward: Callable[[], T], execute_dummy_batch: Callable[[], object]) -> T:
        """Makes a forward pass together with the other engines. Where ``forward`` fails before it has exchanged
        anything with them, as it does for a wrong batch, ``execute_dummy_batch`` is this engine's part of the pass,
        and the error is raised. Raises ``ExecutorError`` where the engines cannot go on.
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
        """Takes part in a forward pass that is due, without tokens. Raises ``ExecutorError``."""
        self.lockstep.begin()
        self._complete_pass(execute)

    def publish(self, key: str, value: bytes) -> None:
        """Stores a value for the ranks of all other engines. May be called from any thread."""
        self._end.post(FrameKind.STORED, [key, value.hex()])

    def share_store(self, put_stored: Callable[[str, bytes], None]) -> None:
        """Has ``put_stored`` called with what other engines have stored and will store."""
        with self._changed:
            self._put_stored, values = put_stored, dict(self._values)
        for key, value in values.items():
            put_stored(key, value)

    def close(self) -> None:
        """Ends the links. The other engines cannot go on, unless all have finished."""
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
        """Why a pass cannot be ended: an engine is lost, or this one has failed where the others have not."""
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
        """Something has come for this engine."""
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
        """The group ends, unless it has ended already."""
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
    """The message of a DP_MESSAGE frame. Raises ``LinkEndedError``."""
    try:
        kind, number, reason = value
        return DPMessage(DPMessageKind(kind), int(number), str(reason))
    except (TypeError, ValueError):
        raise LinkEndedError("has sent something that is not a message") from None


def _to_stored(value: Any) -> tuple[str, bytes]:
    """Key and value of a STORED frame. Raises ``LinkEndedError``."""
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
    """Engine 0's end of the links. ``receive`` and ``lose`` are called on their thread."""

    def __init__(self, rendezvous: Rendezvous, facts: Mapping[str, Any], receive: Receive, lose: Lose) -> None:
        self._receive_own = receive
        self._lose = lose
        self._coordinator = DPCoordinator(rendezvous.count)
        self._engines: dict[int, JoinedEngine] = {}  # by rank; here before any can join, and be lost
        self._hub: RendezvousHub[JoinedEngine] = RendezvousHub(rendezvous, facts, self._make_engine)
        try:
            self._hub.wait_joined()
        except BaseException:
            self._hub.close()
            raise
        # Whoever is started again finds the next engine 0, and not this one, which is about to end.
        self._hub.stop_listening()
        self.own_address = self._hub.addresses[0]
        self._hub.call(self._send_all, FrameKind.READY, None, 0)

    def post(self, kind: FrameKind, value: Any) -> None:
        """This engine has something for the coordinator."""
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
        """Engine ``rank`` has something for the coordinator, or for all."""
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
                with suppress(OSError):  # it is gone, as its link finds too
                    engine.link.send(kind, value)
        if but != 0:
            self._receive_own(kind, value)


class JoinedEngine:
    """Another engine as engine 0 has it. A ``Member``. ``receive`` is called with its number and what it sends."""

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
    """Another engine's end of its link to engine 0. ``receive`` and ``lose`` are called on its thread."""

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
        """This engine has something for the coordinator."""
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
            except BaseException as failure:  # noqa: BLE001 - raised where this was made
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
    """Its kind. Raises ``LinkEndedError`` for one that engines do not send each other."""
    if frame.kind not in (FrameKind.DP_MESSAGE, FrameKind.STORED):
        raise LinkEndedError("has sent something that is not a message")
    return FrameKind(frame.kind)


async def _no_sockets(_: int) -> None:
    """Links between engines carry no ranks' sockets."""
