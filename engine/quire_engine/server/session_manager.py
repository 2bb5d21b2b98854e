"""All sessions of an engine, and the requests that they submitted.

``SessionManager`` sends each step's outputs to the sessions of their requests, and aborts the requests of sessions that
have ended.

Everything here runs on the event loop, to which the core hands its steps in their order.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf

from quire.v1 import engine_pb2 as pb
from quire_proto.errors import ErrorCode, QuireError

from quire_engine.core.block_pool import BlockStored
from quire_engine.core.engine_core import (
    AbortRequest,
    AddRequest,
    EngineCoreOutputs,
    GetBlockStates,
    GetSnapshot,
    RemoveLoRA,
)
from quire_engine.core.lora import no_loras
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad
from quire_engine.core.request import Request
from quire_engine.core_client.client import EngineCoreClient
from quire_engine.server.load_report import LoadReport, UpdateTimer
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.messages import (
    abort_to_proto,
    cached_to_proto,
    events_to_proto,
    is_tokens,
    output_to_proto,
    refusal_to_proto,
    request_from_proto,
)
from quire_engine.server.pending_grammars import PendingGrammars
from quire_engine.server.session import Session, SessionOverflowError
from quire_engine.server.session_table import LiveRequest, LiveRequests, SessionTable
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarCompiler

log = logging.getLogger(__name__)
MAX_SESSIONS = 256
HEARTBEAT_INTERVAL = 0.25
"""Seconds. A router that waits for tokens hears from a live engine within two intervals, even during a long step:
heartbeats come from the event loop, not from the core's thread.
"""


@dataclass(slots=True)
class _SessionStep:
    """The part of a step for one session."""

    outputs: list[pb.SequenceOutput] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add_token(self, live: LiveRequest, index: int, token_id: int, position: int) -> None:
        """Adds a token that came alone. It is not the first of its request."""
        if live.handle:
            self.handles.append(live.handle + index)
            self.token_ids.append(token_id)
            self.positions.append(position)
        else:
            self.outputs += output_to_proto(EngineCoreOutput("", [token_id], position, index=index), live.request_id)

    def add(self, live: LiveRequest, output: EngineCoreOutput) -> None:
        if live.handle and live.started and is_tokens(output):
            handle, position = live.handle + output.index, output.position
            for token_id in output.token_ids:  # several if drafts were accepted
                self.handles.append(handle)
                self.token_ids.append(token_id)
                self.positions.append(position)
                position += 1
        else:
            live.started = True
            self.outputs += output_to_proto(output, live.request_id)

    @property
    def tokens(self) -> pb.TokenColumns | None:
        if not self.handles:
            return None
        return pb.TokenColumns(handles=self.handles, token_ids=self.token_ids, positions=self.positions)


class SessionManager:
    """Maps live requests to sessions, and passes commands to ``core`` and steps to the sessions. A request whose
    grammar is not compiled yet is live, but not yet in the core.

    Sessions belong to the engine's ``generation``, and last ``grace`` seconds without a stream. ``on_first_session`` is
    called once.
    """

    def __init__(
        self,
        core: EngineCoreClient,
        generation: int,
        grace: float,
        tracing: TraceExporter,
        grammars: GrammarCompiler,
        *,
        loras: LoRARegistry | None = None,
        on_first_session: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self.loras = LoRARegistry(no_loras, []) if loras is None else loras
        self.loras.on_change, self.loras.on_unused = self._send_loras, self._remove_lora
        self.loras.on_active = self._send_active_loras
        self._tracing = tracing
        self._grammars = PendingGrammars(grammars, self._start, self._refuse)
        self._sessions = SessionTable(generation, grace)
        self._requests = LiveRequests(self.loras)
        self._load = LoadReport()
        self._update_timer = UpdateTimer(self._send_updates)
        self._step = 0
        self._on_first_session = on_first_session
        self.draining = False

    @property
    def in_progress(self) -> int:
        """The number of live requests."""
        return len(self._requests)

    async def wait_idle(self) -> None:
        """Waits until no request is live."""
        await self._requests.wait_idle()

    def drain(self) -> None:
        """Refuses new requests from now on, and tells every session at once. Running requests continue."""
        self.draining = True
        for session in self._sessions:
            session.draining = True
            self._send(session, 0, [], [])

    async def send_heartbeats(self) -> None:
        """Sends a batch to each session with requests that got none in an interval, for example during a long step.
        Never returns.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Sends a batch to each session with requests that got none since the last call."""
        for session in self._sessions.take_silent():
            self._send(session, 0, [], [])

    async def open(self, message: pb.Open) -> tuple[Session, int, pb.SessionResponse]:
        """Opens or resumes a session. Returns the session, the number of its new stream, and the snapshot to send
        first.

        Raises ``QuireError`` OVERLOADED if there are too many sessions.
        """
        session = self._sessions.get(message.session_id)
        if session is not None and session.can_resume(message.last_sequence):
            self._sessions.keep(session)
            session.updates.set(message.updates)
            session.batches.acknowledge(message.last_sequence)
            return session, session.attach(), session.snapshot(self._load.message, [], self.loras, resumed=True)
        if session is not None:
            self.close(session)
        return await self._open_new(message)

    def detach(self, session: Session, number: int) -> None:
        """Handles the end of stream ``number``. Without a newer one, the session closes after the grace period, or at
        once if it is finished.
        """
        if not (self._sessions.is_open(session) and session.is_attached(number)):
            return
        if session.is_finished:
            self.close(session)
        else:
            self._sessions.expire(session, self.close)

    def close(self, session: Session) -> None:
        """Removes a session and aborts its requests."""
        if not self._sessions.is_open(session):
            return
        self._sessions.remove(session)
        session.attach()
        for key in list(session.requests.values()):
            self._tracing.on_abandoned(key)
            if self._grammars.withdraw(key) is None:
                self.core.send(AbortRequest(key))
            self._requests.remove(key)

    def falling_asleep(self) -> AbstractContextManager[None]:
        """Within this context every session hears that the engine is falling asleep, until it sleeps."""
        return self._load.falling_asleep(self._send_load)

    def _send_load(self) -> None:
        for session in self._sessions:
            self._send(session, 0, [], [])

    def submit(self, session: Session, message: pb.Submit) -> None:
        """Starts a request, or sends the error that refuses it."""
        try:
            self._submit(session, message)
        except QuireError as error:
            self._send(session, 0, refusal_to_proto(message.request_id, error), [])

    def cancel(self, session: Session, request_id: str, indexes: tuple[int, ...] = ()) -> None:
        """Cancels a request of this session, or some of its choices. Ignores ids that the session has not submitted."""
        key = session.requests.get(request_id)
        if key is None or (indexes and self._grammars.cancel(key, indexes)):
            return
        if not indexes and (request := self._grammars.withdraw(key)) is not None:
            self._finish_unstarted(key, abort_to_proto(request_id, request))
        else:
            self.core.send(AbortRequest(key, indexes))

    def set_updates(self, session: Session, updates: pb.SetUpdates) -> None:
        """Changes how often a session gets updates."""
        session.updates.set(updates)
        self._send_updates()

    def publish(self, step: EngineCoreOutputs) -> None:
        """Sends every session its outputs of a step at once, with the engine's load and the changes of its cache. A
        session without outputs gets the load and the changes with its next update.
        """
        self._step = step.trace.step
        woke_or_slept = self._load.set(step.load)
        live_requests = self._requests.by_key
        steps: defaultdict[str, _SessionStep] = defaultdict(_SessionStep)
        tokens = step.tokens
        columns = zip(tokens.request_ids, tokens.indexes, tokens.token_ids, tokens.positions, strict=True)
        for request_id, index, token_id, position in columns:
            if (live := live_requests.get(request_id)) is not None:
                steps[live.session.session_id].add_token(live, index, token_id, position)
        for output in step.outputs:
            if (live := live_requests.get(output.request_id)) is not None:
                steps[live.session.session_id].add(live, output)
                if output.ends_request:
                    self._requests.remove(output.request_id)
        events = events_to_proto(step.kv_events) if steps else []
        for session in self._sessions:
            found = steps.get(session.session_id)
            if found is None or session.updates.has_deferred:
                session.updates.defer(step.kv_events)
            if found is not None:
                new = () if session.updates.has_deferred else events
                self._send(session, self._step, found.outputs, new, found.tokens)
        if woke_or_slept:
            self._send_load()
        self._send_updates()
        self._tracing.on_step(step)  # last: if tracing raises, the tokens have been sent

    def _send_updates(self) -> None:
        """Sends the updates that are due, and sets a timer for the next ones. An update after a pause is due at
        once.
        """
        now, next_due = asyncio.get_running_loop().time(), inf
        for session in self._sessions:
            if session.updates.has_deferred and session.updates.due <= now:
                self._send(session, self._step, [], [])
            elif session.updates.has_deferred:
                next_due = min(next_due, session.updates.due)
        self._update_timer.set(next_due)

    def _send(
        self,
        session: Session,
        step: int,
        outputs: Sequence[pb.SequenceOutput],
        events: Sequence[pb.KvEvent],
        tokens: pb.TokenColumns | None = None,
    ) -> None:
        try:
            now = asyncio.get_running_loop().time()
            session.publish(step, outputs, self._load.message, events, tokens, now=now)
        except SessionOverflowError:
            log.warning("closing session %s: it does not read what it is sent", session.session_id)
            self.close(session)

    def _submit(self, session: Session, message: pb.Submit) -> None:
        if self.draining:
            raise QuireError(ErrorCode.UNAVAILABLE, "The engine is shutting down.", retry_after=1.0)
        if message.request_id in session.requests:
            return  # repeated by a router that could not know whether the first one had arrived
        lora = self.loras.find(message.lora_name, message.lora_digest) if message.lora_name else None
        request = replace(request_from_proto(message, self._requests.next_key()), lora=lora)
        grammar = self._grammars.compile(request)
        self._requests.add(session, message, request)
        self._tracing.on_submit(request)
        if grammar is None:
            self._start(request)
        else:
            self._grammars.start(request, grammar)

    def _start(self, request: Request, cancelled: Sequence[tuple[int, ...]] = ()) -> None:
        self.core.send(AddRequest(request))
        for indexes in cancelled:
            self.core.send(AbortRequest(request.request_id, indexes))

    def _refuse(self, request: Request, error: QuireError) -> None:
        request_id = self._requests.by_key[request.request_id].request_id
        self._finish_unstarted(request.request_id, refusal_to_proto(request_id, error))

    def _finish_unstarted(self, key: str, outputs: Sequence[pb.SequenceOutput]) -> None:
        """Ends a request that was not sent to the core."""
        session = self._requests.remove(key).session
        self._tracing.on_abandoned(key)
        self._send(session, 0, outputs, [])

    def _send_loras(self) -> None:
        """Sends every session the engine's adapters, which have changed."""
        for session in self._sessions:
            session.loras = self.loras.to_proto()
            self._send(session, 0, [], [])

    def _send_active_loras(self) -> None:
        """Adds the adapters in use to the next batch of every session."""
        for session in self._sessions:
            session.active_loras = pb.ActiveLoras(names=self.loras.active)
            session.updates.has_deferred = True
        self._send_updates()

    def _remove_lora(self, lora_id: int) -> None:
        self.core.send(RemoveLoRA(lora_id))

    async def block_states(self) -> tuple[bytes, bytes]:
        """Returns the states of the device's and the host's blocks (see ``BlockPool.block_states``)."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[bytes, bytes]] = loop.create_future()

        def resolve(device: bytes, host: bytes) -> None:
            if not found.done():  # otherwise the caller has gone
                found.set_result((device, host))

        def reply(device: bytes, host: bytes) -> None:
            loop.call_soon_threadsafe(resolve, device, host)

        self.core.send(GetBlockStates(reply))
        return await found

    async def _open_new(self, message: pb.Open) -> tuple[Session, int, pb.SessionResponse]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise QuireError(ErrorCode.OVERLOADED, "The engine has too many sessions.", retry_after=1.0)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[tuple[Session, int, pb.SessionResponse]] = loop.create_future()

        def reply(load: EngineLoad, stored: list[BlockStored]) -> None:
            loop.call_soon_threadsafe(self._register, message, load, stored, opened)

        self.core.send(GetSnapshot(reply))
        try:
            return await opened
        except asyncio.CancelledError:
            if opened.done() and not opened.cancelled():
                self.close(opened.result()[0])
            raise

    def _register(
        self,
        message: pb.Open,
        load: EngineLoad,
        stored: list[BlockStored],
        opened: "asyncio.Future[tuple[Session, int, pb.SessionResponse]]",
    ) -> None:
        """Registers a session. Runs on the loop between the step before the snapshot and the step after it, so that the
        session misses none.
        """
        if opened.cancelled():
            return
        if (other := self._sessions.get(message.session_id)) is not None:
            self.close(other)
        self._load.set(load)
        session = self._sessions.add(message, draining=self.draining)
        snapshot = session.snapshot(self._load.message, cached_to_proto(stored), self.loras, resumed=False)
        opened.set_result((session, session.attach(), snapshot))
        if (found := self._on_first_session) is not None:
            self._on_first_session = None
            found()
