"""``ExternalEngine``: a server that others have written, as an ``EngineClient``: asked at intervals how it is, with a
request of HTTP for each choice that it runs.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.v1 import engine_pb2
from quire_proto.context_length import from_server
from quire_proto.convert import sampling_from_proto
from quire_proto.errors import internal
from quire_proto.hashing import ROOT, TOKEN_BYTES, extra_key, hash_chain, pack
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.supervise import Backoff, SupervisedTask
from quire_proto.tls import TlsError
from quire_proto.tracing import headers_for_servers

from quire_router.core.errors import engine_refused
from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.core.retry import fair_timeout, supervise
from quire_router.engines.attempt import EngineFull, EngineLost, EngineStalled, Output, RequestUnsupported
from quire_router.engines.base import KvListener, LoadListener, Offload, offload_long, on_any_thread
from quire_router.engines.channel import ConnectFailure, ConnectFailureLog
from quire_router.engines.connection import LivenessMonitor
from quire_router.engines.external.estimates import ObservedPace, PredictedCache
from quire_router.engines.external.fitness import Fitness
from quire_router.engines.external.http_client import (
    TRANSPORT_ERRORS,
    BadAnswer,
    HttpClient,
    ServerError,
    explain,
    is_refusal,
)
from quire_router.engines.external.openai_server import OpenAIServer
from quire_router.engines.external.server_kind import ChoiceRequest, ServerKind, split_choices
from quire_router.engines.external.sglang_server import SglangServer
from quire_router.engines.external.vllm_server import VllmServer
from quire_router.engines.output_stream import ExpectedOutput, OutputStream
from quire_router.engines.rates import JoinRank, ReconnectLimiter
from quire_router.engines.settings import ConnectionSettings, KnownModel

if TYPE_CHECKING:
    from quire_router.engines.external.kv_events import ReportedCache

log = logging.getLogger(__name__)

POLL_PERIOD = 1.0
"""Seconds between two questions how busy a server is. Writing its metrics takes vLLM some milliseconds of the process
that streams; and what this router sends there, it counts itself at once.
"""

MAX_CHOICES = 4096
"""That run at one server: each has a connection."""

_ASSUMED_BLOCKS = 1 << 16
_REMEMBERED = 2  # times what a server can have cached, of what it reports
_OTHER_TOKENIZER = b"not the router's"
_BAD_REQUEST = (400, 413, 422)
_FULL = (429, 503)
_MIN_RETRY_INTERVAL = 1.0  # seconds between two tries for which ``retry_now`` ends a pause


@dataclass(slots=True, eq=False)
class _Running:
    """A request at the server: the tasks of its choices, and what is needed to say what it leaves in the cache: the
    ``hashes`` of the blocks of its ``token_ids``, of which ``uncached`` had to be computed, once they are known.
    """

    stream: OutputStream
    message: engine_pb2.Submit
    tenant: str
    began: float
    token_ids: Sequence[int]
    was_alone: bool
    hashes: list[bytes] | None = None
    uncached: int = 0
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    started: bool = False


_KINDS: dict[str, type[VllmServer | SglangServer | OpenAIServer]] = {
    kind.name: kind for kind in (VllmServer, SglangServer, OpenAIServer)
}
_PROBE = "The quick brown fox: 1,234.5 × (x + y)\n\tZwölf Boxkämpfer, Съешь ещё, 敏捷的棕色狐狸, 👋🏽 {'a': null}"
"""A text that two tokenizers hardly read alike."""
_PROBE_TOKENS = 4
_TOKEN_BYTES = 7  # of one in a body


class ExternalEngine:
    """The server at ``url``, which is of the ``kind``; ``address`` is how ``--engine`` names it, and ``models`` are
    those that this router serves, by their names. It runs one of them.

    A request whose connection breaks off is lost: ``EngineLost``. One that the server refuses as wrong ends with that
    error, if no other engine has begun it. Whether the server is ready is known from polls, and no connection outlives
    a request: where one breaks off, the server is asked at once, and gets nothing until it has answered. Where another
    server can take its work, ``has_substitute``, it is set aside while it fails or stands still (``Fitness``).

    What is cached at the server, and how fast it is, are estimates, unless it publishes its KV events. Long bodies for
    the server are written, and what is long of it is read, through ``offload``.
    """

    def __init__(
        self,
        address: str,
        settings: ConnectionSettings | None = None,
        *,
        url: str,
        kind: str,
        models: Mapping[str, KnownModel],
        on_change: Callable[[], None] = lambda: None,
        on_kv_event: KvListener | None = None,
        on_load: LoadListener | None = None,
        on_lost: Callable[[], None] = lambda: None,
        reconnect_limiter: ReconnectLimiter | None = None,
        has_substitute: Callable[[], bool] = lambda: False,
        offload: Offload = on_any_thread,
        poll_period: float = POLL_PERIOD,
    ) -> None:
        self.address = address
        self.settings = settings or ConnectionSettings()
        self.description: engine_pb2.DescribeResponse | None = None
        self.generation = 0
        self.loras: Mapping[str, LoRA] = {}
        self.unloaded_loras: Collection[LoRA] = ()
        self.active_loras: set[str] = set()
        self._url = url
        self._kind: ServerKind = _KINDS[kind]()
        self._models = models
        self._on_change = on_change
        self._on_kv_event = on_kv_event
        self._on_load = on_load
        self._on_lost = on_lost
        self._reconnect_limiter = reconnect_limiter or ReconnectLimiter()
        self._offload = offload
        self._poll_period = poll_period
        self._http: HttpClient | None = None
        self._liveness = LivenessMonitor(self.settings.poll_silence, self.settings.stall)
        self._fitness = Fitness(
            address,
            self.settings.stall_timeout,
            generates=self._generates,
            has_substitute=has_substitute,
            on_change=on_change,
        )
        self._pace = ObservedPace()
        self._cache = PredictedCache(_ASSUMED_BLOCKS, self._report_kv_event)
        self._reported: ReportedCache | None = None
        self._salted = False
        # In the order in which they came, by identity: an attempt that was lost here may still be ending when the next
        # one at the same request begins.
        self._running: dict[_Running, None] = {}
        self._connected = self._broken = False
        self._closing = False
        self._wake = asyncio.Event()  # to poll, or to connect, now
        self._last_early_retry = -inf
        self._tasks: list[SupervisedTask] = []

    @property
    def condition(self) -> EngineCondition:
        """How the server is, in a word. One that answers no polls and still streams is ``reconnecting``."""
        if not self._connected:
            if self._running:
                return "reconnecting"
            return "connecting" if self.description is None else "lost"
        if self.ready:
            return "ready"
        return "silent" if self._fitness.is_fit else "failing"

    @property
    def problem(self) -> str:
        """That the server answers no polls; empty while it does."""
        return "" if self._connected else "the server answers no polls"

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would be run."""
        return self._connected and not self._broken and not self._liveness.suspect and self._fitness.is_fit

    @property
    def alive(self) -> bool:
        """Whether no answer and no token of the server is overdue: it is asked all the time."""
        return not self._liveness.late

    def start(self) -> None:
        """Starts to connect; never waits, never fails."""
        self._tasks = [
            supervise("server", self._run, of=self.address, vital=False),
            supervise("server's liveness", self._watch_liveness, of=self.address, vital=False),
            supervise("server's progress", self._watch_progress, of=self.address, vital=False),
            supervise("server's probe", self._fitness.probe, of=self.address, vital=False),
        ]

    def retry_now(self) -> None:
        """Ends the pause between two tries to connect, and lets the next ones follow closely. Once a second at most."""
        now = monotonic()
        if not self._connected and now - self._last_early_retry >= _MIN_RETRY_INTERVAL:
            self._last_early_retry = now
            self._wake.set()

    async def close(self) -> None:
        """Ends every request there with ``EngineLost``."""
        self._closing = True
        await asyncio.gather(*(task.stop() for task in self._tasks))
        self._disconnect()
        choices = self._lose_all("the engine is not used any more")
        await asyncio.gather(*choices, return_exceptions=True)
        await self._close_http()
        self._reconnect_limiter.forget(self.retry_now)

    def expect_cached(self, hashes: Sequence[bytes]) -> None:
        """Adds the blocks to those that the server should have."""
        if self._connected:
            self._predict(hashes)

    def on_forwarded_gap(self, seconds: float, sequences: int) -> None:
        """Learns how long a step takes."""
        self._pace.on_gap(seconds, sequences)

    def on_forwarded_prompt(self, seconds: float, tokens: int) -> None:
        """Learns how long a prompt takes, unless others that this router sent there had not begun."""
        if all(running.started for running in self._running):
            self._pace.on_prompt(seconds, tokens)

    async def probe(self) -> None:
        """Does nothing: the server is asked all the time."""

    async def inspect(self) -> engine_pb2.InspectResponse | None:
        """None: such servers do not say what each block holds."""
        return None

    async def load_lora(self, name: str, path: str, digest: bytes = b"") -> bytes:  # noqa: ARG002 - of the protocol
        """Raises ``EngineLost``: adapters are loaded at Quire's engines only."""
        raise EngineLost(f"{self._kind.title} gets no adapters from this router")

    async def unload_lora(self, name: str) -> None:  # noqa: ARG002 - of the protocol
        """Raises ``EngineLost``, as ``load_lora``."""
        raise EngineLost(f"{self._kind.title} gets no adapters from this router")

    async def sleep(self, wait_seconds: float) -> None:  # noqa: ARG002 - of the protocol
        """Raises ``EngineLost``: only Quire's engines are put to sleep."""
        raise EngineLost(f"{self._kind.title} is not put to sleep by this router")

    async def wake_up(self) -> None:
        """Raises ``EngineLost``, as ``sleep``."""
        raise EngineLost(f"{self._kind.title} is not woken up by this router")

    # Requests

    def submit(self, message: engine_pb2.Submit, tenant: str = "") -> OutputStream:
        """Begins a request of HTTP for each choice. Raises as ``EngineClient.submit``."""
        http, description = self._http, self.description
        if not self._connected or http is None or description is None:
            raise EngineLost("the engine is not connected")
        stream = OutputStream(
            message.request_id,
            ExpectedOutput.of(message, description.vocab_size),
            on_cancel=lambda _, index: self._cancel(running, index),
            slow_client_timeout=self.settings.slow_client_timeout,
        )
        error = self._kind.unsupported(sampling_from_proto(message.sampling), resumed=stream.expected.is_resumed)
        if error is not None:
            raise RequestUnsupported(error)
        choices = list(split_choices(message, description.served_model_names[0], description.vocab_size))
        if len(choices) + self._num_choices() > MAX_CHOICES:
            raise EngineFull("too many requests run there")
        self._note_salt(message.cache_salt)
        was_alone = all(other.started for other in self._running)
        running = _Running(stream, message, tenant, monotonic(), choices[0].token_ids, was_alone)
        self._running[running] = None
        for choice in choices:
            task = running.tasks[choice.index] = asyncio.create_task(self._run_choice(http, running, choice))
            task.add_done_callback(partial(self._on_choice_end, running, choice.index))  # also if it never ran
        return stream

    async def _run_choice(self, http: HttpClient, running: _Running, choice: ChoiceRequest) -> None:
        stream = running.stream
        try:
            await self._stream_choice(http, running, choice)
        except ServerError as error:
            self._on_server_error(stream, error)
        except EngineLost as loss:
            self._lose(stream, str(loss))
            self._on_broken()  # a server that shuts down gives its requests back
        except BadAnswer as error:
            log.error("engine %s sends answers that cannot be used: %s", self.address, error)
            self._lose(stream, f"the engine answers what cannot be used: {error}")
        except TRANSPORT_ERRORS as error:
            self._lose(stream, explain(error))
            self._on_broken()
        except Exception:
            log.exception("request %s failed at engine %s", stream.request_id, self.address)
            stream.fail(internal())

    async def _stream_choice(self, http: HttpClient, running: _Running, choice: ChoiceRequest) -> None:
        """Passes a choice's outputs on until it has ended. Raises ``EngineLost`` if the server ends before it."""
        stream, reader = running.stream, self._kind.reader(choice)
        headers = {"X-Request-Id": choice.request_id}
        headers |= headers_for_servers(running.message.traceparent, running.message.tracestate)
        body, hashes = await self._prepare(running, choice)
        last, written, unnamed = None, list[int](), self._kind.unnamed_status
        try:
            async with aclosing(
                http.stream(
                    self._kind.path,
                    body,
                    headers,
                    unnamed=unnamed,
                    read=reader.read,
                    tenant=running.tenant,
                    max_values=choice.max_values,
                )
            ) as outputs:
                async for output in outputs:
                    self._liveness.on_message()
                    if output is None:
                        continue
                    self._fitness.on_output()
                    now = monotonic()
                    if last is not None and len(output.token_ids) == 1:
                        self._pace.on_gap(now - last, len(self._running))
                    elif not running.started:
                        self._on_first_output(running, now)
                    last = now
                    written += output.token_ids
                    _push(stream, output)
                    if reader.ended:
                        self._fitness.on_success()
                    if reader.ended or stream.end is not None or not stream.is_open(choice.index):
                        return
        finally:
            if written:
                self._predict(self._hashes(choice.token_ids, running.message.cache_salt, hashes, written))
        raise EngineLost(f"the engine ended the stream at token {reader.position}, before the answer was complete")

    async def _prepare(self, running: _Running, choice: ChoiceRequest) -> tuple[bytes, list[bytes]]:
        """Returns the body for a choice, and the hashes of its tokens' blocks."""
        known = running.hashes if choice.token_ids is running.token_ids else None

        def prepare() -> tuple[bytes, list[bytes]]:
            hashes = self._hashes(choice.token_ids, choice.salt) if known is None else known
            return json.dumps(self._kind.body(choice)).encode(), hashes

        size = len(choice.token_ids) * _TOKEN_BYTES
        body, hashes = await offload_long(self._offload, running.tenant, size, prepare)
        if running.hashes is None and choice.token_ids is running.token_ids:
            block_size = 0 if self.description is None else self.description.block_size
            running.uncached = len(choice.token_ids) - self._cache.count(hashes) * block_size
            running.hashes = hashes
        return body, hashes

    def _on_first_output(self, running: _Running, now: float) -> None:
        running.started = True
        if running.was_alone and len(running.tasks) == 1:
            self._pace.on_prompt(now - running.began, running.uncached)
        self._predict(running.hashes or ())

    def _on_server_error(self, stream: OutputStream, error: ServerError) -> None:
        if error.status in _FULL and not stream.confirmed:
            stream.refuse(EngineFull(f"it cannot take it now: {error}"))
        elif error.status in _BAD_REQUEST and not stream.confirmed and not stream.expected.is_resumed:
            stream.push(Output([], 0, FinishReason.ERROR, from_server(error.message) or engine_refused(error.message)))
        elif error.status in _BAD_REQUEST:
            stream.lose(EngineLost(f"the engine failed: {error}"))
        else:
            self._lose(stream, f"the engine failed: {error}")

    def _lose(self, stream: OutputStream, problem: str) -> None:
        """A choice ended because the server failed, which counts once for all choices of a request."""
        if stream.end is None and not self._closing:
            self._fitness.on_failure(problem)
        stream.lose(EngineLost(problem))

    async def _generates(self) -> bool:
        """Asks the server for a few tokens, as a request of this router's own: the first alone would not show whether
        it decodes.
        """
        http, description = self._http, self.description
        if not self._connected or http is None or description is None:
            return False
        model = description.served_model_names[0]
        tokenizer = self._models.get(model, KnownModel()).tokenizer
        token_ids = [1] if tokenizer is None else tokenizer.encode_plain(_PROBE)
        params = SamplingParams(temperature=0.0, max_tokens=_PROBE_TOKENS)
        choice = ChoiceRequest(model, f"probe-{token_hex(8)}", 0, token_ids, 0, params, b"", 0)
        reader = self._kind.reader(choice)
        headers = {"X-Request-Id": choice.request_id}
        try:
            async with asyncio.timeout(self.settings.stall_timeout):
                body, unnamed = json.dumps(self._kind.body(choice)).encode(), self._kind.unnamed_status
                async with aclosing(
                    http.stream(self._kind.path, body, headers, unnamed=unnamed, read=reader.read)
                ) as outputs:
                    async for _ in outputs:
                        if reader.ended:
                            return True
        except (ServerError, BadAnswer, EngineLost, *TRANSPORT_ERRORS) as error:
            log.info("engine %s does not generate: %s", self.address, error)
        return False

    def _on_choice_end(self, running: _Running, index: int, _: asyncio.Task[None]) -> None:
        running.tasks.pop(index, None)
        running.stream.on_engine_end(index, FinishReason.STOP)
        if not running.tasks:
            self._running.pop(running, None)

    def _cancel(self, running: _Running, index: int | None) -> None:
        """Closes the connections of a request, or of one choice."""
        tasks = list(running.tasks.values()) if index is None else [running.tasks[index]] * (index in running.tasks)
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _lose_all(self, reason: str) -> list[asyncio.Task[None]]:
        """Ends all requests. Returns the tasks that end with them."""
        tasks: list[asyncio.Task[None]] = []
        for running in list(self._running):
            tasks += running.tasks.values()
            running.stream.lose(EngineLost(reason))
            for task in running.tasks.values():
                task.cancel()
        return tasks

    def _num_choices(self) -> int:
        return sum(len(running.tasks) for running in self._running)

    # The server's state

    async def _run(self) -> None:
        failures = ConnectFailureLog(self.address, self.settings.start_patience)
        backoff = Backoff(self.settings.backoff, self.settings.max_backoff)
        refused_since: float | None = None
        while not self._closing:
            try:
                await self._connect()
                async with self._reading_kv_events():
                    await self._poll()
            except ServerError as error:
                problem = ConnectFailure(str(error))
            except BadAnswer as error:
                problem = ConnectFailure(str(error), lasting=True)
            except TRANSPORT_ERRORS as error:
                problem = ConnectFailure(explain(error), refused=is_refusal(error))
            except TlsError as error:
                problem = ConnectFailure(str(error), lasting=True)
            if self._connected:
                self._disconnect()
                failures = ConnectFailureLog(self.address)
                backoff.reset()
            failures.record(problem)
            refused_since = (refused_since or asyncio.get_running_loop().time()) if problem.refused else None
            with self._reconnect_limiter.waiting():
                if await self._pause(self._reconnect_limiter.pause(backoff, refused_since)):
                    backoff.reset()

    async def _connect(self) -> None:
        """Asks the server what it is. Its TLS files are read again, unless requests still run."""
        if self._http is None or not self._running:
            await self._close_http()
            self._http = HttpClient(
                self._url, api_key=self.settings.api_key, tls=self.settings.tls, offload=self._offload
            )
        rank = JoinRank.NEW if self.description is None else JoinRank.KNOWN
        async with (
            self._reconnect_limiter.turn(JoinRank.URGENT if self._running else rank) as turn,
            fair_timeout(self.settings.connect_timeout),
        ):
            description = await self._kind.describe(self._http, self._models)
            turn.answered()
            await self._compare(self._http, description)
            load = await self._kind.load(self._http)
        self.generation += 1
        self.description = description
        capacity = (description.blocks_total or _ASSUMED_BLOCKS) if description.prefix_caching else 0
        self._cache = PredictedCache(capacity, self._report_kv_event)
        self._connected, self._broken = True, False
        self._reconnect_limiter.opened(self.retry_now)
        self._liveness.on_message()
        log.info("engine %s is connected (%s)", self.address, f"{self._kind.title} {description.version}".strip())
        self._on_change()
        if self._on_kv_event is not None:  # the first snapshot says how many blocks there can be
            self._on_kv_event(engine_pb2.Snapshot(load=engine_pb2.Load(blocks_total=capacity)))
        self._report(load)

    async def _compare(self, http: HttpClient, description: engine_pb2.DescribeResponse) -> None:
        """Adds to the description what the server does not say: the model's sizes, and whether it has its tokenizer."""
        name = description.served_model_names[0]
        model = self._models.get(name, KnownModel())
        if model.limits is not None:
            description.vocab_size = description.vocab_size or model.limits.vocab_size
            description.max_model_len = description.max_model_len or model.limits.max_model_len
        tokens = None if model.tokenizer is None else await self._kind.tokenize(http, name, _PROBE)
        if model.tokenizer is not None and tokens is not None:
            alike = tokens == model.tokenizer.encode_plain(_PROBE)
            description.tokenizer_digest = model.tokenizer.vocabulary_digest if alike else _OTHER_TOKENIZER

    @asynccontextmanager
    async def _reading_kv_events(self) -> AsyncIterator[None]:
        """Reads the server's KV events within the block, where it publishes some and says of what its blocks are."""
        known, port = self.description, self.settings.kv_events_port
        if known is None or port is None or not (self._kind.publishes_kv_events and known.block_size):
            yield
            return
        from quire_router.engines.external.kv_event_subscriber import KvEventSubscriber  # ZeroMQ has its own threads
        from quire_router.engines.external.kv_events import ReportedCache

        most = _REMEMBERED * (known.blocks_total or _ASSUMED_BLOCKS) * known.block_size
        reported = self._reported = ReportedCache(self._cache, known.model_revision, known.block_size, most)
        reported.salted = self._salted
        host = urlsplit(self._url).hostname or ""
        subscriber = KvEventSubscriber(
            self.address, host, port, self.settings.kv_events_replay_port, reported, offload=self._offload
        )
        task = supervise("KV events", subscriber.run, of=self.address, vital=False)
        try:
            yield
        finally:
            self._reported = None
            await task.stop()

    async def _poll(self) -> None:
        """Asks the server how it is until it does not answer. Raises as ``ServerKind.load``."""
        assert self._http is not None, "it is connected"
        while True:
            await self._pause(self._poll_period)
            try:
                async with fair_timeout(self.settings.poll_silence):
                    load = await self._kind.load(self._http)
            except TimeoutError:
                if self._liveness.stalled:
                    raise
                continue
            self._set_healthy()
            self._report(load)

    def _set_healthy(self) -> None:
        was_ready, self._broken = self.ready, False
        self._liveness.on_message()
        if not was_ready:
            self._on_change()

    def _on_broken(self) -> None:
        """A request was lost with its connection, or given back: nothing new goes there until the server has
        answered.
        """
        if self._connected and not self._broken:
            self._broken = True
            self._wake.set()
            self._on_change()

    async def _watch_liveness(self) -> None:
        """A server is silent that answers no polls and streams nothing; after a time its requests are lost."""
        while True:
            took = await self._liveness.wait()
            was_ready = self.ready
            self._liveness.tick(took, expecting=self._connected or bool(self._running))
            if self._liveness.stalled and self._running:
                self._lose_all(f"the engine said nothing for {self.settings.stall:g} seconds")
            if was_ready != self.ready:
                self._on_change()

    async def _watch_progress(self) -> None:
        """Streams leave a server that answers polls while none of them advances, each once a minute at most."""
        while True:
            took = await self._fitness.wait()
            begun = any(running.started for running in self._running)
            if self._fitness.is_stalled(took, begun=begun, step_seconds=self._pace.step_seconds):
                for running in list(self._running):
                    if running.stream.stays_until <= monotonic():
                        running.stream.withdraw(EngineStalled("none of the engine's streams advances"))

    def _disconnect(self) -> None:
        """What was known of the server's load and cache is void: it may have started anew. Requests that run go on for
        as long as their connections do, as a server that shuts down lets them end.
        """
        if self._connected:
            self._connected = False
            self._reconnect_limiter.lost(self.retry_now)
            self._on_change()
        self._on_lost()

    async def _pause(self, seconds: float) -> bool:
        """Waits so long, or until there is reason to ask the server now, which returns True."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        woken = self._wake.is_set()
        self._wake.clear()
        return woken

    async def _close_http(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    # What is reported

    def _report(self, load: engine_pb2.Load) -> None:
        self._learn_max_num_seqs(load)
        pace = self._pace.pace()
        if pace is not None:
            load.pace.CopyFrom(pace)
        if self._on_load is not None and not self._closing:
            self._on_load(load)

    def _learn_max_num_seqs(self, load: engine_pb2.Load) -> None:
        """A server that lets requests wait runs as many as it can: the most that were seen to run then are its limit,
        where it does not say it.
        """
        known = self.description
        if known is None or not load.waiting or load.running <= known.max_num_seqs:
            return
        self.description = engine_pb2.DescribeResponse()
        self.description.CopyFrom(known)
        self.description.max_num_seqs = load.running
        self._on_change()

    def _report_kv_event(self, event: engine_pb2.KvEvent) -> None:
        if self._on_kv_event is not None and not self._closing and self._connected:
            self._on_kv_event(event)

    def _predict(self, hashes: Sequence[bytes]) -> None:
        """Adds blocks that the server should have, unless it reports all that it has."""
        if self._reported is None or not self._reported.complete:
            self._cache.add(hashes)

    def _note_salt(self, salt: bytes) -> None:
        self._salted = self._salted or bool(salt)
        if self._reported is not None:
            self._reported.salted = self._salted

    def _hashes(
        self, token_ids: Sequence[int], salt: bytes, hashes: Sequence[bytes] = (), written: Sequence[int] = ()
    ) -> list[bytes]:
        """The names of the full blocks of some tokens, of which the first have these ``hashes``, and of those that were
        ``written`` after them, as placement computes them for this server.
        """
        known = self.description
        if known is None or not known.prefix_caching or not known.block_size:
            return []
        rest = [*token_ids[len(hashes) * known.block_size :], *written]
        size, extra = known.block_size * TOKEN_BYTES, extra_key(known.model_revision, salt)
        return [*hashes, *hash_chain(pack(rest), size, extra, hashes[-1] if hashes else ROOT)]


def _push(stream: OutputStream, output: Output) -> None:
    """Passes an output on, quickly where it is a token and nothing else."""
    if len(output.token_ids) == 1 and output.finish_reason is None and not output.logprobs:
        stream.push_token(output.index, output.token_ids[0], output.position)
    else:
        stream.push(output)
