"""``EngineConnection``: keeps the Session stream to one of Quire's engines open and moves messages over it; ``Session``
interprets them. And ``LivenessMonitor``, which knows for how long the engine said nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import grpc
from quire.v1 import engine_pb2
from quire.v1.engine_pb2_grpc import EngineStub
from quire_proto.supervise import Backoff, SupervisedTask, forget_cancellations
from quire_proto.tls import ClientTls, TlsError

from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.core.retry import FAIR_TICKS, fair_timeout, supervise, was_held_up
from quire_router.engines.attempt import EngineLost, EngineSilent
from quire_router.engines.base import KvListener, LoadListener
from quire_router.engines.channel import ConnectFailure, ConnectFailureLog, authorized, open_channel, speaks_no_tls
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.rates import MIN_UPDATE_INTERVAL, JoinRank, ReconnectLimiter, UpdateRate
from quire_router.engines.session import SequenceGap, Session
from quire_router.engines.settings import ConnectionSettings

if TYPE_CHECKING:
    from quire.v1.engine_pb2_grpc import EngineAsyncStub  # there is none at run time

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_UNACKNOWLEDGED_BYTES = 2**20  # a sixteenth of what an engine keeps of a session
INSPECT_TIMEOUT = 5.0  # seconds
LOAD_LORA_TIMEOUT = 120.0  # seconds
SLEEP_TIMEOUT = 120.0  # seconds, which copying the weights takes at most
WAKE_UP_TIMEOUT = 300.0  # seconds, graphs included
UNLOAD_LORA_TIMEOUT = 2.0  # seconds, after which only requests that run with it are waited for


class LivenessMonitor:
    """For how long an engine has sent nothing although it should. After ``silence`` seconds it is suspect, until it
    sends something; after ``stall`` it is stalled.

    Counted in ticks, not by the clock, and without those that came late: a router that was frozen or starved itself
    does not suspect its engines.
    """

    def __init__(self, silence: float, stall: float) -> None:
        self.period = min(silence, stall) / FAIR_TICKS  # each is kept to a sixth of the shorter one
        self._silence = silence
        self._stall = stall
        self._ticks = 0
        self.asked = False  # for a sign of life, and has given none since
        self.heard_at = -inf  # by ``time.monotonic``

    @property
    def seconds(self) -> float:
        """For how long it has sent nothing."""
        return self._ticks * self.period

    @property
    def late(self) -> bool:
        """Whether half of ``silence`` has passed: whether it is alive is not certain."""
        return self._ticks * self.period >= self._silence / 2

    @property
    def suspect(self) -> bool:
        """Whether the engine should get no new work."""
        return self._ticks * self.period >= self._silence

    @property
    def stalled(self) -> bool:
        """Whether the stream is to be broken off."""
        return self._ticks * self.period >= self._stall

    def on_message(self) -> None:
        """Resets the count."""
        self._ticks, self.asked, self.heard_at = 0, False, monotonic()

    def on_asked(self) -> None:
        """The engine is asked for a sign of life. One tick counts already, so that it is late before another one is
        suspect that was late when this one was asked.
        """
        self._ticks = max(self._ticks, 1)
        self.asked = True

    def on_no_answer(self) -> None:
        """The engine did not answer in time, and is suspect."""
        self._ticks = max(self._ticks, ceil(self._silence / self.period))

    async def wait(self) -> float:
        """Waits for a period; returns how many seconds that took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(self.period)
        return loop.time() - began

    def tick(self, seconds: float, *, expecting: bool) -> None:
        """Counts a period that took ``seconds``; ``expecting`` is whether the engine has anything to send."""
        if not (expecting or self.asked or self.suspect):
            self._ticks = 0
        elif not was_held_up(seconds, self.period):
            self._ticks += 1


MAX_PATIENCE = 8  # times as long that an engine has to answer, doubling with each try that was too short
STEADY = 10.0  # seconds for which a session has to hold before a failure counts as the first one
_MIN_RETRY_INTERVAL = 1.0  # seconds between two tries for which ``retry_now`` ends a pause
SessionCall = grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]


class StreamBroken(Exception):  # noqa: N818 - handled here, never shown
    """The stream cannot go on."""


class EngineConnection:
    """One of Quire's engines at ``address`` (``host:port``), an ``EngineClient``.

    A stream that breaks is opened again at once; while that takes less than ``settings.grace`` seconds, and the engine
    still knows the session, running requests do not notice. ``on_change`` is called when ``ready`` may have changed,
    ``on_load`` with each report of the engine's load, ``on_lost`` when all that it reported before is void.
    ``reconnect_limiter`` counts it while there is no stream, and says when it may open one; ``update_rate`` is how
    often the engine sends what concerns no request of this router, which it does not at all unless ``hears_updates``.

    An engine that falls silent, or is away for a moment, keeps its requests unless ``has_substitute``, which is whether
    others can take them: then they leave it (``EngineSilent``, ``EngineLost``), and are cancelled there once it hears
    again. What was known of it stays. ``on_late`` is called when it may be falling silent, or is away.
    """

    def __init__(
        self,
        address: str,
        settings: ConnectionSettings | None = None,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_kv_event: KvListener | None = None,
        on_load: LoadListener | None = None,
        on_lost: Callable[[], None] = lambda: None,
        reconnect_limiter: ReconnectLimiter | None = None,
        update_rate: UpdateRate | None = None,
        hears_updates: bool = True,
        has_substitute: Callable[[], bool] = lambda: False,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.settings = settings or ConnectionSettings()
        self.session = Session(self.settings, on_kv_event, on_load, on_change, address=address)
        self.description: engine_pb2.DescribeResponse | None = None
        self._liveness = LivenessMonitor(self.settings.silence, self.settings.stall)
        self._on_change = on_change
        self._on_lost = on_lost
        self._connected = False
        self._closing = False
        self._lost = True
        self._problem = ""  # why there is no stream: what the last try to open one, or to read from it, observed
        self._opened_at = -inf  # when the last stream was
        self._patience = 1
        self._broken_at: float | None = None  # when the last stream broke that nobody had announced
        self._unacknowledged = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._move_timer: asyncio.TimerHandle | None = None
        self._unacknowledged_bytes = 0
        self._reconnect_limiter = reconnect_limiter or ReconnectLimiter()
        self._update_rate = update_rate or UpdateRate()
        self._hears_updates = hears_updates
        self._has_substitute = has_substitute
        self._on_late = on_late
        self._sent_interval = MIN_UPDATE_INTERVAL
        self._busy = asyncio.Event()  # set while the engine has anything to send
        self._retry_requested = asyncio.Event()
        self._last_early_retry = -inf
        self._task: SupervisedTask | None = None
        self._stub: EngineAsyncStub | None = None
        self._asking: asyncio.Task[bool] | None = None

    @property
    def generation(self) -> int:
        """That of the engine, which is new with each of its starts; 0 before the first connection."""
        return self.session.engine_generation

    @property
    def loras(self) -> Mapping[str, LoRA]:
        """The engine's adapters by name."""
        return self.session.loras

    @property
    def unloaded_loras(self) -> Collection[LoRA]:
        """Adapters that were unloaded there."""
        return self.session.unloaded_loras

    @property
    def active_loras(self) -> set[str]:
        """The adapters that requests there run with or wait for."""
        return self.session.active_loras

    @property
    def condition(self) -> EngineCondition:
        """How the connection is, in a word."""
        if self._lost:
            return "connecting" if self.description is None else "lost"
        if not self._connected:
            return "reconnecting"
        if self.session.draining:
            return "leaving"
        return "silent" if self._liveness.suspect else "ready"

    @property
    def problem(self) -> str:
        """Why there is no stream, as far as the last try observed; empty while there is one."""
        return "" if self._connected else self._problem

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would be run."""
        return self._connected and not self.session.draining and not self._liveness.suspect

    @property
    def alive(self) -> bool:
        """Whether it was heard within the time after which an engine that runs requests is silent."""
        return not self._liveness.late and monotonic() - self._liveness.heard_at <= self.settings.silence

    def start(self) -> None:
        """Starts to connect; never waits, never fails."""
        self._task = supervise("link", self._run, of=self.address, vital=False)

    def retry_now(self) -> None:
        """Ends the pause between two tries to connect, and lets the next tries follow closely, because discovery
        reports the engine as ready or others that left with it are back. Once a second at most, as that can be reported
        again and again.
        """
        self._retry_requested.set()

    async def close(self) -> None:
        """Closes the stream; what is in flight ends with ``EngineLost``."""
        self._closing = True
        if self._task is not None:
            await self._task.stop()
        self._declare_lost()
        self._reconnect_limiter.forget(self.retry_now)

    def submit(self, message: engine_pb2.Submit, tenant: str = "") -> OutputStream:  # noqa: ARG002 - of the protocol
        """Sends a request. Raises ``EngineLost`` if the engine is not connected, ``EngineFull`` if too many wait."""
        if self._lost:
            raise EngineLost("the engine is not connected")
        stream = self.session.submit(message, self.description.vocab_size if self.description is not None else 0)
        self._busy.set()
        return stream

    def expect_cached(self, hashes: Sequence[bytes]) -> None:
        """Does nothing: the engine reports what it has."""

    def on_forwarded_gap(self, seconds: float, sequences: int) -> None:
        """Does nothing: the engine reports its pace."""

    def on_forwarded_prompt(self, seconds: float, tokens: int) -> None:
        """Does nothing: the engine reports its pace."""

    async def probe(self) -> None:
        """Asks an engine that owes nothing whether it is alive, and waits until it has answered, or is suspect."""
        heard = self.session.sequence
        if not self.ready or self.session.in_flight:
            return
        self._liveness.on_asked()
        self._busy.set()
        asking = self._ask()
        with suppress(TimeoutError):
            async with fair_timeout(self.settings.silence):
                await asyncio.wait([asking])
        if self.session.in_flight or self.session.sequence != heard or (asking.done() and asking.result()):
            return
        ready, leaving = self.ready, self.session.draining
        self._liveness.on_no_answer()
        self._notify_change(ready, leaving)

    def _ask(self) -> asyncio.Task[bool]:
        """Asks the engine for a sign of life, unless it has been. Pings end the stream of one that never answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._answer(), name=f"question to {self.address}")
        return self._asking

    async def _answer(self) -> bool:
        """Waits as long as the answer takes. Returns whether there was one."""
        try:
            await self._call(lambda stub: stub.Describe(engine_pb2.DescribeRequest()))
        except (grpc.aio.AioRpcError, EngineLost):
            return False
        ready, leaving = self.ready, self.session.draining
        self._liveness.on_message()
        self._notify_change(ready, leaving)
        return True

    async def inspect(self) -> engine_pb2.InspectResponse | None:
        """Asks the engine what its blocks hold. Returns None if it is not connected, too busy, or too old to say."""
        try:
            return await self._call(lambda stub: stub.Inspect(engine_pb2.InspectRequest(), timeout=INSPECT_TIMEOUT))
        except (grpc.aio.AioRpcError, EngineLost):
            return None

    async def load_lora(self, name: str, path: str, digest: bytes = b"") -> bytes:
        """Loads an adapter at the engine, that with the ``digest`` if one is given. Returns its digest. Raises
        ``grpc.aio.AioRpcError``, or ``EngineLost`` if it is not connected.
        """
        message = engine_pb2.LoadLoraRequest(lora_name=name, lora_path=path, digest=digest)
        return (await self._call(lambda stub: stub.LoadLora(message, timeout=LOAD_LORA_TIMEOUT))).lora.digest

    async def unload_lora(self, name: str) -> None:
        """Unloads an adapter, as far as new requests are concerned; one that is not there is unloaded. Raises as
        ``load_lora``.
        """
        message = engine_pb2.UnloadLoraRequest(lora_name=name)
        try:
            await self._call(lambda stub: stub.UnloadLora(message, timeout=UNLOAD_LORA_TIMEOUT))
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND):
                raise

    async def sleep(self, wait_seconds: float) -> None:
        """Puts the engine to sleep when its requests have ended; it waits so long. Raises as ``load_lora``."""
        message = engine_pb2.SleepRequest(wait_seconds=wait_seconds)
        await self._call(lambda stub: stub.Sleep(message, timeout=wait_seconds + SLEEP_TIMEOUT))

    async def wake_up(self) -> None:
        """Wakes the engine up, and returns when it is ready. Raises as ``load_lora``."""
        await self._call(lambda stub: stub.WakeUp(engine_pb2.WakeUpRequest(), timeout=WAKE_UP_TIMEOUT))

    async def _call(self, call: Callable[["EngineAsyncStub"], Awaitable[T]]) -> T:
        """Returns the engine's answer to a call beside the stream. Raises ``grpc.aio.AioRpcError``, and ``EngineLost``
        if it is not connected, or not any more: a channel that is closed makes its calls look cancelled.
        """
        if self._stub is None:
            raise EngineLost("the engine is not connected")
        try:
            return await call(self._stub)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        raise EngineLost("the connection to the engine broke")

    # The stream's life

    async def _run(self) -> None:
        failures = ConnectFailureLog(self.address, self.settings.start_patience)
        backoff = Backoff(self.settings.backoff, self.settings.max_backoff)
        refused_since: float | None = None
        while not self._closing:  # a stream that breaks at the same moment can swallow the cancellation
            try:
                await self._run_stream()
            except* (grpc.aio.AioRpcError, StreamBroken, SequenceGap, TimeoutError, TlsError) as errors:
                problem = ConnectFailure.of(errors, self.settings.tls)
            except* Exception:  # the connection must survive what one message did
                log.exception("the link to engine %s failed", self.address)
                problem = ConnectFailure("a failure of the link itself")
            if not self._closing:
                forget_cancellations()
            self._problem = problem.text
            if self._connected:
                if asyncio.get_running_loop().time() - self._opened_at >= STEADY:
                    backoff.reset()
                self._on_stream_lost()
                failures = self._new_failure_log()
            if problem.refused:
                self._shorten_grace(self.settings.refused_grace)
            failures.record(problem)
            refused_since = (refused_since or asyncio.get_running_loop().time()) if problem.refused else None
            if await self._pause(self._reconnect_limiter.pause(backoff, refused_since)):
                backoff.reset()

    async def _pause(self, seconds: float) -> bool:
        """Waits so long, or until ``retry_now``, which returns True."""
        loop = asyncio.get_running_loop()
        with self._reconnect_limiter.waiting(), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_requested.wait()
                await asyncio.sleep(self._last_early_retry + _MIN_RETRY_INTERVAL - loop.time())
                self._last_early_retry = loop.time()
        requested = self._retry_requested.is_set()
        self._retry_requested.clear()
        return requested

    def _new_failure_log(self) -> ConnectFailureLog:
        """Returns the log for a stream that broke. An engine that was draining is expected to end, and its successor to
        need some time.
        """
        if not self.session.draining:
            return ConnectFailureLog(self.address)
        log.info("engine %s has left", self.address)
        return ConnectFailureLog(self.address, self.settings.start_patience, known_to_leave=True)

    async def _run_stream(self) -> None:
        tls = self.settings.tls
        try:
            await self._run_stream_over(tls)
        except grpc.aio.AioRpcError as error:
            if tls is None or not tls.optional or not speaks_no_tls(error.details() or ""):
                raise
            log.warning("engine %s has no TLS: using plain text (--engine-tls-optional)", self.address)
            await self._run_stream_over(None)

    async def _run_stream_over(self, tls: ClientTls | None) -> None:
        async with (
            self._reconnect_limiter.turn(self._rank) as turn,
            await open_channel(self.address, tls, self._update_rate.ping_interval) as channel,
        ):
            stub = EngineStub(authorized(channel, self.settings.tokens))
            description = await self._describe(stub)
            turn.answered()
            async with fair_timeout(self.settings.open_timeout):
                call = stub.Session()
                snapshot = await self._open(call)
            self._on_stream_opened(description, snapshot)
            turn.end()
            self._stub = stub
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call))
                    tasks.create_task(self._read(call))
                    tasks.create_task(self._watch_liveness())
            finally:
                self._stub = None

    @property
    def _rank(self) -> JoinRank:
        if self.session.in_flight:
            return JoinRank.URGENT
        return JoinRank.NEW if self.description is None else JoinRank.KNOWN

    async def _describe(self, stub: "EngineAsyncStub") -> engine_pb2.DescribeResponse:
        """Asks the engine what it serves. Raises ``TimeoutError`` where it does not answer, and waits longer then at
        the next try: what answers late has work, and asking again is more.
        """
        seconds = self.settings.connect_timeout * self._patience
        try:
            async with fair_timeout(seconds):
                description = await stub.Describe(engine_pb2.DescribeRequest())
        except TimeoutError:
            self._patience = min(MAX_PATIENCE, 2 * self._patience)
            raise TimeoutError(f"it did not answer within {seconds:g} seconds") from None
        self._patience = 1
        return description

    async def _open(self, call: SessionCall) -> engine_pb2.Snapshot:
        self._sent_interval = self._update_rate.interval
        await call.write(self.session.open_request(self._updates()))
        response = await _receive(call)
        if response.WhichOneof("event") != "snapshot":
            raise StreamBroken("the engine did not begin with a snapshot")
        return response.snapshot

    def _updates(self) -> engine_pb2.SetUpdates:
        return engine_pb2.SetUpdates(interval_seconds=self._sent_interval, off=not self._hears_updates)

    async def _write(self, call: SessionCall) -> None:
        while True:
            message = await self.session.commands.next()
            try:
                await call.write(message)
            except asyncio.InvalidStateError:  # what grpc raises where the stream has just ended
                raise StreamBroken("the engine ended the stream") from None

    async def _read(self, call: SessionCall) -> None:
        while True:
            response = await _receive(call)
            ready, leaving = self.ready, self.session.draining
            self._liveness.on_message()
            try:
                if response.HasField("step_batch"):
                    await _yielding_to_loop(self._process_batch(response.step_batch))
                    self._acknowledge(response.step_batch)
            finally:
                self._notify_change(ready, leaving)

    async def _watch_liveness(self) -> None:
        while True:
            await self._busy.wait()
            took = await self._liveness.wait()
            ready, leaving, was_late = self.ready, self.session.draining, self._liveness.late
            owes = self.session.in_flight > 0
            if self._liveness.suspect and not owes:  # it may have nothing to say
                self._ask()
            self._liveness.tick(took, expecting=owes)
            self._notify_change(ready, leaving)
            if owes and self._liveness.late and not was_late:
                self._on_late()
            if self._liveness.suspect and self._has_substitute():
                reason = f"the engine said nothing for {self.settings.silence:g} seconds"
                self.session.withdraw_all(EngineSilent, reason)
            elif not (self.session.in_flight or self._liveness.asked or self._liveness.suspect):
                self._busy.clear()  # no timer for engines that owe nothing: a fleet has many
            if self._liveness.stalled and self.session.in_flight:
                raise StreamBroken(f"the engine said nothing for {self.settings.stall:g} seconds")

    def _notify_change(self, ready: bool, leaving: bool) -> None:
        """Reports what is not as it was before."""
        if self.session.draining and not leaving:
            log.info("engine %s is shutting down: it finishes its requests and gets no new ones", self.address)
        if ready != self.ready:
            self._on_change()

    def _process_batch(self, batch: engine_pb2.StepBatch) -> Iterator[None]:
        try:
            return self.session.process_batch(batch)
        except SequenceGap:
            self.session.invalidate()
            raise

    def _on_stream_opened(self, description: engine_pb2.DescribeResponse, snapshot: engine_pb2.Snapshot) -> None:
        if description.generation != snapshot.generation:
            raise StreamBroken("the engine restarted while it was being asked")
        self.description = description
        self.session.begin(snapshot)
        self._liveness.on_message()
        self._retry_requested.clear()
        self._connected, self._lost = True, False
        self._opened_at = asyncio.get_running_loop().time()
        self._stop_grace()
        self._reconnect_limiter.opened(self.retry_now)
        if self._broken_at is not None and not snapshot.resumed:  # as loud as the loss was
            seconds = asyncio.get_running_loop().time() - self._broken_at
            log.warning("engine %s is back after %.1f s", self.address, seconds)
        else:
            log.info("engine %s is connected (%s)", self.address, "resumed" if snapshot.resumed else "new session")
        self._broken_at = None
        self._on_change()

    def _on_stream_lost(self) -> None:
        self._connected = False
        _cancel(self._ack_timer)
        self._ack_timer, self._unacknowledged, self._unacknowledged_bytes = None, 0, 0
        loop = asyncio.get_running_loop()
        self._broken_at = None if self.session.draining else loop.time()
        if not self.session.draining:
            self._reconnect_limiter.lost(self.retry_now)
        if self.session.in_flight:
            self._on_late()
        self._grace_timer = loop.call_later(self.settings.grace, self._declare_lost)
        self._move_timer = loop.call_later(self.settings.move_after, self._move_requests)
        self._on_change()

    def _move_requests(self) -> None:
        """There is still no stream: what others can take leaves, now or once there are others."""
        if self._has_substitute():
            self.session.withdraw_all(EngineLost, self._problem)
        self._move_timer = asyncio.get_running_loop().call_later(self.settings.move_after, self._move_requests)

    def _shorten_grace(self, seconds: float) -> None:
        """Shortens the grace, where one is running and would take longer."""
        end = asyncio.get_running_loop().time() + seconds
        if self._grace_timer is not None and end < self._grace_timer.when():
            self._grace_timer.cancel()
            self._grace_timer = asyncio.get_running_loop().call_at(end, self._declare_lost)

    def _stop_grace(self) -> None:
        _cancel(self._grace_timer)
        _cancel(self._move_timer)
        self._grace_timer = self._move_timer = None

    def _declare_lost(self) -> None:
        self._connected, self._lost = False, True
        self._stop_grace()
        _cancel(self._ack_timer)
        self.session.fail_all("the router leaves it" if self._closing else self._problem)
        self._on_lost()

    # Acknowledgements

    def _acknowledge(self, batch: engine_pb2.StepBatch) -> None:
        self._unacknowledged += 1
        self._unacknowledged_bytes += batch.ByteSize()
        if self._unacknowledged >= self.settings.ack_batches or self._unacknowledged_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            _cancel(self._ack_timer)
            self._send_ack()
        elif self._ack_timer is None:
            interval = self.settings.ack_interval if self.session.in_flight else self.settings.idle_ack_interval
            self._ack_timer = asyncio.get_running_loop().call_later(interval, self._send_ack)

    def _send_ack(self) -> None:
        self._ack_timer, self._unacknowledged, self._unacknowledged_bytes = None, 0, 0
        self.session.commands.ack(self.session.sequence)
        if self._update_rate.has_changed_since(self._sent_interval):
            self._sent_interval = self._update_rate.interval
            self.session.commands.set_updates(self._updates())


async def _receive(call: SessionCall) -> engine_pb2.SessionResponse:
    response = await call.read()
    if isinstance(response, engine_pb2.SessionResponse):
        return response
    raise StreamBroken(f"the engine ended the stream ({(await call.code()).name})")


async def _yielding_to_loop(outputs: Iterator[None]) -> None:
    """Processes a batch's outputs, and lets the event loop run in between. If this is cancelled, the rest is processed
    at once, because an engine sends nothing twice.
    """
    try:
        for _ in outputs:
            await asyncio.sleep(0)
    finally:
        for _ in outputs:
            pass


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
