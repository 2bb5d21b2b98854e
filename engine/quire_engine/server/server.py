"""The engine's process: starts the core's thread and the servers, and ends all of them together."""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quire.v1 import engine_pb2, engine_pb2_grpc
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.cli import join_host_port
from quire_proto.supervise import SupervisedTask
from quire_proto.tls import ServerTls

from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs, Shutdown
from quire_engine.core.executor import Executor
from quire_engine.core.scheduler import Scheduler
from quire_engine.server.metrics import EngineMetrics, ProbeServer
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.step_time_model import StepTimeEstimator
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarBackend, GrammarCompiler

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
MAX_RECEIVE_BYTES = 16 << 20
MAX_SEND_BYTES = 256 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two engines on one port would share its connections, and a router's session would end up at either.
    ("grpc.so_reuseport", 0),
]
KEEPALIVE_SECONDS = 10.0
"""Seconds after which a router that says nothing is asked whether it is still there, and within which it has to answer:
the session of one that vanished without a word is let go of after its grace, and what runs for it too.
"""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and for how long to wait for whom. Times in seconds. ``tls`` is for the gRPC port; the metrics
    port is plain HTTP.
    """

    host: str
    port: int
    metrics_port: int
    tls: ServerTls | None
    session_grace: float
    shutdown_delay: float
    shutdown_timeout: float
    stall_timeout: float
    trace_step_interval: int
    tracing: bool


class EngineServer:
    """One engine on the network. ``serve`` returns when it was told to stop, and raises when the core failed.

    Raises ``TlsError`` where the files of ``config.tls`` cannot be used.
    """

    def __init__(
        self,
        config: ServerConfig,
        executor: Executor,
        scheduler: Scheduler,
        description: engine_pb2.DescribeResponse,
        grammars: GrammarBackend,
    ) -> None:
        self._config = config
        self._certificates = None if config.tls is None else ReloadingServerCredentials(config.tls)
        self._executor = executor
        self._description = description
        description.generation = secrets.randbits(64)
        self._core = EngineCore(scheduler, executor, self._publish)
        name = description.served_model_names[0]
        self._metrics = EngineMetrics(name, scheduler.stats, lambda: self._core.seconds_since_progress)
        self._grammars = GrammarCompiler(grammars, self._metrics.on_grammar)
        spans = TraceExporter(enabled=config.tracing, step_interval=config.trace_step_interval)
        pace = StepTimeEstimator(executor.rates, executor.kv_cache_config.block_bytes)
        self._sessions = SessionManager(description.generation, config.session_grace, spans, self._grammars, pace)
        self._sessions.bind(self._core)
        self._failure: BaseException | None = None
        self._tasks: list[SupervisedTask] = []
        self._started = self._ready = False

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT, then lets running requests end. Raises what made the core fail."""
        self._loop = asyncio.get_running_loop()
        self._stop_requested, self._stop_now, self._core_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._install_signal_handlers()
        probes = ProbeServer(self._config.host, self._config.metrics_port, self._metrics.registry, self._probes())
        server, self._health = await self._start_grpc()
        thread = Thread(target=self._run_core, name="engine-core", daemon=True)
        thread.start()
        self._started = True
        await self._set_ready(True)
        beating = self._supervise("session heartbeats", self._sessions.send_heartbeats)
        await _first_completed(self._stop_requested.wait(), self._core_ended.wait())
        await self._set_ready(False)
        await self._drain_delay()
        await self._drain()
        await beating.stop()
        await server.stop(grace=1.0)
        self._core.send(Shutdown())
        await asyncio.to_thread(thread.join, 5.0)
        await asyncio.to_thread(self._grammars.close)
        probes.close()
        if self._failure is not None:
            raise self._failure

    async def _start_grpc(self) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
        server = grpc.aio.server(options=[*_OPTIONS, *_keepalive_options(KEEPALIVE_SECONDS)])
        engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(self._sessions, self._description), server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = _listen(server, self._config.host, self._config.port, self._certificates)
        await server.start()
        name, over = self._description.served_model_names[0], "" if self._certificates is None else " over TLS"
        log.info("serving %s on %s:%d%s", name, self._config.host, port, over)
        return server, checks

    def _run_core(self) -> None:
        try:
            self._core.run()
        except BaseException as failure:  # noqa: BLE001 - it is raised again on the event loop's thread
            self._failure = failure
        finally:
            with suppress(RuntimeError):  # a step that hung is over, and nobody waits for it any more
                self._loop.call_soon_threadsafe(self._core_ended.set)

    def _publish(self, step: EngineCoreOutputs) -> None:
        """On the core's thread: hands the step's news to the event loop, which keeps their order."""
        self._loop.call_soon_threadsafe(self._on_step, step)

    def _on_step(self, step: EngineCoreOutputs) -> None:
        self._sessions.publish(step)
        self._metrics.on_step(step)

    def _install_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """A signal came. The second one says that nobody needs to be waited for."""
        (self._stop_now if self._stop_requested.is_set() else self._stop_requested).set()

    async def _drain_delay(self) -> None:
        """Serves on while everybody learns that this engine leaves; not where there is no core any more."""
        if self._config.shutdown_delay:
            log.info("leaving: new requests are taken for %g seconds", self._config.shutdown_delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.shutdown_delay):
                    await _first_completed(self._stop_now.wait(), self._core_ended.wait())

    async def _drain(self) -> None:
        """Takes nothing new and lets running requests end, for a bounded time, and while there is a core that runs
        them.
        """
        log.info("stopping: %d requests in progress", self._sessions.in_progress)
        self._sessions.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown_timeout):
                await _first_completed(self._sessions.wait_idle(), self._core_ended.wait())

    async def _set_ready(self, ready: bool) -> None:
        self._ready = ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def _probes(self) -> dict[str, Callable[[], bool]]:
        """What is asked from outside, each for a reason of its own."""
        return {
            "/started": lambda: self._started,
            "/ready": lambda: self._ready,
            "/health": lambda: self._ready,
            "/live": self._is_live,
        }

    def _is_live(self) -> bool:
        failing = any(task.failing for task in self._tasks)
        return self._failure is None and not failing and self._core.seconds_since_progress < self._config.stall_timeout

    def _supervise(self, kind: str, work: Callable[[], Coroutine[Any, Any, None]]) -> SupervisedTask:
        """Begins a task that lives as long as the engine; ``/live`` says no while it keeps failing."""
        task = SupervisedTask(kind, work, lambda: self._metrics.on_restart(kind))
        self._tasks.append(task)
        return task


def _keepalive_options(silence: float) -> list[tuple[str, int]]:
    milliseconds = round(silence * 1000)
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [("grpc.http2.max_pings_without_data", 0), *((name, milliseconds) for name in names)]


def _listen(server: grpc.aio.Server, host: str, port: int, certificates: ReloadingServerCredentials | None) -> int:
    """The port that the server listens on. Raises ``OSError`` when it cannot be had."""
    address = join_host_port(host, port)
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: it is in use, or not of this machine") from error


async def _first_completed(*endings: Coroutine[Any, Any, object]) -> None:
    """Returns once one of them came."""
    waits = [asyncio.create_task(ending) for ending in endings]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
