"""The process that starts the workers, starts them again when they die, and serves what concerns all of them."""

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
from starlette.types import Receive, Scope, Send

from quire_router.api.rest.http import JSON_HEADERS, ClientDisconnectedError, Header, HttpResponse
from quire_router.api.rest.http_server import HttpServer, listen
from quire_router.api.service import new_request_id
from quire_router.autoscale.load_totals import RedisLoad
from quire_router.autoscale.scaling_server import start_scaling_servers
from quire_router.config import Settings
from quire_router.core.metrics import WorkerContext

log = logging.getLogger(__name__)

# What the metrics port serves where several workers share the others: their metrics together, and one's health.


_WORKER_SECONDS = ClientTimeout(total=2.0)  # for a worker's answer
_OF_A_WORKER = ("/started", "/ready", "/health")
_TEXT: tuple[Header, ...] = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
Page = tuple[int, bytes, tuple[Header, ...]]


class Admin:
    """An ASGI application. ``folder`` is where the workers write their metrics, and ``host`` and ``port`` are where
    they serve; ``alive`` tells whether there is any. A client may leave its answer unread for ``patience`` seconds.
    """

    def __init__(self, folder: str, host: str, port: int, alive: Callable[[], bool], patience: float) -> None:
        self._folder = folder
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - where to ask, not to listen
        self._url = f"http://{join_host_port(host, port)}"
        self._alive = alive
        self._patience = patience
        self._pages: dict[str, Callable[[], Awaitable[Page]]] = {
            **{path: partial(self._of_a_worker, path) for path in _OF_A_WORKER},
            "/live": self._live,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answers one request."""
        reply = HttpResponse(send, self._patience, new_request_id())
        try:
            page = self._pages.get(scope["path"]) if scope["method"] == "GET" else None
            await reply.send(*((404, b"{}", JSON_HEADERS) if page is None else await page()))
        except ClientDisconnectedError:
            return
        finally:
            reply.close()

    async def _live(self) -> Page:
        return (
            (200, b'{"status":"ok"}', JSON_HEADERS) if self._alive() else (503, b'{"status":"no worker"}', JSON_HEADERS)
        )

    async def _of_a_worker(self, path: str) -> Page:
        """What the worker that takes the connection says there."""
        try:
            async with ClientSession(self._url, timeout=_WORKER_SECONDS) as session, session.get(path) as answer:
                return answer.status, await answer.read(), JSON_HEADERS
        except (ClientError, OSError, TimeoutError):
            return 503, b'{"status":"unavailable"}', JSON_HEADERS

    async def _metrics(self) -> Page:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return 200, generate_latest(registry), _TEXT


_FIRST_DELAY, _LAST_DELAY = 0.5, 10.0  # seconds before a worker that died is started again
_STEADY = 30.0  # seconds of life after which a death is not held against the next worker
_SLACK = 5.0  # seconds that a worker may take longer than its own shutdown


class Supervisor:
    """Runs ``settings.workers`` processes of this program, with the same ``arguments``, on one port for each API.

    The kernel spreads connections over them (SO_REUSEPORT), and they know of each other what routers on several
    machines do. Workers end with their supervisor, however it ends.
    """

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._stopping = asyncio.Event()
        self._workers: dict[int, asyncio.subprocess.Process] = {}

    def stop(self) -> None:
        """Begins the orderly end; the second time the workers are told once more, as they would be without this."""
        if self._stopping.is_set():
            _signal(self._workers.values(), signal.SIGTERM)
        self._stopping.set()

    async def run(self) -> None:
        """Raises ``OSError`` when a port cannot be had."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="quire-router-metrics-"))
            http, grpc = (
                stack.enter_context(reserve(settings.host, p)) for p in (settings.http_port, settings.grpc_port)
            )
            ports = (http.getsockname()[1], grpc.getsockname()[1])
            patience = settings.slow_client_timeout
            admin = Admin(folder, settings.host, ports[0], lambda: bool(self._workers), patience)
            admin_server = HttpServer(admin, listen(settings.host, settings.metrics_port))
            await self._start_scaling_servers(stack)
            log.info(
                "%d workers: REST on %s:%d, gRPC on %d, metrics on %d",
                settings.workers,
                settings.host,
                *ports,
                admin_server.port,
            )
            watched, kept = os.pipe()  # reads as ended in the workers once this process is gone
            stack.callback(os.close, watched)
            stack.callback(os.close, kept)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(admin_server.run_until_stopped())
                for number in range(1, settings.workers + 1):
                    tasks.create_task(self._keep_running(WorkerContext(*ports, watched, number), folder))
                await self._stopping.wait()
                await self._end()
                admin_server.should_exit = True

    async def _start_scaling_servers(self, stack: AsyncExitStack) -> None:
        """What the workers have together is in Redis."""
        if self._settings.is_asked_for_load and self._settings.redis is not None:
            load = RedisLoad(self._settings.redis, self._settings.models)
            stack.push_async_callback(load.close)
            await start_scaling_servers(self._settings, load, stack)

    async def _keep_running(self, place: WorkerContext, folder: str) -> None:
        number = place.number
        delay, loop = _FIRST_DELAY, asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            try:
                worker = await self._start(place, folder)
            except OSError as error:  # no memory, processes or descriptors: likely when a worker was killed for memory
                log.error("worker %d cannot be started, which is tried again: %s", number, error)
            else:
                status = await self._wait_for_exit(number, worker)
                mark_process_dead(number, folder)  # type: ignore[no-untyped-call]
                if self._stopping.is_set():
                    return
                log.error("worker %d ended with %d and is started again", number, status)
            delay = _FIRST_DELAY if loop.time() - began > _STEADY else min(2 * delay, _LAST_DELAY)
            await _sleep_unless(self._stopping, delay)

    async def _wait_for_exit(self, number: int, worker: asyncio.subprocess.Process) -> int:
        """The exit status of a worker that was just started."""
        self._workers[number] = worker
        if self._stopping.is_set():  # while it was being started, so that no signal has reached it
            _signal([worker], signal.SIGTERM)
        try:
            return await worker.wait()
        finally:
            del self._workers[number]

    async def _start(self, place: WorkerContext, folder: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, **place.environment(), "PROMETHEUS_MULTIPROC_DIR": folder}
        command = (sys.executable, "-m", "quire_router.main", *self._arguments)
        return await asyncio.create_subprocess_exec(
            *command, env=environment, pass_fds=(place.parent,), start_new_session=True
        )

    async def _end(self) -> None:
        """SIGTERM to all, and SIGKILL to whoever takes much too long."""
        _signal(self._workers.values(), signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.shutdown_delay + self._settings.shutdown_timeout + _SLACK):
                await asyncio.gather(*(worker.wait() for worker in list(self._workers.values())))
        except TimeoutError:
            _signal(self._workers.values(), signal.SIGKILL)


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds a port for the workers and never listens on it. Raises ``OSError`` when it is in use."""
    listen(host, port).close()  # without sharing: another program's port is an error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held


def _signal(workers: Iterable[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for worker in list(workers):
        if worker.returncode is None:
            worker.send_signal(number)


async def _sleep_unless(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
