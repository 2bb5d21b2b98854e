"""``EngineServer``: runs the core, the gRPC server, and the HTTP server of metrics and probes, from start to drained
shutdown.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from quire_proto.supervise import SupervisedTask
from quire_proto.telemetry import DropReason

from quire_engine.config import EngineConfig
from quire_engine.core.engine_core import EngineCoreOutputs, Shutdown
from quire_engine.core.startup import StartupPhase, StartupTimer
from quire_engine.core_client.client import LoadedCore
from quire_engine.server.grpc_server import GrpcServer
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.metrics import EngineMetrics
from quire_engine.server.probes import ProbeServer
from quire_engine.server.server_events import ServerEvents
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarCompiler

log = logging.getLogger(__name__)

CORE_END_SECONDS = 5.0


class EngineServer:
    """One engine on the network: its core, its gRPC port (``GrpcServer``), and a plain HTTP port of metrics and probes.

    ``dropped_spans`` counts the spans that do not reach a collector; None if none are exported. ``loras`` are its
    adapters; None if it serves none. ``startup`` has timed the phases so far. An engine of a data-parallel group that
    is asked to stop stops the others too. Raises like ``GrpcServer``.
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
        self._grpc = GrpcServer(config)
        self._startup = startup or StartupTimer()
        self._core, self._description = core.runner, core.description
        self._description.generation = secrets.randbits(64)
        dropped = Counter[DropReason]() if dropped_spans is None else dropped_spans
        self._metrics = EngineMetrics(
            self._description.served_model_names[0],
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
        self._sessions = SessionManager(
            self._core,
            self._description.generation,
            config.session_grace,
            exporter,
            self._grammars,
            loras=loras,
            on_first_session=partial(_end_startup, self._startup, exporter),
        )
        self._tasks: list[SupervisedTask] = []
        self._is_started = False

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises the exception that made the core fail."""
        self._events = ServerEvents(self._on_step)
        probes = ProbeServer(self._config.host, self._config.metrics_port, self._metrics.registry, self._probes())
        servicer = EngineServicer(self._sessions, self._description, self._core.stats.scheduler)
        await self._grpc.start(servicer, self._description.served_model_names[0])
        self._core.start(self._events)
        self._is_started = True
        self._startup.begin(StartupPhase.REGISTERED)
        await self._grpc.set_ready(True)
        self._grammars.prepare()
        heartbeats = self._supervise("session heartbeats", self._sessions.send_heartbeats)
        await self._events.wait_until_leaving()
        self._core.leave()
        await self._grpc.set_ready(False)
        await self._delay()
        await self._drain()
        await heartbeats.stop()
        await self._grpc.stop(1.0 if self._events.failure is None else None)
        self._core.send(Shutdown())
        await asyncio.to_thread(self._core.join, self._end_timeout)
        await asyncio.to_thread(self._grammars.close)
        probes.close()
        if self._events.failure is not None:
            raise self._events.failure

    @property
    def _end_timeout(self) -> float:
        """Seconds in which the core must end. In a group this includes the time in which others finish."""
        config, others_end = self._config, 0.0
        if config.data_parallel_size > 1:
            others_end = config.shutdown_delay + config.shutdown_timeout
        return CORE_END_SECONDS + others_end

    def _on_step(self, step: EngineCoreOutputs) -> None:
        self._sessions.publish(step)
        self._metrics.on_step(step)

    async def _delay(self) -> None:
        """Keeps serving for ``shutdown_delay`` while routers see that this engine is not ready."""
        if delay := self._config.shutdown_delay:
            log.info("shutting down: new requests are accepted for %g more seconds", delay)
            await self._events.wait_delay(delay)

    async def _drain(self) -> None:
        """Refuses new requests and waits for running ones to end, for at most ``shutdown_timeout`` and while the core
        runs. Does nothing if the core has failed: then nothing ends in order, and routers are not told.
        """
        if self._events.failure is not None:
            return
        log.info("stopping: %d requests in progress", self._sessions.in_progress)
        self._sessions.drain()
        await self._events.wait_while_core_runs(self._sessions.wait_idle(), self._config.shutdown_timeout)

    def _probes(self) -> dict[str, Callable[[], bool]]:
        """Returns the probes by path. ``/live`` fails when the engine has to be restarted."""
        return {
            "/started": lambda: self._is_started,
            "/ready": lambda: self._grpc.is_ready,
            "/health": lambda: self._grpc.is_ready,
            "/live": self._is_live,
        }

    def _is_live(self) -> bool:
        if self._events.failure is not None or any(task.failing for task in self._tasks):
            return False
        return self._core.seconds_since_progress < self._config.stall_timeout

    def _supervise(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> SupervisedTask:
        """Starts a task that runs as long as the engine. ``/live`` fails while the task keeps failing."""
        task = SupervisedTask(name, work, lambda: self._metrics.on_restart(name))
        self._tasks.append(task)
        return task


def _end_startup(startup: StartupTimer, exporter: TraceExporter) -> None:
    startup.end()
    exporter.export_startup(startup.phases)
