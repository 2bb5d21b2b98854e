"""All sessions of an engine: sends each step's news to whom it concerns, and ends what nobody listens to any more.

Everything here runs on the event loop; the core's thread hands its news over with ``call_soon_threadsafe``, which
keeps their order.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from quire.v1 import engine_pb2 as pb
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.structured_output import Structured

from quire_engine.core.block_pool import BlockStored
from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCore, EngineCoreOutputs, GetSnapshot
from quire_engine.core.outputs import EngineLoad
from quire_engine.core.request import Request
from quire_engine.server.messages import (
    abort_to_proto,
    cached_to_proto,
    events_to_proto,
    load_to_proto,
    output_to_proto,
    refusal_to_proto,
    request_from_proto,
)
from quire_engine.server.session import Session, SessionOverflowError
from quire_engine.server.step_time_model import StepTimeEstimator
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import Compiled, GrammarCompiler

log = logging.getLogger(__name__)

# Requests whose grammars are being compiled. Runs on the event loop.


# Seconds that a request waits for its grammar. One that is compiled takes a second or two at most: the rest is a queue.
GRAMMAR_TIMEOUT_SECONDS = 15.0

Ready = Callable[[Request, list[tuple[int, ...]]], None]
Failed = Callable[[Request, QuireError], None]
Withdrawn = Callable[[Structured], None]


@dataclass(slots=True)
class _Waiting:
    request: Request
    timer: asyncio.TimerHandle
    cancelled: list[tuple[int, ...]] = field(default_factory=list)


class PendingGrammars:
    """For each request that was not withdrawn, calls either ``ready``, with the grammar in the request and the choices
    cancelled meanwhile, or ``failed``.
    """

    def __init__(self, ready: Ready, failed: Failed, withdrawn: Withdrawn) -> None:
        self._ready = ready
        self._failed = failed
        self._withdrawn = withdrawn
        self._waiting: dict[str, _Waiting] = {}

    def start(self, request: Request, compiled: "Future[Compiled]") -> None:
        """Waits for the request's grammar; calls back at once when it is there."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(GRAMMAR_TIMEOUT_SECONDS, self._time_out, request.request_id)
        self._waiting[request.request_id] = _Waiting(request, timer)
        if compiled.done():
            self._on_compiled(request.request_id, compiled)
        else:
            compiled.add_done_callback(lambda done: _on_loop(loop, self._on_compiled, request.request_id, done))

    def withdraw(self, key: str) -> Request | None:
        """Takes a request back, None when it does not wait here."""
        waiting = self._pop(key)
        if waiting is None:
            return None
        self._release_grammar(waiting.request)
        return waiting.request

    def cancel(self, key: str, indexes: tuple[int, ...]) -> bool:
        """Remembers choices that are not to be run. False when the request does not wait here."""
        if (waiting := self._waiting.get(key)) is None:
            return False
        waiting.cancelled.append(indexes)
        return True

    def _on_compiled(self, key: str, compiled: "Future[Compiled]") -> None:
        waiting = self._pop(key)
        if waiting is None:
            return
        if (error := _error_of(compiled)) is not None:
            self._failed(waiting.request, error)
        else:
            self._ready(replace(waiting.request, grammar=compiled.result()), waiting.cancelled)

    def _time_out(self, key: str) -> None:
        if (waiting := self._pop(key)) is not None:
            self._release_grammar(waiting.request)
            message = "The engine has too many grammars to compile."
            self._failed(waiting.request, QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0))

    def _release_grammar(self, request: Request) -> None:
        if request.sampling.structured is not None:
            self._withdrawn(request.sampling.structured)

    def _pop(self, key: str) -> _Waiting | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting


def _on_loop(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[str, "Future[Compiled]"], None],
    key: str,
    done: "Future[Compiled]",
) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(settle, key, done)


def _error_of(compiled: "Future[Compiled]") -> QuireError | None:
    if compiled.cancelled():
        return QuireError(ErrorCode.UNAVAILABLE, "The engine is shutting down.", retry_after=1.0)
    error = compiled.exception()
    if error is None or isinstance(error, QuireError):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    return internal()


MAX_SESSIONS = 256
HEARTBEAT_INTERVAL = 0.5
IDLE_UPDATE_INTERVAL = 0.1
"""Seconds from one batch to the next, of a session that has no request here. Its router needs to know how busy the
engine is and what it has cached, not of every step: otherwise a router would pay for all steps of a fleet.
"""


class SessionManager:
    """Knows which session each live request belongs to.

    The core knows requests by keys that the hub makes: two routers may choose the same id, and an id may be submitted
    again while the core is still ending its last use. A request whose grammar is not compiled yet is live, but the core
    has not heard of it.
    """

    def __init__(
        self, generation: int, grace: float, spans: TraceExporter, grammars: GrammarCompiler, pace: StepTimeEstimator
    ) -> None:
        self._generation = generation
        self._grace = grace
        self._tracing = spans
        self._step_times = pace
        self._grammars = grammars
        self._pending_grammars = PendingGrammars(self._start, self._refuse, grammars.withdraw)
        self._sessions: dict[str, Session] = {}
        self._live: dict[str, tuple[Session, str]] = {}
        self._keys = count(1)
        self._ended = asyncio.Event()
        self._last_sequences: dict[str, int] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._load = pb.Load()
        self._step = 0
        self._idle_update_due = 0.0
        self._idle_update_timer: asyncio.TimerHandle | None = None
        self._core: EngineCore | None = None
        self.draining = False

    def bind(self, core: EngineCore) -> None:
        """Connects the hub to the core whose ``publish`` it receives."""
        self._core = core

    @property
    def core(self) -> EngineCore:
        """The core that the hub is bound to."""
        assert self._core is not None
        return self._core

    @property
    def in_progress(self) -> int:
        """Requests that are live."""
        return len(self._live)

    async def wait_idle(self) -> None:
        """Returns once no request is live."""
        while self._live:
            self._ended.clear()
            await self._ended.wait()

    def drain(self) -> None:
        """Takes nothing new from now on, and tells every session so at once. What runs goes on."""
        self.draining = True
        for session in list(self._sessions.values()):
            session.draining = True
            self._send(session, 0, [], [])

    async def send_heartbeats(self) -> None:
        """Lets routers that wait for something hear that the engine is there, also while a long step runs."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            for session in list(self._sessions.values()):
                if session.requests and session.sequence == self._last_sequences.get(session.session_id):
                    self._send(session, 0, [], [])
            self._last_sequences = {name: session.sequence for name, session in self._sessions.items()}

    async def open(self, message: pb.Open) -> tuple[Session, int, pb.SessionResponse]:
        """Opens or resumes a session: the session, the number of its new stream, and the snapshot to send first.

        Raises ``QuireError`` OVERLOADED when there are too many sessions.
        """
        session = self._sessions.get(message.session_id)
        if session is not None and session.can_resume(message.last_sequence):
            self._cancel_expiry(session)
            session.acknowledge(message.last_sequence)
            return session, session.attach(), session.snapshot(self._load, [], resumed=True)
        if session is not None:
            self.close(session)
        return await self._open_new(message.session_id)

    def detach(self, session: Session, number: int) -> None:
        """Stream ``number`` broke: without a newer one, the session's requests go on for the grace period only."""
        if self._sessions.get(session.session_id) is not session or not session.is_attached(number):
            return
        if session.is_finished:
            self.close(session)
            return
        loop = asyncio.get_running_loop()
        self._cancel_expiry(session)
        self._expiries[session.session_id] = loop.call_later(self._grace, self.close, session)

    def close(self, session: Session) -> None:
        """Forgets a session and aborts what it has running."""
        if self._sessions.get(session.session_id) is not session:
            return
        del self._sessions[session.session_id]
        self._cancel_expiry(session)
        session.attach()
        for key in session.requests.values():
            del self._live[key]
            self._tracing.on_abandoned(key)
            if self._pending_grammars.withdraw(key) is None:
                self.core.send(AbortRequest(key))
        self._ended.set()

    def submit(self, session: Session, message: pb.Submit) -> None:
        """Starts a request, or answers why not."""
        try:
            self._submit(session, message)
        except QuireError as error:
            self._send(session, 0, refusal_to_proto(message.request_id, error), [])

    def cancel(self, session: Session, request_id: str, indexes: tuple[int, ...] = ()) -> None:
        """Ends a request of this session, or some of its choices; other sessions' requests are not its business."""
        key = session.requests.get(request_id)
        if key is None or (indexes and self._pending_grammars.cancel(key, indexes)):
            return
        if not indexes and (request := self._pending_grammars.withdraw(key)) is not None:
            self._finish_unstarted(key, abort_to_proto(request_id, request))
        else:
            self.core.send(AbortRequest(key, indexes))

    def publish(self, step: EngineCoreOutputs) -> None:
        """Takes in one step's news and hands every session its share: at once where it has requests, else in time."""
        self._step = step.trace.step
        self._load = load_to_proto(step.load, self._step_times.model)
        shares: dict[str, list[pb.SequenceOutput]] = {}
        for output in step.outputs:
            if (live := self._live.get(output.request_id)) is not None:
                session, request_id = live
                shares.setdefault(session.session_id, []).extend(output_to_proto(output, request_id))
                if output.ends_request:
                    self._forget(output.request_id)
        events = events_to_proto(step.kv_events)
        for session in list(self._sessions.values()):
            outputs = shares.get(session.session_id, [])
            if outputs or session.requests:
                self._send(session, self._step, outputs, events)
            else:
                session.defer(events)
        self._schedule_idle_update()
        self._step_times.on_step(step.trace)
        self._tracing.on_step(step)  # last: whatever watching does wrong, the tokens are on their way

    def _schedule_idle_update(self) -> None:
        """Sessions without requests hear of the first step after a pause at once, and of those that follow together."""
        loop = asyncio.get_running_loop()
        if self._idle_update_timer is not None:
            return
        if loop.time() >= self._idle_update_due:
            self._update_idle_sessions()
        else:
            self._idle_update_timer = loop.call_at(self._idle_update_due, self._update_idle_sessions)

    def _update_idle_sessions(self) -> None:
        self._idle_update_timer, told = None, False
        for session in list(self._sessions.values()):
            if session.has_deferred:
                told = True
                self._send(session, self._step, [], [])
        if told:
            self._idle_update_due = asyncio.get_running_loop().time() + IDLE_UPDATE_INTERVAL

    def _send(
        self, session: Session, step: int, outputs: Sequence[pb.SequenceOutput], events: Sequence[pb.KvEvent]
    ) -> None:
        try:
            session.publish(step, outputs, self._load, events)
        except SessionOverflowError:
            log.warning("session %s does not read what it is sent and is closed", session.session_id)
            self.close(session)

    def _submit(self, session: Session, message: pb.Submit) -> None:
        if self.draining:
            raise QuireError(ErrorCode.UNAVAILABLE, "The engine is shutting down.", retry_after=1.0)
        if message.request_id in session.requests:
            return  # repeated by a router that could not know whether it had arrived
        request = request_from_proto(message, str(next(self._keys)))
        structured = request.sampling.structured
        grammar = None if structured is None else self._grammars.submit(structured)
        self._live[request.request_id] = session, message.request_id
        session.requests[message.request_id] = request.request_id
        self._tracing.on_submit(request)
        if grammar is None:
            self._start(request)
        else:
            self._pending_grammars.start(request, grammar)

    def _start(self, request: Request, cancelled: Sequence[tuple[int, ...]] = ()) -> None:
        self.core.send(AddRequest(request))
        for indexes in cancelled:
            self.core.send(AbortRequest(request.request_id, indexes))

    def _refuse(self, request: Request, error: QuireError) -> None:
        _, request_id = self._live[request.request_id]
        self._finish_unstarted(request.request_id, refusal_to_proto(request_id, error))

    def _finish_unstarted(self, key: str, ends: Sequence[pb.SequenceOutput]) -> None:
        """Ends a request that the core has not heard of."""
        session = self._forget(key)
        self._tracing.on_abandoned(key)
        self._send(session, 0, ends, [])

    def _forget(self, key: str) -> Session:
        session, request_id = self._live.pop(key)
        del session.requests[request_id]
        self._ended.set()
        return session

    async def _open_new(self, session_id: str) -> tuple[Session, int, pb.SessionResponse]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise QuireError(ErrorCode.OVERLOADED, "The engine has too many sessions.", retry_after=1.0)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[tuple[Session, int, pb.SessionResponse]] = loop.create_future()

        def reply(load: EngineLoad, stored: list[BlockStored]) -> None:
            loop.call_soon_threadsafe(self._register, session_id, load, stored, opened)

        self.core.send(GetSnapshot(reply))
        try:
            return await opened
        except asyncio.CancelledError:
            if opened.done() and not opened.cancelled():
                self.close(opened.result()[0])
            raise

    def _register(
        self,
        session_id: str,
        load: EngineLoad,
        stored: list[BlockStored],
        opened: "asyncio.Future[tuple[Session, int, pb.SessionResponse]]",
    ) -> None:
        """Runs between the news of the step before the snapshot and those of the step after it: nothing is missed."""
        if opened.cancelled():
            return
        if (other := self._sessions.get(session_id)) is not None:
            self.close(other)
        self._load = load_to_proto(load, self._step_times.model)
        session = self._sessions[session_id] = Session(session_id, self._generation, draining=self.draining)
        snapshot = session.snapshot(self._load, cached_to_proto(stored), resumed=False)
        opened.set_result((session, session.attach(), snapshot))

    def _cancel_expiry(self, session: Session) -> None:
        handle = self._expiries.pop(session.session_id, None)
        if handle is not None:
            handle.cancel()
