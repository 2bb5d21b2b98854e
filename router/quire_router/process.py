"""The router's process: builds the rooms, opens the doors, and closes them in order."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from quire_proto.text.errors import ModelTextError
from quire_proto.text.model_text import ModelText
from quire_proto.tracing import setup_tracing, shutdown_tracing

from quire_router.api.frontend import Frontend
from quire_router.api.identity import Keys
from quire_router.api.rest.app import build_admin, build_api
from quire_router.api.rest.protocol import ConnectionLimits
from quire_router.api.rest.server import HttpServer, listen
from quire_router.api.rpc.server import RpcServer
from quire_router.api.running import Running
from quire_router.config import Settings, read_settings
from quire_router.fleet.fleet import Fleet
from quire_router.fleet.settings import LinkSettings
from quire_router.fleet.static import StaticDiscovery
from quire_router.journal.base import Journal
from quire_router.journal.memory import MemoryJournal
from quire_router.lifecycle import Lifecycle

log = logging.getLogger("quire.router")
_LAST_WORDS = 2.0  # seconds for answers that are already decided to leave


class Router:
    """One router. ``run`` serves until ``stop`` is called; every room is closed on every way out."""

    def __init__(self, settings: Settings, texts: Mapping[str, ModelText]) -> None:
        self._settings = settings
        self._fleet = Fleet(
            StaticDiscovery(settings.engine),
            settings.models,
            LinkSettings(slow_client_timeout=settings.slow_client_timeout),
        )
        self._journal = _journal(settings)
        self._lifecycle = Lifecycle(self._fleet, self._journal, texts, request_timeout=settings.request_timeout)
        keys = Keys(key.get_secret_value() for key in settings.api_key)
        running = Running(settings.max_concurrent_requests)
        self._frontend = Frontend(
            texts, self._fleet, self._lifecycle, keys, running, allow_priority=settings.allow_priority
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begins the orderly end."""
        self._stopping.set()

    async def run(self) -> None:
        """Raises ``OSError`` when a port cannot be had."""
        async with AsyncExitStack() as rooms:
            rooms.callback(self._frontend.close)
            rooms.push_async_callback(self._journal.close)
            rooms.push_async_callback(self._fleet.close)
            doors = await self._open_doors(rooms)
            await self._fleet.start()
            await self._stopping.wait()
            log.info("stopping: %d requests in progress", len(self._frontend.running))
            self._frontend.running.stop_accepting()
            await self._lifecycle.drain(self._settings.shutdown_timeout)
            for door in doors:
                door.should_exit = True

    async def _open_doors(self, rooms: AsyncExitStack) -> list[HttpServer]:
        """Opens all three ports before anything is served on one of them."""
        settings, frontend, patience = self._settings, self._frontend, self._settings.slow_client_timeout
        api = build_api(frontend, max_body_bytes=settings.max_body_bytes, patience=patience)
        admin = build_admin(frontend, patience=patience)
        limits = ConnectionLimits(connections=settings.max_connections, head=patience)
        doors = [
            HttpServer(app, listen(settings.host, port), limits)
            for app, port in ((api, settings.http_port), (admin, settings.metrics_port))
        ]
        rpc = RpcServer(
            frontend,
            _address(settings.host, settings.grpc_port),
            max_message_bytes=settings.max_body_bytes,
            patience=patience,
        )
        serving = await rooms.enter_async_context(asyncio.TaskGroup())
        rooms.push_async_callback(rpc.stop, _LAST_WORDS)
        await rpc.start()
        for door in doors:
            serving.create_task(door.run_until_stopped())
        _tell(settings, [door.port for door in doors], rpc.port)
        return doors


def run(arguments: Sequence[str]) -> None:
    """Serves until a signal comes. Raises ``SystemExit`` with one line where it cannot start."""
    settings = read_settings(arguments)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below that is what clients did wrong
    setup_tracing("quire-router")
    try:
        uvloop.run(_serve(settings, _load_texts(settings.models)))
    except (ModelTextError, OSError) as error:
        raise SystemExit(f"quire-router: {error}") from error
    finally:
        shutdown_tracing()


async def _serve(settings: Settings, texts: Mapping[str, ModelText]) -> None:
    router = Router(settings, texts)
    loop = asyncio.get_running_loop()
    # The loop's own handlers would go with the loop, and a second signal would then break off the orderly end.
    _on_signals(lambda *_: loop.call_soon_threadsafe(router.stop))
    try:
        await router.run()
    finally:
        _on_signals(signal.SIG_IGN)


def _on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _load_texts(folders: Mapping[str, Path]) -> dict[str, ModelText]:
    return {name: ModelText.load(folder) for name, folder in folders.items()}


def _journal(settings: Settings) -> Journal:
    if settings.redis_url is None:
        return MemoryJournal(retention=settings.retention)
    from quire_router.journal.redis import RedisJournal
    from quire_router.journal.writer import WriterSettings

    writing = WriterSettings(retention=settings.retention)
    try:
        journal = RedisJournal(settings.redis_url.get_secret_value(), settings=writing)
    except ValueError as error:
        raise SystemExit(f"quire-router: --redis-url: {error}") from None
    journal.start()
    return journal


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tell(settings: Settings, ports: Sequence[int], rpc_port: int) -> None:
    if not settings.api_key:
        log.warning("no API key is configured: everyone who can reach this port may use the service")
    log.info("REST on %s:%d, gRPC on %d, metrics on %d", settings.host, ports[0], rpc_port, ports[1])
