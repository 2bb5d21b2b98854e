"""``EngineServer``: runs the core, the gRPC server, and the HTTP server of metrics and probes, from start to drained
shutdown.
"""

import asyncio
import logging
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quire.v1 import engine_pb2, engine_pb2_grpc
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.cli import join_host_port
from quire_proto.engine_token import EngineTokens
from quire_proto.supervise import SupervisedTask
from quire_proto.telemetry import DropReason

from quire_engine.config import EngineConfig
from quire_engine.core.engine_core import EngineCoreOutputs, Shutdown
from quire_engine.core.startup import StartupPhase, StartupTimer
from quire_engine.core_client.client import LoadedCore
from quire_engine.server.connection_mux import ConnectionMux
from quire_engine.server.grpc_options import server_options
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.metrics import EngineMetrics
from quire_engine.server.probes import ProbeServer
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.token_interceptor import TokenInterceptor
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarCompiler

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
CORE_END_SECONDS = 5.0


class EngineServer:
    """One engine on the network. The metrics port is plain HTTP. The gRPC port uses TLS if ``config.tls`` is set, and
    requires a token if ``config.engine_token_file`` is set.

    ``dropped_spans`` counts the spans that do not reach a collector; None if none are exported. ``loras`` are its
    adapters; None if it serves none. ``startup`` has timed the phases so far. An engine of a data-parallel group that
    is asked to stop stops the others too.

    Raises ``TlsError`` if the files of ``config.tls`` cannot be used, and ``TokenError`` if the token file cannot.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: LoadedCore,
        *,
        loras: LoRARegistry | None = None,
        dropped_spans: Counter[DropReason] | None = None,
        startup: StartupTimer | None = None,
    ) -> None:
        self._config = config
        self._certificates = None if config.tls is None else ReloadingServerCredentials(config.tls)
        self._mux: ConnectionMux | None = None
        token_file = config.engine_token_file
        self._interceptors = () if token_file is None else (TokenInterceptor(EngineTokens(token_file)),)
        self._startup = startup or StartupTimer()
        self._core = core.runner
        self._description = description = core.description
        description.generation = secrets.randbits(64)
        name = description.served_model_names[0]
        dropped = Counter[DropReason]() if dropped_spans is None else dropped_spans
        self._metrics = EngineMetrics(
            name,
            self._core.stats,
            lambda: self._core.seconds_since_progress,
            dropped,
            loras=loras if config.enable_lora else None,
            max_loras=config.max_loras,
            startup=self._startup.phases,
        )
        self._grammars = GrammarCompiler(core.grammars, self._metrics.on_grammar)
        exporter = TraceExporter(
            enabled=dropped_spans is not None, step_interval=config.trace_step_interval, dropped=dropped
        )
        self._sessions = SessionManager(description.generation, config.session_grace, exporter, self._grammars, loras)
        self._sessions.bind(self._core)
        self._sessions.on_first_session = self._end_startup
        self._tracing = exporter
        self._failure: BaseException | None = None
        self._tasks: list[SupervisedTask] = []
        self._started = self._ready = False

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises the exception that made the core fail."""
        self._loop = asyncio.get_running_loop()
        self._stop_requested, self._stop_now, self._core_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._group_leaves = asyncio.Event()
        self._install_signal_handlers()
        probes = ProbeServer(self._config.host, self._config.metrics_port, self._metrics.registry, self._probes())
        server, self._health = await self._start_grpc()
        self._core.start(self)
        self._started = True
        self._startup.begin(StartupPhase.REGISTERED)
        await self._set_ready(True)
        self._grammars.prepare()
        heartbeats = self._supervise("session heartbeats", self._sessions.send_heartbeats)
        await self._until_leaving()
        await self._set_ready(False)
        await self._drain_delay()
        await self._drain()
        await heartbeats.stop()
        await server.stop(grace=1.0 if self._failure is None else None)
        if self._mux is not None:
            self._mux.close()
        self._core.send(Shutdown())
        await asyncio.to_thread(self._core.join, self._end_timeout)
        await asyncio.to_thread(self._grammars.close)
        probes.close()
        if self._failure is not None:
            raise self._failure

    def _end_startup(self) -> None:
        self._startup.end()
        self._tracing.export_startup(self._startup.phases)

    async def _until_leaving(self) -> None:
        """Waits for a signal, for the end of the core, or until another engine of the group was asked to stop."""
        await _first_completed(self._stop_requested.wait(), self._core_ended.wait(), self._group_leaves.wait())
        if not (self._stop_requested.is_set() or self._core_ended.is_set()):
            log.info("another engine of the group is stopping: this one stops with it")
        self._core.leave()

    @property
    def _end_timeout(self) -> float:
        """Seconds in which the core must end. In a group this includes the time in which others finish."""
        config, others_end = self._config, 0.0
        if config.data_parallel_size > 1:
            others_end = config.shutdown_delay + config.shutdown_timeout
        return CORE_END_SECONDS + others_end

    async def _start_grpc(self) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
        server = grpc.aio.server(interceptors=self._interceptors, options=server_options())
        servicer = EngineServicer(self._sessions, self._description, self._core.stats.scheduler)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = await self._listen(server)
        name, over = self._description.served_model_names[0], "" if self._certificates is None else " over TLS"
        if self._mux is not None:
            log.warning("plain text is accepted as well as TLS (--tls-optional): turn it off when all routers use TLS")
        log.info("serving %s on %s%s", name, join_host_port(self._config.host, port), over)
        return server, checks

    async def _listen(self, server: grpc.aio.Server) -> int:
        """Starts the gRPC port and returns it. Raises ``OSError`` if that fails."""
        host, port = self._config.host, self._config.port
        if self._certificates is None or not self._config.tls_optional:
            port = _add_port(server, join_host_port(host, port), self._certificates)
            await server.start()
            return port
        self._mux = ConnectionMux()
        _add_port(server, self._mux.tls_address, self._certificates)
        _add_port(server, self._mux.plain_address, None)
        await server.start()
        return await self._mux.listen(host, port)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Hands a step to the event loop, which keeps their order. See ``CoreListener``."""
        self._loop.call_soon_threadsafe(self._on_step, outputs)

    def on_leaving(self) -> None:
        """See ``CoreListener.on_leaving``."""
        self._call_soon(self._group_leaves.set)

    def on_end(self, failure: BaseException | None) -> None:
        """See ``CoreListener.on_end``."""
        self._failure = failure
        self._call_soon(self._core_ended.set)

    def _call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # a hung step ended after the loop was closed
            self._loop.call_soon_threadsafe(function)

    def _on_step(self, step: EngineCoreOutputs) -> None:
        self._sessions.publish(step)
        self._metrics.on_step(step)

    def _install_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Requests a stop. A second signal skips the shutdown delay."""
        (self._stop_now if self._stop_requested.is_set() else self._stop_requested).set()

    async def _drain_delay(self) -> None:
        """Keeps serving for ``shutdown_delay`` while routers see that this engine is not ready. Ends early on a second
        signal, or if the core has ended.
        """
        if self._config.shutdown_delay:
            log.info("shutting down: new requests are accepted for %g more seconds", self._config.shutdown_delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.shutdown_delay):
                    await _first_completed(self._stop_now.wait(), self._core_ended.wait())

    async def _drain(self) -> None:
        """Refuses new requests and waits for running ones to end, for at most ``shutdown_timeout`` and while the core
        runs. Does nothing if the core has failed: then nothing ends in order, and routers are not told.
        """
        if self._failure is not None:
            return
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
        """Returns the probes by path. ``/live`` fails when the engine has to be restarted."""
        return {
            "/started": lambda: self._started,
            "/ready": lambda: self._ready,
            "/health": lambda: self._ready,
            "/live": self._is_live,
        }

    def _is_live(self) -> bool:
        failing = any(task.failing for task in self._tasks)
        return self._failure is None and not failing and self._core.seconds_since_progress < self._config.stall_timeout

    def _supervise(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> SupervisedTask:
        """Starts a task that runs as long as the engine. ``/live`` fails while the task keeps failing."""
        task = SupervisedTask(name, work, lambda: self._metrics.on_restart(name))
        self._tasks.append(task)
        return task


def _add_port(server: grpc.aio.Server, address: str, certificates: ReloadingServerCredentials | None) -> int:
    """Binds an address and returns its port. Raises ``OSError`` if that fails."""
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: it is in use, or not of this machine") from error


async def _first_completed(*awaited: Coroutine[Any, Any, object]) -> None:
    """Waits until one of the coroutines returns, and cancels the others."""
    tasks = [asyncio.create_task(each) for each in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
