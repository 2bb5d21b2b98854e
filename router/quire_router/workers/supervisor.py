"""The process that starts the workers, restarts them when they die, and serves the metrics port for all of them.

``Supervisor`` is the process; ``Admin`` is what its metrics port serves: the metrics of all workers together, and the
health of one.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from tempfile import TemporaryDirectory

from aiohttp import ClientError, ClientSession, ClientTimeout
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from quire_proto.cli import join_host_port
from quire_proto.supervise import Backoff
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_router.api.rest.http import JSON_HEADERS, ClientDisconnectedError, Header, HttpResponse, not_on_this_port
from quire_router.api.rest.http_server import HttpServer, listen
from quire_router.api.rest.local_callers import LocalCallers
from quire_router.api.rest.openai_format import error_response
from quire_router.api.service import new_request_id
from quire_router.autoscale.load_totals import RedisLoad
from quire_router.autoscale.scaling_server import start_scaling_servers
from quire_router.config import Settings
from quire_router.core.metrics import WorkerContext
from quire_router.core.retry import wait_at_most

log = logging.getLogger(__name__)

_FIRST_DELAY, _LAST_DELAY = 0.5, 10.0  # seconds before a worker that died is restarted
_STABLE = 30.0  # seconds of life after which the next worker starts after the first delay again
_KILL_GRACE = 5.0  # seconds that a worker may take longer than its shutdown should
_WORKER_TIMEOUT = ClientTimeout(total=2.0)
_WORKER_PATHS = ("/started", "/ready", "/health")
_TEXT: tuple[Header, ...] = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
Page = tuple[int, bytes, tuple[Header, ...]]


class Supervisor:
    """Runs ``settings.workers`` processes of this program, with the same ``arguments``, on one port for each API.

    The kernel spreads connections over them (SO_REUSEPORT), and they share state through Redis like routers on several
    machines. Workers end with their supervisor, however it ends.
    """

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._stopping = asyncio.Event()
        self._workers: dict[int, asyncio.subprocess.Process] = {}

    def stop(self) -> None:
        """Begins to shut down in order; the second call sends the workers another SIGTERM, as without a supervisor."""
        if self._stopping.is_set():
            _signal(self._workers.values(), signal.SIGTERM)
        self._stopping.set()

    async def run(self) -> None:
        """Runs the workers. Raises ``OSError`` if a port is not available."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="quire-router-metrics-"))
            http, grpc = (
                stack.enter_context(reserve(settings.host, port, flag))
                for port, flag in ((settings.http_port, "--http-port"), (settings.grpc_port, "--grpc-port"))
            )
            ports = (http.getsockname()[1], grpc.getsockname()[1])
            if settings.picker_port is not None:
                stack.enter_context(reserve(settings.host, settings.picker_port, "--picker-port"))
            write_timeout = settings.slow_client_timeout
            admin: ASGIApp = Admin(folder, settings.host, ports[0], lambda: bool(self._workers), write_timeout)
            if settings.is_for_this_machine:
                admin = LocalCallers(admin, hosts=settings.allowed_hosts, client_timeout=write_timeout)
            admin_server = HttpServer(admin, listen(settings.host, settings.metrics_port, "--metrics-port"))
            await self._start_scaling_servers(stack)
            log.info(
                "%d workers: REST on %s:%d, gRPC on %d, metrics on %d",
                settings.workers,
                settings.host,
                *ports,
                admin_server.port,
            )
            read_end, write_end = os.pipe()  # is at its end in the workers once this process is gone
            stack.callback(os.close, read_end)
            stack.callback(os.close, write_end)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(admin_server.run_until_stopped())
                for number in range(1, settings.workers + 1):
                    tasks.create_task(self._keep_running(WorkerContext(*ports, read_end, number, folder), folder))
                await self._stopping.wait()
                await self._stop_workers()
                admin_server.should_exit = True

    async def _start_scaling_servers(self, stack: AsyncExitStack) -> None:
        """Serves the load of all workers, which is in Redis."""
        if self._settings.is_asked_for_load and self._settings.redis is not None:
            load = RedisLoad(self._settings.redis, self._settings.models)
            stack.push_async_callback(load.close)
            await start_scaling_servers(self._settings, load, stack)

    async def _keep_running(self, context: WorkerContext, folder: str) -> None:
        number = context.number
        backoff, loop = Backoff(_FIRST_DELAY, _LAST_DELAY), asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            try:
                worker = await self._start(context, folder)
            except OSError as error:  # no memory, processes or descriptors: likely when a worker was killed for memory
                log.error("cannot start worker %d, trying again: %s", number, error)
            else:
                status = await self._wait_for_exit(number, worker)
                mark_process_dead(number, folder)  # type: ignore[no-untyped-call]
                if self._stopping.is_set():
                    return
                log.error("worker %d ended with %d; restarting it", number, status)
            if loop.time() - began > _STABLE:
                backoff.reset()
            await wait_at_most(self._stopping, backoff.next())

    async def _wait_for_exit(self, number: int, worker: asyncio.subprocess.Process) -> int:
        """The exit status of a worker that was just started."""
        self._workers[number] = worker
        if self._stopping.is_set():  # while it was being started, so it got no signal
            _signal([worker], signal.SIGTERM)
        try:
            return await worker.wait()
        finally:
            del self._workers[number]

    async def _start(self, context: WorkerContext, folder: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, **context.environment(), "PROMETHEUS_MULTIPROC_DIR": folder}
        command = (sys.executable, "-m", "quire_router.main", *self._arguments)
        return await asyncio.create_subprocess_exec(
            *command, env=environment, pass_fds=(context.parent,), start_new_session=True
        )

    async def _stop_workers(self) -> None:
        """Sends SIGTERM to all, and SIGKILL to workers that take much too long."""
        _signal(self._workers.values(), signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.shutdown_delay + self._settings.shutdown_timeout + _KILL_GRACE):
                await asyncio.gather(*(worker.wait() for worker in list(self._workers.values())))
        except TimeoutError:
            _signal(self._workers.values(), signal.SIGKILL)


def reserve(host: str, port: int, flag: str) -> socket.socket:
    """A socket that reserves a port for the workers and never listens on it. Raises ``OSError``, whose text names the
    ``flag`` of the port, if it is in use.
    """
    listen(host, port, flag).close()  # without SO_REUSEPORT: a port of another program is an error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return reserved


def _signal(workers: Iterable[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for worker in list(workers):
        if worker.returncode is None:
            worker.send_signal(number)


class Admin:
    """An ASGI application. ``folder`` is where the workers write their metrics, and ``host`` and ``port`` are where
    they serve; ``alive`` returns whether there is a worker. A client has to read its response within
    ``write_timeout`` seconds.
    """

    def __init__(self, folder: str, host: str, port: int, alive: Callable[[], bool], write_timeout: float) -> None:
        self._folder = folder
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - to connect to, not to listen on
        self._url = f"http://{join_host_port(host, port)}"
        self._alive = alive
        self._write_timeout = write_timeout
        self._pages: dict[str, Callable[[], Awaitable[Page]]] = {
            **{path: partial(self._from_worker, path) for path in _WORKER_PATHS},
            "/live": self._live,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Handles one request."""
        response = HttpResponse(send, self._write_timeout, new_request_id())
        try:
            page = self._pages.get(scope["path"]) if scope["method"] == "GET" else None
            await response.send(*(_not_here(response.request_id) if page is None else await page()))
        except ClientDisconnectedError:
            return
        finally:
            response.close()

    async def _live(self) -> Page:
        return (
            (200, b'{"status":"ok"}', JSON_HEADERS) if self._alive() else (503, b'{"status":"no worker"}', JSON_HEADERS)
        )

    async def _from_worker(self, path: str) -> Page:
        """The response of the worker that gets the connection."""
        try:
            async with ClientSession(self._url, timeout=_WORKER_TIMEOUT) as session, session.get(path) as response:
                return response.status, await response.read(), JSON_HEADERS
        except (ClientError, OSError, TimeoutError):
            return 503, b'{"status":"unavailable"}', JSON_HEADERS

    async def _metrics(self) -> Page:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return 200, generate_latest(registry), _TEXT


def _not_here(request_id: str) -> Page:
    """The page of a path that this port does not have."""
    status, body, headers = error_response(not_on_this_port(), request_id)
    return status, body, tuple(headers)
