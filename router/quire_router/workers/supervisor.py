"""The process that starts the workers, starts them again when they die, and serves what concerns all of them."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from tempfile import TemporaryDirectory

from prometheus_client.multiprocess import mark_process_dead

from quire_router.api.rest.server import HttpServer, listen
from quire_router.autoscale.doors import open_to_autoscalers
from quire_router.autoscale.redis_load import RedisLoad
from quire_router.config import Settings
from quire_router.workers.admin import Admin
from quire_router.workers.place import Place

log = logging.getLogger("quire.router")
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
        async with AsyncExitStack() as rooms:
            folder = rooms.enter_context(TemporaryDirectory(prefix="quire-router-metrics-"))
            http, grpc = (
                rooms.enter_context(reserve(settings.host, p)) for p in (settings.http_port, settings.grpc_port)
            )
            ports = (http.getsockname()[1], grpc.getsockname()[1])
            patience = settings.slow_client_timeout
            admin = Admin(folder, settings.host, ports[0], lambda: bool(self._workers), patience)
            door = HttpServer(admin, listen(settings.host, settings.metrics_port))
            await self._open_to_autoscalers(rooms)
            log.info(
                "%d workers: REST on %s:%d, gRPC on %d, metrics on %d",
                settings.workers,
                settings.host,
                *ports,
                door.port,
            )
            watched, kept = os.pipe()  # reads as ended in the workers once this process is gone
            rooms.callback(os.close, watched)
            rooms.callback(os.close, kept)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(door.run_until_stopped())
                for number in range(1, settings.workers + 1):
                    tasks.create_task(self._keep(Place(*ports, watched, number), folder))
                await self._stopping.wait()
                await self._end()
                door.should_exit = True

    async def _open_to_autoscalers(self, rooms: AsyncExitStack) -> None:
        """What the workers have together is in Redis."""
        if self._settings.is_asked_for_load and self._settings.redis is not None:
            load = RedisLoad(self._settings.redis, self._settings.models)
            rooms.push_async_callback(load.close)
            await open_to_autoscalers(self._settings, load, rooms)

    async def _keep(self, place: Place, folder: str) -> None:
        number = place.number
        delay, loop = _FIRST_DELAY, asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            try:
                worker = await self._start(place, folder)
            except OSError as error:  # no memory, processes or descriptors: likely when a worker was killed for memory
                log.error("worker %d cannot be started, which is tried again: %s", number, error)
            else:
                status = await self._follow(number, worker)
                mark_process_dead(number, folder)  # type: ignore[no-untyped-call]
                if self._stopping.is_set():
                    return
                log.error("worker %d ended with %d and is started again", number, status)
            delay = _FIRST_DELAY if loop.time() - began > _STEADY else min(2 * delay, _LAST_DELAY)
            await _sleep_unless(self._stopping, delay)

    async def _follow(self, number: int, worker: asyncio.subprocess.Process) -> int:
        """The exit status of a worker that was just started."""
        self._workers[number] = worker
        if self._stopping.is_set():  # while it was being started, so that no signal has reached it
            _signal([worker], signal.SIGTERM)
        try:
            return await worker.wait()
        finally:
            del self._workers[number]

    async def _start(self, place: Place, folder: str) -> asyncio.subprocess.Process:
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
