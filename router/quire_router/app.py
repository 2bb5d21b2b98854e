"""The router's process: builds the components, opens the ports, serves, and closes everything in order.

``run`` is what the command calls. With several workers it runs their ``Supervisor``, and each worker a ``Router``: the
ports around ``Components``.
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop
from quire_proto.cli import join_host_port, read_settings, reject_unknown_env
from quire_proto.errors import TokenizerLoadError
from quire_proto.logs import set_up_logging
from quire_proto.terminal import fail
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tracing import setup_tracing, shutdown_tracing
from starlette.types import ASGIApp

from quire_router.admission.settings_file import SettingsFileError
from quire_router.api.rest.http_server import ConnectionLimits, HttpServer, listen
from quire_router.api.rest.local_callers import LocalCallers
from quire_router.api.rest.page import Page
from quire_router.api.rest.rest_app import allow_origins, build_admin, build_api
from quire_router.api.rest.sse import KeepAlive
from quire_router.api.rpc.grpc_server import CallLimits, RpcServer
from quire_router.components import Components, model_targets, sampling_defaults
from quire_router.config import Settings, connections_within, log_startup_warnings, raise_descriptor_limit
from quire_router.core.metrics import WorkerContext
from quire_router.core.retry import failing_tasks, supervise, wait_at_most

if TYPE_CHECKING:
    from quire_router.picker.server import PickerServer
    from quire_router.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

_CHECK_PERIOD = 5.0  # seconds between two checks of a worker's tasks
_SWITCH_SECONDS = 0.0005  # that the loop waits for the GIL at most while a thread renders; Python's default is 0.005
_CLOSE_TIMEOUT = 2.0  # seconds in which gRPC calls that have their answers can send them


def run(arguments: Sequence[str]) -> None:
    """Serves until a signal comes. Raises ``SystemExit`` with one line if it cannot start."""
    worker = WorkerContext.own()  # first, as it removes its variable, which is not a setting
    reject_unknown_env(Settings)
    settings = read_settings(Settings, arguments)
    set_up_logging(
        settings.log_level.upper(), settings.log_format, **({} if worker is None else {"worker": worker.number})
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below ERROR are clients' mistakes
    raise_descriptor_limit()
    try:
        setup_tracing("quire-router")
        uvloop.run(_serve(settings, arguments, worker))
    except (TokenizerLoadError, SettingsFileError, ValueError, OSError) as error:
        fail(str(error))
    finally:
        shutdown_tracing()


async def _serve(settings: Settings, arguments: Sequence[str], worker: WorkerContext | None) -> None:
    server: Router | Supervisor
    tokenizers = _load_tokenizers(settings)
    sampling_defaults(settings)
    if worker is None:
        log_startup_warnings(settings, model_targets(settings, tokenizers)[0])
    # A supervisor needs none of this, but every worker would end again and again if a file could not be used.
    if settings.workers > 1 and worker is None:
        server = _supervisor(settings, arguments)
    else:
        server = Router(settings, tokenizers, worker)
    loop = asyncio.get_running_loop()
    # The loop's own handlers would end with the loop, and a second signal would then break off the shutdown.
    _on_signals(lambda *_: loop.call_soon_threadsafe(server.stop))
    if worker is not None:
        loop.add_reader(worker.parent, _end_with_parent, loop, worker, server)
    _tune_garbage_collector()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        await server.run()
    finally:
        _on_signals(signal.SIG_IGN)


def _supervisor(settings: Settings, arguments: Sequence[str]) -> "Supervisor":
    from quire_router.workers.supervisor import Supervisor  # imports an HTTP client, which takes 12 MiB

    return Supervisor(settings, arguments)


def _end_with_parent(loop: asyncio.AbstractEventLoop, worker: WorkerContext, server: "Router | Supervisor") -> None:
    """Stops a worker whose supervisor is gone. A pipe that was closed stays readable, so its reader is removed."""
    loop.remove_reader(worker.parent)
    server.stop()


def _tune_garbage_collector() -> None:
    """Collects seldom, and not what was loaded at the start, which stays: what requests leave behind is rarely a cycle.
    Without this a seventh of the time of streaming is spent on collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()  # main has disabled it


def _on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _load_tokenizers(settings: Settings) -> dict[str, ModelTokenizer]:
    allowed = settings.allow_special_tokens_in_content
    folders = settings.models.items()
    return {name: ModelTokenizer.load(folder, allow_special_tokens_in_content=allowed) for name, folder in folders}


def _log_ports(settings: Settings, ports: Sequence[int], rpc_port: int) -> None:
    metrics = f", metrics on {ports[1]}" if ports[1:] else ""  # of workers the supervisor has them
    log.info("REST on %s:%d, gRPC on %d%s", settings.host, ports[0], rpc_port, metrics)


class Router:
    """One router. ``run`` serves until ``stop`` is called; everything is closed on every way out. ``worker`` is given
    if it is one of several workers.
    """

    def __init__(
        self, settings: Settings, tokenizers: Mapping[str, ModelTokenizer], worker: WorkerContext | None = None
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._components = Components(settings, tokenizers, worker)
        self._picker: PickerServer | None = None
        self._stopping, self._stop_now = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Begins to shut down in order; the second call skips the delay in which it still serves."""
        (self._stop_now if self._stopping.is_set() else self._stopping).set()

    async def run(self) -> None:
        """Serves. Raises ``OSError`` if a port is not available."""
        components = self._components
        async with AsyncExitStack() as stack:
            try:
                servers = await self._open_ports(stack)
            except OSError:
                await components.journal.close()  # its writer runs since it was made
                raise
            await components.start(stack)
            if self._worker is not None:  # the supervisor answers /live for all workers
                stack.push_async_callback(supervise("worker", self._end_if_failing).stop)
            await self._stopping.wait()
            await self._serve_during_delay()
            log.info("stopping: %d requests in progress", len(components.service.concurrency))
            components.service.concurrency.close()
            timeout = self._settings.shutdown_timeout
            pickers = [self._picker.stop(timeout)] if self._picker is not None else []
            await asyncio.gather(components.runner.drain(timeout), *pickers)
            components.feed.close()
            components.queue.close()  # only now: what is queued may still be dispatched while the router drains
            for server in servers:
                server.should_exit = True

    async def _end_if_failing(self) -> None:
        """Shuts a worker down in order once one of its tasks keeps failing, so that its supervisor starts another."""
        while True:
            await asyncio.sleep(_CHECK_PERIOD)
            if failing := failing_tasks():
                log.error("this worker ends because one of its tasks keeps failing: %s", ", ".join(failing))
                return self.stop()

    async def _serve_during_delay(self) -> None:
        """Serves on while load balancers learn that this router shuts down."""
        delay = self._settings.shutdown_delay
        self._components.service.concurrency.start_draining()
        if self._picker is not None:
            await self._picker.leave()
        if delay:
            log.info("shutting down: new requests are accepted for %g more seconds", delay)
            await wait_at_most(self._stop_now, delay)

    async def _open_ports(self, stack: AsyncExitStack) -> list[HttpServer]:
        """Opens all ports before anything is served on one of them."""
        settings, write_timeout = self._settings, self._settings.slow_client_timeout
        servers = self._http_servers()
        rpc = RpcServer(
            self._components.service,
            join_host_port(settings.host, self._worker.grpc_port if self._worker else settings.grpc_port),
            max_message_bytes=settings.max_body_bytes,
            client_timeout=write_timeout,
            keepalive=settings.grpc_keepalive_seconds,
            shared=self._worker is not None,
            limits=CallLimits(settings.max_concurrent_requests, connections=connections_within(settings)),
        )
        if self._worker is None and settings.is_asked_for_load:  # for workers, their supervisor serves autoscalers
            from quire_router.autoscale.scaling_server import start_scaling_servers

            await start_scaling_servers(settings, self._components.load, stack)
        self._picker = self._open_picker()
        serving = await stack.enter_async_context(asyncio.TaskGroup())
        stack.push_async_callback(rpc.stop, _CLOSE_TIMEOUT)
        await rpc.start()
        if self._picker is not None:
            stack.push_async_callback(self._picker.stop, _CLOSE_TIMEOUT)
            await self._picker.start()
            log.info("endpoint picker on %s:%d", settings.host, self._picker.port)
        for server in servers:
            serving.create_task(server.run_until_stopped())
        _log_ports(settings, [server.port for server in servers], rpc.port)
        return servers

    def _open_picker(self) -> "PickerServer | None":
        """The server that gateways ask; None if they do not."""
        settings, picker = self._settings, self._components.picker
        if settings.picker_port is None or picker is None:
            return None
        from quire_router.picker.server import PickerLimits, PickerServer, picker_credentials

        limits = PickerLimits(
            streams=settings.max_concurrent_requests,
            max_body_bytes=settings.max_body_bytes,
            client_timeout=settings.slow_client_timeout,
            request_timeout=settings.request_timeout,
        )
        return PickerServer(
            self._components.service,
            picker,
            join_host_port(settings.host, settings.picker_port),
            limits,
            picker_credentials(settings.picker_tls) if settings.picker_secure_serving else None,
            shared=self._worker is not None,
        )

    def _http_servers(self) -> list[HttpServer]:
        """The server of the API and the one for metrics, which for workers their supervisor has."""
        settings, service = self._settings, self._components.service
        write_timeout = settings.slow_client_timeout
        share = settings.max_peer_share
        limits = ConnectionLimits(connections=connections_within(settings), head=write_timeout, peer_share=share)
        keepalive = KeepAlive(settings.sse_keepalive_seconds)
        api: ASGIApp = build_api(
            service,
            max_body_bytes=settings.max_body_bytes,
            client_timeout=write_timeout,
            keepalive=keepalive,
            page=Page() if settings.page else None,
            fleet=self._components.fleet_endpoint(keepalive) if settings.page else None,
            lora_updater=self._components.lora_updater,
            batches=self._components.batches,
            conversations=self._components.conversations,
            quota=self._components.response_quota,
        )
        if settings.allowed_origins:
            api = allow_origins(api, settings.allowed_origins)
        if settings.is_for_this_machine and not service.keys.required:
            api = LocalCallers(
                api,
                hosts=settings.allowed_hosts,
                origins=settings.allowed_origins,
                is_open=lambda: not service.keys.required,
                client_timeout=write_timeout,
            )
        if self._worker is not None:
            return [HttpServer(api, listen(settings.host, self._worker.http_port, "--http-port", shared=True), limits)]
        admin: ASGIApp = build_admin(service, client_timeout=write_timeout)
        if settings.is_for_this_machine:
            admin = LocalCallers(admin, hosts=settings.allowed_hosts, client_timeout=write_timeout)
        return [
            HttpServer(app, listen(settings.host, port, flag), limits)
            for app, port, flag in (
                (api, settings.http_port, "--http-port"),
                (admin, settings.metrics_port, "--metrics-port"),
            )
        ]
