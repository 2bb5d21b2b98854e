"""The way to one engine: keeps its Session stream open and moves messages over it. What they mean is ``session``'s."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf

import grpc
from quire.v1 import engine_pb2
from quire.v1.engine_pb2_grpc import EngineStub
from quire_proto.tls import TlsError

from quire_router.fleet.away import ReconnectLimiter
from quire_router.fleet.channel import open_channel
from quire_router.fleet.outage import ConnectFailure, ConnectFailureLog
from quire_router.fleet.output import EngineLost
from quire_router.fleet.session import KvListener, LoadListener, SequenceGap, Session
from quire_router.fleet.settings import ConnectionSettings
from quire_router.fleet.silence import LivenessMonitor
from quire_router.fleet.stream import OutputStream
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger(__name__)

_MIN_RETRY_INTERVAL = 1.0  # seconds between two tries for which ``retry_now`` ends a pause
OUTPUTS_PER_YIELD = 4  # a sixth of a millisecond or so, after which requests that come have their turn

SessionCall = grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]


class StreamBroken(Exception):  # noqa: N818 - handled here, never shown
    """The stream cannot go on."""


class EngineConnection:
    """One engine at ``address`` (``host:port``), connected for as long as the link is started.

    A stream that breaks is opened again at once; while that takes less than ``settings.grace`` seconds, and the engine
    still knows the session, running requests do not notice. ``on_change`` is called when ``ready`` may have changed,
    ``on_load`` with each report of the engine's load, ``on_lost`` when all that it said before is of no use any more.
    ``away`` is told while there is no stream, and says how far apart tries to open one are to be.
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
    ) -> None:
        self.address = address
        self.settings = settings or ConnectionSettings()
        self.session = Session(self.settings, on_kv_event, on_load)
        self.description: engine_pb2.DescribeResponse | None = None
        self._liveness = LivenessMonitor(self.settings)
        self._on_change = on_change
        self._on_lost = on_lost
        self._connected = False
        self._closing = False
        self._lost = True
        self._unacknowledged = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._reconnect_limiter = reconnect_limiter or ReconnectLimiter()
        self._retry_requested = asyncio.Event()
        self._last_early_retry = -inf
        self._task: SupervisedTask | None = None

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would be run."""
        return self._connected and not self.session.draining and not self._liveness.suspect

    def start(self) -> None:
        """Begins to connect; never waits, never fails."""
        self._task = supervise("link", self._run, of=self.address, vital=False)

    def retry_now(self) -> None:
        """Ends the pause between two tries to connect: the engine is said to be there now. Once a second at most, as
        that can be said again and again.
        """
        self._retry_requested.set()

    async def close(self) -> None:
        """Gives back what is in flight and lets go of the engine."""
        self._closing = True
        if self._task is not None:
            await self._task.stop()
        self._declare_lost()

    def submit(self, message: engine_pb2.Submit) -> OutputStream:
        """Sends a request. Raises ``EngineLost`` when the engine is away, ``EngineFull`` when too many wait already."""
        if self._lost:
            raise EngineLost("the engine is not connected")
        return self.session.submit(message, self.description.vocab_size if self.description is not None else 0)

    # The stream's life

    async def _run(self) -> None:
        outage = ConnectFailureLog(self.address, self.settings, self.settings.start_patience)
        while not self._closing:  # a stream that breaks at the same moment can swallow the cancellation
            try:
                await self._run_stream()
            except* (grpc.aio.AioRpcError, StreamBroken, SequenceGap, TimeoutError, TlsError) as errors:
                problem = ConnectFailure.of(errors, self.settings.tls)
            except* Exception:  # the link must outlive whatever one message did
                log.exception("the link to engine %s failed", self.address)
                problem = ConnectFailure("a failure of the link itself")
            if self._connected:
                self._on_stream_lost()
                outage = self._new_failure_log()
            if problem.refused:
                self._shorten_grace(self.settings.refused_grace)
            outage.record(problem)
            await self._pause(outage.next_delay(self._reconnect_limiter.spacing))

    async def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        with self._reconnect_limiter.waiting(), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_requested.wait()
                await asyncio.sleep(self._last_early_retry + _MIN_RETRY_INTERVAL - loop.time())
                self._last_early_retry = loop.time()
        self._retry_requested.clear()

    def _new_failure_log(self) -> ConnectFailureLog:
        """One that follows a stream that broke. An engine that was told to stop is expected to go, and its successor to
        need some time.
        """
        if not self.session.draining:
            return ConnectFailureLog(self.address, self.settings)
        log.info("engine %s has left", self.address)
        return ConnectFailureLog(self.address, self.settings, self.settings.start_patience, known_to_leave=True)

    async def _run_stream(self) -> None:
        async with await open_channel(self.address, self.settings.tls) as channel:
            stub = EngineStub(channel)
            async with asyncio.timeout(self.settings.connect_timeout):
                description = await stub.Describe(engine_pb2.DescribeRequest())
            async with asyncio.timeout(self.settings.open_timeout):
                call = stub.Session()
                snapshot = await self._open(call)
            self._on_stream_opened(description, snapshot)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call))
                tasks.create_task(self._read(call))
                tasks.create_task(self._watch_liveness())

    async def _open(self, call: SessionCall) -> engine_pb2.Snapshot:
        await call.write(self.session.open_request())
        response = await _receive(call)
        if response.WhichOneof("event") != "snapshot":
            raise StreamBroken("the engine did not begin with a snapshot")
        return response.snapshot

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
            with self._notifying_change():
                self._liveness.on_message()
                if response.WhichOneof("event") == "step_batch":
                    await _yielding_to_loop(self._process_batch(response.step_batch))
                    self._acknowledge()

    async def _watch_liveness(self) -> None:
        while True:
            await asyncio.sleep(self._liveness.period)
            with self._notifying_change():
                self._liveness.tick(expecting=self.session.in_flight > 0)
            if self._liveness.stalled:
                raise StreamBroken(f"the engine said nothing for {self.settings.stall:g} seconds")

    @contextmanager
    def _notifying_change(self) -> Iterator[None]:
        ready, leaving = self.ready, self.session.draining
        yield
        if self.session.draining and not leaving:
            log.info("engine %s is leaving: it ends what it runs, and gets nothing new", self.address)
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
        self._stop_grace()
        log.info("engine %s is connected (%s)", self.address, "resumed" if snapshot.resumed else "new session")
        self._on_change()

    def _on_stream_lost(self) -> None:
        self._connected = False
        _cancel(self._ack_timer)
        self._ack_timer, self._unacknowledged = None, 0
        self._grace_timer = asyncio.get_running_loop().call_later(self.settings.grace, self._declare_lost)
        self._on_change()

    def _shorten_grace(self, seconds: float) -> None:
        """Shortens the grace, where one is running and would take longer."""
        end = asyncio.get_running_loop().time() + seconds
        if self._grace_timer is not None and end < self._grace_timer.when():
            self._grace_timer.cancel()
            self._grace_timer = asyncio.get_running_loop().call_at(end, self._declare_lost)

    def _stop_grace(self) -> None:
        _cancel(self._grace_timer)
        self._grace_timer = None

    def _declare_lost(self) -> None:
        self._connected, self._lost = False, True
        self._stop_grace()
        _cancel(self._ack_timer)
        self.session.fail_all("the engine did not come back in time")
        self._on_lost()

    # Acknowledgements

    def _acknowledge(self) -> None:
        self._unacknowledged += 1
        if self._unacknowledged >= self.settings.ack_batches:
            _cancel(self._ack_timer)
            self._send_ack()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(self.settings.ack_interval, self._send_ack)

    def _send_ack(self) -> None:
        self._ack_timer, self._unacknowledged = None, 0
        self.session.commands.ack(self.session.sequence)


async def _receive(call: SessionCall) -> engine_pb2.SessionResponse:
    response = await call.read()
    if isinstance(response, engine_pb2.SessionResponse):
        return response
    raise StreamBroken(f"the engine ended the stream ({(await call.code()).name})")


async def _yielding_to_loop(outputs: Iterator[None]) -> None:
    """Hands out a batch's outputs, between which others get their turn; whatever ends this hands out the rest at once,
    because an engine tells nothing twice.
    """
    try:
        for number, _ in enumerate(outputs, 1):
            if number % OUTPUTS_PER_YIELD == 0:
                await asyncio.sleep(0)
    finally:
        for _ in outputs:
            pass


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
