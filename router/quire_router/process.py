"""The router's process: builds the rooms, opens the doors, and closes them in order."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import uvloop
from quire_proto.settings import read_settings, reject_unknown_env
from quire_proto.text.errors import TokenizerLoadError
from quire_proto.text.model_text import ModelTokenizer
from quire_proto.tracing import setup_tracing, shutdown_tracing

from quire_router.admission.tenants_file import TenantsFileError
from quire_router.api.rest.app import build_admin, build_api
from quire_router.api.rest.events import KeepAlive
from quire_router.api.rest.protocol import ConnectionLimits
from quire_router.api.rest.server import HttpServer, listen
from quire_router.api.rpc.server import CallLimits, RpcServer
from quire_router.assembly import Parts
from quire_router.autoscale.doors import open_to_autoscalers
from quire_router.cautions import connections_within, raise_descriptor_limit, warn_of
from quire_router.config import Settings
from quire_router.supervise import failing_tasks, supervise
from quire_router.workers.place import Place

if TYPE_CHECKING:
    from quire_router.workers.supervisor import Supervisor

log = logging.getLogger("quire.router")
_LOOK = 5.0  # seconds from one look at its tasks to the next, of a worker
_SWITCH_SECONDS = 0.0005  # how long the loop waits for its turn at most while a thread renders; Python has 0.005
_LAST_WORDS = 2.0  # seconds for answers that are already decided to leave


class Router:
    """One router. ``run`` serves until ``stop`` is called; every part is closed on every way out. ``place`` is a
    worker's among several.
    """

    def __init__(self, settings: Settings, texts: Mapping[str, ModelTokenizer], place: Place | None = None) -> None:
        self._settings = settings
        self._place = place
        self._parts = Parts(settings, texts)
        self._stopping, self._hurried = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Begins the orderly end; the second time, without serving on before it."""
        (self._hurried if self._stopping.is_set() else self._stopping).set()

    async def run(self) -> None:
        """Raises ``OSError`` when a port cannot be had."""
        parts = self._parts
        async with AsyncExitStack() as ending:
            doors = await self._open_doors(ending)
            await parts.start(ending)
            if self._place is not None:  # nobody asks a single worker for /live
                ending.push_async_callback(supervise("worker", self._end_if_failing).stop)
            await self._stopping.wait()
            await self._linger()
            log.info("stopping: %d requests in progress", len(parts.frontend.concurrency))
            parts.frontend.concurrency.close()
            await parts.lifecycle.drain(self._settings.shutdown_timeout)
            parts.queue.close()  # only now: what waits there may have its turn while the router drains
            for door in doors:
                door.should_exit = True

    async def _end_if_failing(self) -> None:
        """Ends a worker in order once a task of it cannot be mended, so that its supervisor starts another."""
        while True:
            await asyncio.sleep(_LOOK)
            if failing := failing_tasks():
                log.error("this worker ends, because a task of it keeps failing: %s", ", ".join(failing))
                return self.stop()

    async def _linger(self) -> None:
        """Serves on while everybody learns that this router leaves."""
        delay = self._settings.shutdown_delay
        self._parts.frontend.concurrency.start_draining()
        if delay:
            log.info("leaving: new requests are taken for %g seconds", delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._hurried.wait()

    async def _open_doors(self, ending: AsyncExitStack) -> list[HttpServer]:
        """Opens all ports before anything is served on one of them."""
        settings, patience = self._settings, self._settings.slow_client_timeout
        doors = self._http_doors()
        rpc = RpcServer(
            self._parts.frontend,
            _address(settings.host, self._place.grpc_port if self._place else settings.grpc_port),
            max_message_bytes=settings.max_body_bytes,
            patience=patience,
            shared=self._place is not None,
            limits=CallLimits(settings.max_concurrent_requests, connections=connections_within(settings)),
        )
        if self._place is None:  # of workers, their supervisor tells autoscalers
            await open_to_autoscalers(settings, self._parts.load, ending)
        serving = await ending.enter_async_context(asyncio.TaskGroup())
        ending.push_async_callback(rpc.stop, _LAST_WORDS)
        await rpc.start()
        for door in doors:
            serving.create_task(door.run_until_stopped())
        _tell(settings, [door.port for door in doors], rpc.port)
        return doors

    def _http_doors(self) -> list[HttpServer]:
        """The API's, and the one for metrics, which workers leave to their supervisor."""
        settings, frontend, patience = self._settings, self._parts.frontend, self._settings.slow_client_timeout
        share = settings.max_peer_share
        limits = ConnectionLimits(connections=connections_within(settings), head=patience, peer_share=share)
        keepalive = KeepAlive(settings.sse_keepalive_seconds)
        api = build_api(frontend, max_body_bytes=settings.max_body_bytes, patience=patience, keepalive=keepalive)
        if self._place is not None:
            return [HttpServer(api, listen(settings.host, self._place.http_port, shared=True), limits)]
        admin = build_admin(frontend, patience=patience)
        return [
            HttpServer(app, listen(settings.host, port), limits)
            for app, port in ((api, settings.http_port), (admin, settings.metrics_port))
        ]


def run(arguments: Sequence[str]) -> None:
    """Serves until a signal comes. Raises ``SystemExit`` with one line where it cannot start."""
    place = Place.own()  # first: no variable that is not a setting may be left
    reject_unknown_env(Settings)
    settings = read_settings(Settings, arguments)
    speaker = "" if place is None else f"[worker {place.number}] "
    form = f"%(asctime)s {speaker}%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=form)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below that is what clients did wrong
    raise_descriptor_limit()
    setup_tracing("quire-router")
    try:
        uvloop.run(_serve(settings, arguments, place))
    except (TokenizerLoadError, TenantsFileError, ValueError, OSError) as error:
        raise SystemExit(f"quire-router: {error}") from error
    finally:
        shutdown_tracing()


async def _serve(settings: Settings, arguments: Sequence[str], place: Place | None) -> None:
    server: Router | Supervisor
    texts = _load_texts(settings)
    if place is None:
        warn_of(settings)
    # A supervisor needs no texts, but every worker would end again and again with what is wrong with them.
    if settings.workers > 1 and place is None:
        server = _supervisor(settings, arguments)
    else:
        server = Router(settings, texts, place)
    loop = asyncio.get_running_loop()
    # The loop's own handlers would go with the loop, and a second signal would then break off the orderly end.
    _on_signals(lambda *_: loop.call_soon_threadsafe(server.stop))
    if place is not None:
        loop.add_reader(place.parent, _end_with_parent, loop, place, server)
    _rest_collector()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        await server.run()
    finally:
        _on_signals(signal.SIG_IGN)


def _supervisor(settings: Settings, arguments: Sequence[str]) -> "Supervisor":
    from quire_router.workers.supervisor import Supervisor  # imports an HTTP client, which takes 12 MiB

    return Supervisor(settings, arguments)


def _end_with_parent(loop: asyncio.AbstractEventLoop, place: Place, server: "Router | Supervisor") -> None:
    """The supervisor is gone. A pipe that has ended says so for ever, so it is heard once."""
    loop.remove_reader(place.parent)
    server.stop()


def _rest_collector() -> None:
    """What was loaded stays, and need not be looked through again; what requests leave behind is rarely a cycle.
    Without this a seventh of the time of streaming is spent looking for garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _load_texts(settings: Settings) -> dict[str, ModelTokenizer]:
    allowed = settings.allow_special_tokens_in_content
    folders = settings.models.items()
    return {name: ModelTokenizer.load(folder, allow_special_tokens_in_content=allowed) for name, folder in folders}


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tell(settings: Settings, ports: Sequence[int], rpc_port: int) -> None:
    metrics = f", metrics on {ports[1]}" if ports[1:] else ""  # of workers the supervisor has them
    log.info("REST on %s:%d, gRPC on %d%s", settings.host, ports[0], rpc_port, metrics)
