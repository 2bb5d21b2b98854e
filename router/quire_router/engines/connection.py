"""``EngineConnection``: keeps the Session stream to one of Quire's engines open and moves messages over it; ``Session``
interprets them. With the channel, plain or over TLS, and its errors in words of the settings.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Self

import grpc
from quire.v1 import engine_pb2
from quire.v1.engine_pb2_grpc import EngineStub
from quire_proto.supervise import Backoff, SupervisedTask
from quire_proto.tls import ClientTls, Contents, TlsError, read_ca, read_cert_key

from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.core.retry import first_error, supervise
from quire_router.engines.base import KvListener, LoadListener
from quire_router.engines.output_stream import EngineLost, OutputStream
from quire_router.engines.session import SequenceGap, Session
from quire_router.engines.settings import ConnectionSettings

if TYPE_CHECKING:
    from quire.v1.engine_pb2_grpc import EngineAsyncStub  # there is none at run time

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_UNACKNOWLEDGED_BYTES = 2**20  # a sixteenth of what an engine keeps of a session
INSPECT_TIMEOUT = 5.0  # seconds
LOAD_LORA_TIMEOUT = 120.0  # seconds
UNLOAD_LORA_TIMEOUT = 2.0  # seconds, after which only requests that run with it are waited for
_OPTIONS = (
    # An idle engine sends nothing, so pings find a frozen engine or a lost host, within 11 seconds. Engines end
    # connections that ping them more often than every 5 seconds.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute otherwise, whatever the former is
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A ping with the data that comes, to size the window by its round trip, is a third of what a message costs here. A
    # window of this size instead holds what an engine can have under way.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Engines are in the router's own network. A proxy that the environment names is for connections beyond it.
    ("grpc.enable_http_proxy", 0),
    # ``ConnectFailureLog`` times each try to connect, so a try must not inherit the library's backoff from another one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_NOT_CONNECTED = "failed to connect"
_CLOSED = re.compile(r"socket closed|connection reset|broken pipe", re.IGNORECASE)
_REFUSED_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([A-Za-z -]+))?")


async def open_channel(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel that is not connected yet, in plain text only where there is no ``tls``. Its files are read now, so
    that each connection is made with what they hold then. Raises ``TlsError``.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = await asyncio.to_thread(_credentials_now, tls)
    name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.aio.secure_channel(address, credentials, options=(*_OPTIONS, *name))


def explain(details: str, tls: ClientTls | None) -> str | None:
    """The cause of a failed connection that has to do with TLS, as one clause; None for any other cause.

    An engine that rejects the router's certificate closes the connection without saying why.
    """
    if refused := _REFUSED_CERTIFICATE.search(details):
        return f"its certificate does not pass --engine-tls-ca ({refused[1] or 'it cannot be verified'})"
    if "Hostname Verification Check failed" in details:
        name = "its address" if tls is None or tls.name is None else tls.name
        return f"its certificate is not for {name} (--engine-tls-name says for what it has to be)"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS (--tls-cert of the engine), and plain text is not tried"
    if _NOT_CONNECTED in details and _CLOSED.search(details):
        return _closed(tls)
    return None


def _closed(tls: ClientTls | None) -> str:
    if tls is None:
        return "it closes the connection at once, as one does that speaks TLS (--engine-tls-ca)"
    shown = "no certificate is shown to it" if tls.identity is None else "it may not accept the certificate"
    return f"it closes the connection at once; {shown} (--engine-tls-cert)"


def _credentials_now(tls: ClientTls) -> grpc.ChannelCredentials:
    return _credentials(tls, tls.contents)


@lru_cache(maxsize=4)
def _credentials(tls: ClientTls, contents: Contents) -> grpc.ChannelCredentials:
    """Checked and made once for the same contents: a large fleet that is away is tried many times a second."""
    authorities = read_ca(tls.ca)
    identity = None if tls.identity is None else read_cert_key(tls.identity)
    if tls.contents != contents:
        raise TlsError(f"{tls.ca} or what belongs to it is just being replaced")
    if identity is None:
        return grpc.ssl_channel_credentials(authorities)
    return grpc.ssl_channel_credentials(authorities, identity.key, identity.chain)


@dataclass(frozen=True, slots=True)
class ConnectFailure:
    """Why there is no stream. ``refused``: the address refuses connections. ``lasting``: trying again does not help
    before a setting or a file is changed.
    """

    text: str
    refused: bool = False
    lasting: bool = False

    @classmethod
    def of(cls, errors: BaseExceptionGroup, tls: ClientTls | None = None) -> Self:
        """The first error of a group, in one line. ``tls`` is what the stream was to be opened with."""
        error = first_error(errors)
        if isinstance(error, grpc.aio.AioRpcError):
            details = error.details() or ""
            if "connection refused" in details.lower():
                return cls("nobody listens there", refused=True)
            if (about_tls := explain(details, tls)) is not None:
                return cls(about_tls, lasting=True)
            return cls(f"{error.code().name}: {details}")
        return cls(str(error) or type(error).__name__, lasting=isinstance(error, TlsError))


class ConnectFailureLog:
    """One period without a stream to an engine: when to try again, and with which level failures are logged. For
    ``patience`` seconds they are information; afterwards the first is a warning. What is less than a warning is not
    logged if the engine is ``known_to_leave``.

    A lasting problem is a reason at once, but only when it comes twice in a row: files may just be being replaced, and
    an engine that ends closes what is being opened.
    """

    def __init__(
        self, address: str, settings: ConnectionSettings, patience: float = 0.0, *, known_to_leave: bool = False
    ) -> None:
        self._address = address
        self._warn_after = monotonic() + patience
        self._logged_level = logging.INFO if known_to_leave else logging.NOTSET
        self._backoff = Backoff(settings.backoff, settings.max_backoff)
        self._last: ConnectFailure | None = None

    def record(self, problem: ConnectFailure) -> None:
        """Logs a failed try: the first as information, and the first that is a reason to warn."""
        lasting = problem.lasting and problem == self._last
        level = logging.WARNING if lasting or monotonic() >= self._warn_after else logging.INFO
        self._last = problem
        if level > self._logged_level:
            missing = "cannot be reached" if level == logging.WARNING else "is not there yet"
            log.log(level, "engine %s %s: %s", self._address, missing, problem.text)
            self._logged_level = level

    def next_delay(self, spacing: float) -> float:
        """Seconds until the next try; they grow up to ``spacing`` where that is more than the settings say."""
        return self._backoff.next(spacing)

    def reset_delay(self) -> None:
        """The next tries follow each other closely again, as there is reason to think that the engine is back."""
        self._backoff.reset()


TICKS = 6  # in the shorter of the two times, so that each is kept to a sixth


class LivenessMonitor:
    """For how long an engine has sent nothing although it should. Counted in ticks, not by the clock, so that a router
    that was frozen itself does not suspect its engines.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.period = min(settings.silence, settings.stall) / TICKS
        self._suspect_after = settings.silence
        self._stalled_after = settings.stall
        self._ticks = 0

    @property
    def suspect(self) -> bool:
        """Whether the engine should get no new work."""
        return self._ticks * self.period >= self._suspect_after

    @property
    def stalled(self) -> bool:
        """Whether the stream is to be broken off."""
        return self._ticks * self.period >= self._stalled_after

    def on_message(self) -> None:
        """Resets the count."""
        self._ticks = 0

    def tick(self, expecting: bool) -> None:
        """``period`` seconds have passed; ``expecting`` is whether the engine has anything to send."""
        self._ticks = self._ticks + 1 if expecting else 0


MAX_RECONNECTS_PER_SECOND = 100
"""Of all connections together, once each has tried a few times: a try costs about 2 ms of CPU, over TLS up to 7."""

MAX_CONNECTS_PER_SECOND = 500
"""Tries that begin, of all connections together, so that a fleet that is found at once, or comes back at once, leaves
time for streams between them: a thousand engines are tried within two seconds.
"""

CONNECT_BURST = 20
"""Tries that may begin at once."""


class ReconnectLimiter:
    """When the connections of one pool try to connect. Those that wait for their next try are counted, so that each
    tries less often the more there are; and tries begin one after the other, but for those that requests depend on.
    The latter is the generic cell rate algorithm (ITU-T I.371).
    """

    def __init__(self) -> None:
        self._disconnected = 0
        self._next_turn = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts one more until the block ends."""
        self._disconnected += 1
        try:
            yield
        finally:
            self._disconnected -= 1

    @property
    def spacing(self) -> float:
        """Seconds between two tries of one connection with which all make ``MAX_RECONNECTS_PER_SECOND``."""
        return self._disconnected / MAX_RECONNECTS_PER_SECOND

    def turn(self, now: float, *, urgent: bool = False) -> float:
        """Seconds until a connection may begin a try, none if it is ``urgent``; takes this turn."""
        delay = self._next_turn - CONNECT_BURST / MAX_CONNECTS_PER_SECOND - now
        self._next_turn = max(self._next_turn, now) + 1 / MAX_CONNECTS_PER_SECOND
        return 0.0 if urgent else max(0.0, delay)


MAX_UPDATES_PER_SECOND = 1000
"""Batches without outputs, from all engines together: reading one takes about a tenth of a millisecond."""

MIN_UPDATE_INTERVAL = 0.2  # seconds
_RELEVANT_CHANGE = 1.25  # of the interval: what is less is not worth a message to every engine


class UpdateRate:
    """How often each engine of a pool is to send an update, which is what it does for other routers: seldom enough that
    all together send ``MAX_UPDATES_PER_SECOND``. Between two updates a router knows what it has dispatched itself, and
    what the other routers have.
    """

    def __init__(self) -> None:
        self.interval = MIN_UPDATE_INTERVAL

    def set_engines(self, count: int) -> None:
        """Sets how many engines there are. They are sent it with the next acknowledgement that they get."""
        self.interval = max(MIN_UPDATE_INTERVAL, count / MAX_UPDATES_PER_SECOND)

    def has_changed_since(self, sent: float) -> bool:
        """Whether an engine that was sent an interval has to be sent another one."""
        return not 1 / _RELEVANT_CHANGE < self.interval / sent < _RELEVANT_CHANGE


_MIN_RETRY_INTERVAL = 1.0  # seconds between two tries for which ``retry_now`` ends a pause
SessionCall = grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]


class StreamBroken(Exception):  # noqa: N818 - handled here, never shown
    """The stream cannot go on."""


class EngineConnection:
    """One of Quire's engines at ``address`` (``host:port``), an ``EngineClient``.

    A stream that breaks is opened again at once; while that takes less than ``settings.grace`` seconds, and the engine
    still knows the session, running requests do not notice. ``on_change`` is called when ``ready`` may have changed,
    ``on_load`` with each report of the engine's load, ``on_lost`` when all that it reported before is void.
    ``reconnect_limiter`` counts it while there is no stream, and spaces its tries to open one; ``update_rate`` is how
    often the engine sends what concerns no request of this router, which it does not at all unless ``hears_updates``.
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
    ) -> None:
        self.address = address
        self.settings = settings or ConnectionSettings()
        self.session = Session(self.settings, on_kv_event, on_load, on_change, address=address)
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
        self._unacknowledged_bytes = 0
        self._reconnect_limiter = reconnect_limiter or ReconnectLimiter()
        self._update_rate = update_rate or UpdateRate()
        self._hears_updates = hears_updates
        self._sent_interval = MIN_UPDATE_INTERVAL
        self._busy = asyncio.Event()  # set while the engine has anything to send
        self._retry_requested = asyncio.Event()
        self._last_early_retry = -inf
        self._task: SupervisedTask | None = None
        self._stub: EngineAsyncStub | None = None

    @property
    def generation(self) -> int:
        """That of the engine, which is new with each of its starts; 0 before the first connection."""
        return self.session.engine_generation

    @property
    def loras(self) -> Mapping[str, LoRA]:
        """The engine's adapters by name."""
        return self.session.loras

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
    def ready(self) -> bool:
        """Whether a request that is submitted now would be run."""
        return self._connected and not self.session.draining and not self._liveness.suspect

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

    def submit(self, message: engine_pb2.Submit) -> OutputStream:
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

    async def inspect(self) -> engine_pb2.InspectResponse | None:
        """Asks the engine what its blocks hold. Returns None if it is not connected, too busy, or too old to say."""
        if self._stub is None:
            return None
        try:
            answer = await self._stub.Inspect(engine_pb2.InspectRequest(), timeout=INSPECT_TIMEOUT)
        except grpc.aio.AioRpcError:
            return None
        return answer

    async def load_lora(self, name: str, path: str, digest: bytes = b"") -> bytes:
        """Loads an adapter at the engine, that with the ``digest`` if one is given. Returns its digest. Raises
        ``grpc.aio.AioRpcError``, or ``EngineLost`` if it is not connected.
        """
        if self._stub is None:
            raise EngineLost("the engine is not connected")
        message = engine_pb2.LoadLoraRequest(lora_name=name, lora_path=path, digest=digest)
        return (await self._stub.LoadLora(message, timeout=LOAD_LORA_TIMEOUT)).lora.digest

    async def unload_lora(self, name: str) -> None:
        """Unloads an adapter, as far as new requests are concerned; one that is not there is unloaded. Raises as
        ``load_lora``.
        """
        if self._stub is None:
            raise EngineLost("the engine is not connected")
        try:
            await self._stub.UnloadLora(engine_pb2.UnloadLoraRequest(lora_name=name), timeout=UNLOAD_LORA_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND):
                raise

    # The stream's life

    async def _run(self) -> None:
        failures = ConnectFailureLog(self.address, self.settings, self.settings.start_patience)
        while not self._closing:  # a stream that breaks at the same moment can swallow the cancellation
            urgent = self.session.in_flight > 0
            await asyncio.sleep(self._reconnect_limiter.turn(asyncio.get_running_loop().time(), urgent=urgent))
            try:
                await self._run_stream()
            except* (grpc.aio.AioRpcError, StreamBroken, SequenceGap, TimeoutError, TlsError) as errors:
                problem = ConnectFailure.of(errors, self.settings.tls)
            except* Exception:  # the connection must survive what one message did
                log.exception("the link to engine %s failed", self.address)
                problem = ConnectFailure("a failure of the link itself")
            if self._connected:
                self._on_stream_lost()
                failures = self._new_failure_log()
            if problem.refused:
                self._shorten_grace(self.settings.refused_grace)
            failures.record(problem)
            if await self._pause(failures.next_delay(self._reconnect_limiter.spacing)):
                failures.reset_delay()

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
            self._stub = stub
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call))
                    tasks.create_task(self._read(call))
                    tasks.create_task(self._watch_liveness())
            finally:
                self._stub = None

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
            await asyncio.sleep(self._liveness.period)
            ready, leaving = self.ready, self.session.draining
            self._liveness.tick(expecting=self.session.in_flight > 0)
            self._notify_change(ready, leaving)
            if not self.session.in_flight:  # no timer for engines that owe nothing: a fleet has many
                self._busy.clear()
            if self._liveness.stalled:
                raise StreamBroken(f"the engine said nothing for {self.settings.stall:g} seconds")

    def _notify_change(self, ready: bool, leaving: bool) -> None:
        """Reports what is not as it was before."""
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
        self._ack_timer, self._unacknowledged, self._unacknowledged_bytes = None, 0, 0
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
