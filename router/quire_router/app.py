"""The router's process: builds the components, opens the ports, serves, and closes everything in order.

``run`` is what the command calls. With several workers it runs their ``Supervisor``, and each worker a ``Router``: the
ports around ``Components``, which are made from the settings and connected to each other. ``BackgroundJobs`` are what a
router does beside its requests, at intervals: it claims orphaned requests, settles the usage of dead routers' requests,
sweeps the prefix index, flushes token metrics and gives memory back.
"""

import asyncio
import ctypes
import gc
import logging
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from uuid import uuid4

import uvloop
from quire_proto.cli import join_host_port, read_settings, reject_unknown_env
from quire_proto.errors import QuireError, TokenizerLoadError
from quire_proto.supervise import SupervisedTask
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tracing import setup_tracing, shutdown_tracing
from starlette.types import ASGIApp

from quire_router.admission.fair_queue import QueueBounds
from quire_router.admission.limits import RateLimiter
from quire_router.admission.queue import AdmissionQueue, QueueSettings
from quire_router.admission.redis_rate_limit import RedisRateLimiter
from quire_router.admission.tenants_file import (
    WATCH_PERIOD,
    TenantsFile,
    TenantsFileError,
    TenantsFileWatch,
    read_tenants,
)
from quire_router.api.auth import Authenticator, OidcSettings
from quire_router.api.fleet_feed import FleetFeed
from quire_router.api.request_limits import BodyBudget, ConcurrencyLimit
from quire_router.api.rest.batch_endpoints import BatchApi, BatchLines, SpareRoom
from quire_router.api.rest.endpoints import FleetEndpoint
from quire_router.api.rest.http_server import ConnectionLimits, HttpServer, listen
from quire_router.api.rest.page import Page
from quire_router.api.rest.rest_app import allow_origins, build_admin, build_api
from quire_router.api.rest.sse import KeepAlive
from quire_router.api.rpc.grpc_server import CallLimits, RpcServer
from quire_router.api.service import ApiService
from quire_router.autoscale.load_totals import Load, LoadPublisher, LocalLoad, RedisLoad
from quire_router.autoscale.scaling_server import start_scaling_servers
from quire_router.batches.files import Files, FileSettings
from quire_router.batches.worker import Batches, BatchWorker
from quire_router.config import Settings, connections_within, log_startup_warnings, raise_descriptor_limit
from quire_router.core import metrics
from quire_router.core.fleet_view import FleetLog
from quire_router.core.metrics import WorkerContext
from quire_router.core.retry import failing_tasks, supervise, wait_at_most
from quire_router.discovery.combined import create_discovery
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.load_messages import SpeculativeBlocks
from quire_router.engines.load_sharing import LoadSharing
from quire_router.engines.lora_updates import LoRAUpdater
from quire_router.engines.model_matcher import ModelIdentity
from quire_router.engines.output_stream import ATTEMPT_FAILURES
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings, assumed_limits
from quire_router.journal.base import Journal
from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.codec import JournalSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.objects import MemoryObjectStore
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.redis.redis_objects import RedisObjectStore
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from quire_router.journal.sqlite.sqlite_objects import SqliteObjectStore
from quire_router.placement.placer import Placer
from quire_router.placement.policies import PlacementSettings
from quire_router.placement.prefix_index import PrefixIndex
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.runner import RequestRunner
from quire_router.requests.state import FLUSH_PERIOD, flush_token_metrics

if TYPE_CHECKING:
    from quire_router.api.oidc import OidcVerifier
    from quire_router.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

_CHECK_PERIOD = 5.0  # seconds between two checks of a worker's tasks
_SWITCH_SECONDS = 0.0005  # that the loop waits for the GIL at most while a thread renders; Python's default is 0.005
_CLOSE_TIMEOUT = 2.0  # seconds in which gRPC calls that have their answers can send them
ADOPTION_PERIOD = 1.0  # seconds
SETTLE_PERIOD = 20.0  # seconds at most; with the ledger's ``GRACE`` less than the records of dead routers are kept
SWEEP_PERIOD, SWEEP_PAUSE = 1.0, 0.02  # seconds between sweeps, and between parts of one
SWEEP_BLOCKS = 2_000  # a millisecond or so of work at once
TRIM_PERIOD, TRIM_GROWTH = 1.0, 64 << 20  # seconds between checks, and the growth in bytes that is worth a trim
TRIM_MAX_PERIOD = 10.0  # seconds at most between two attempts while the memory seems to be in use
_PAGE = resource.getpagesize()


def run(arguments: Sequence[str]) -> None:
    """Serves until a signal comes. Raises ``SystemExit`` with one line if it cannot start."""
    worker = WorkerContext.own()  # first, as it removes its variable, which is not a setting
    reject_unknown_env(Settings)
    settings = read_settings(Settings, arguments)
    prefix = "" if worker is None else f"[worker {worker.number}] "
    form = f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=form)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below ERROR are clients' mistakes
    raise_descriptor_limit()
    setup_tracing("quire-router")
    try:
        uvloop.run(_serve(settings, arguments, worker))
    except (TokenizerLoadError, TenantsFileError, ValueError, OSError) as error:
        raise SystemExit(f"quire-router: {error}") from error
    finally:
        shutdown_tracing()


async def _serve(settings: Settings, arguments: Sequence[str], worker: WorkerContext | None) -> None:
    server: Router | Supervisor
    tokenizers = _load_tokenizers(settings)
    if worker is None:
        log_startup_warnings(settings)
    # A supervisor needs no tokenizers, but every worker would end again and again if one could not be loaded.
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
        self._components = Components(settings, tokenizers)
        self._stopping, self._stop_now = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Begins to shut down in order; the second call skips the delay in which it still serves."""
        (self._stop_now if self._stopping.is_set() else self._stopping).set()

    async def run(self) -> None:
        """Serves. Raises ``OSError`` if a port is not available."""
        components = self._components
        async with AsyncExitStack() as stack:
            servers = await self._open_ports(stack)
            await components.start(stack)
            if self._worker is not None:  # the supervisor answers /live for all workers
                stack.push_async_callback(supervise("worker", self._end_if_failing).stop)
            await self._stopping.wait()
            await self._serve_during_delay()
            log.info("stopping: %d requests in progress", len(components.service.concurrency))
            components.service.concurrency.close()
            await components.runner.drain(self._settings.shutdown_timeout)
            components.feed.close()
            components.queue.close()  # only now: what is queued may still be dispatched while the router drains
            for server in servers:
                server.should_exit = True

    async def _end_if_failing(self) -> None:
        """Shuts a worker down in order once one of its tasks keeps failing, so that its supervisor starts another."""
        while True:
            await asyncio.sleep(_CHECK_PERIOD)
            if failing := failing_tasks():
                log.error("this worker ends, because a task of it keeps failing: %s", ", ".join(failing))
                return self.stop()

    async def _serve_during_delay(self) -> None:
        """Serves on while load balancers learn that this router shuts down."""
        delay = self._settings.shutdown_delay
        self._components.service.concurrency.start_draining()
        if delay:
            log.info("leaving: new requests are taken for %g seconds", delay)
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
            shared=self._worker is not None,
            limits=CallLimits(settings.max_concurrent_requests, connections=connections_within(settings)),
        )
        if self._worker is None:  # for workers, their supervisor serves autoscalers
            await start_scaling_servers(settings, self._components.load, stack)
        serving = await stack.enter_async_context(asyncio.TaskGroup())
        stack.push_async_callback(rpc.stop, _CLOSE_TIMEOUT)
        await rpc.start()
        for server in servers:
            serving.create_task(server.run_until_stopped())
        _log_ports(settings, [server.port for server in servers], rpc.port)
        return servers

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
        )
        if settings.allowed_origins:
            api = allow_origins(api, settings.allowed_origins)
        if self._worker is not None:
            return [HttpServer(api, listen(settings.host, self._worker.http_port, shared=True), limits)]
        admin = build_admin(service, client_timeout=write_timeout)
        return [
            HttpServer(app, listen(settings.host, port), limits)
            for app, port in ((api, settings.http_port), (admin, settings.metrics_port))
        ]


class Components:
    """Everything of a router but its ports. Raises ``ValueError`` for settings that cannot be used."""

    def __init__(self, settings: Settings, tokenizers: Mapping[str, ModelTokenizer]) -> None:
        metrics.init_series(settings.models, ATTEMPT_FAILURES)
        tenants = TenantsFile() if settings.tenants is None else read_tenants(settings.tenants)
        self.index = PrefixIndex()
        self.fleet = EnginePool(
            create_discovery(settings.engine, dns_period=settings.engine_dns_period),
            settings.models,
            _connection_settings(settings),
            assumed=assumed_limits(settings.models),
            vocabularies={
                name: ModelIdentity.of(folder, tokenizers[name].vocabulary_digest)
                for name, folder in settings.models.items()
            },
            tokenizers=tokenizers,
        )
        self.fleet.on_kv_event = CacheEvents(self.index, self.fleet.table)
        self.queue = AdmissionQueue(settings.models, self.fleet, tenants.tenants, _queue_settings(settings))
        self.fleet.on_capacity = self.queue.notify_capacity
        redis = settings.redis
        # One membership: the owner of leases in the journal, and the sender of load to routers and autoscalers.
        router_id = uuid4().hex
        self.journal = _journal(settings, router_id)
        self.shared_limiter = None if redis is None else RedisRateLimiter(redis)
        self.speculative_blocks = SpeculativeBlocks(self.fleet.table, self.index)
        self.speculative_blocks.on_remote = self.fleet.expect_cached
        self.load_sharing = (
            None
            if redis is None
            else LoadSharing(redis, self.fleet.ledger, self.speculative_blocks, router_id=router_id)
        )
        self._tenants = tenants.tenants
        self.tokens = None if settings.oidc is None else _token_verifier(settings.oidc)
        limits = RateLimiter(tenants.tenants, self.shared_limiter)
        self._fleet_log = FleetLog()
        self.runner = self._create_runner(settings, tokenizers, limits)
        self.feed = FleetFeed(
            self.fleet,
            self.runner,
            self.queue,
            self._fleet_log,
            models=settings.models,
            policy=settings.placement_policy,
        )
        self._allow_fleet = settings.allow_fleet
        self._tenants_file = None if settings.tenants is None else TenantsFileWatch(settings.tenants, tenants)
        self.lora_updater = LoRAUpdater(self.fleet, list(tokenizers)) if settings.allow_lora_updates else None
        self.service = ApiService(
            tokenizers,
            self.fleet,
            self.runner,
            Authenticator((key.get_secret_value() for key in settings.api_key), tenants, self.tokens),
            ConcurrencyLimit(settings.max_concurrent_requests),
            allow_priority=settings.allow_priority,
            refuse_unknown=settings.unknown_parameters == "refuse",
            request_timeout=settings.request_timeout,
            durable=self.journal.is_durable,
            tenant_limits=limits,
            bodies=BodyBudget(settings.max_inflight_body_bytes),
            responses_retention=settings.responses_retention,
            read_usage=self.journal.usage,
        )
        self.queue.on_queued = self.service.bodies.release_queued
        local = LocalLoad(settings.models, self.runner.load)
        self.load: Load = local if redis is None else RedisLoad(redis, settings.models)
        self._load_publisher = None if redis is None else LoadPublisher(redis, local.now, router_id=router_id)
        self._background_jobs = BackgroundJobs(self.runner, self.index, self.journal)
        self._objects = _object_store(settings, self.journal)
        files = Files(
            self._objects,
            FileSettings(settings.max_file_bytes, settings.max_tenant_file_bytes, settings.file_retention),
        )
        batches = Batches(self._objects, files)
        self._spare_room = SpareRoom(self.fleet, self.queue.waiting)
        self.fleet.on_capacity = self._notify_capacity
        lines = BatchLines(self.service, tenants.tenants, self._spare_room)
        worker = BatchWorker(batches, lines, owner=router_id, max_line_bytes=settings.max_body_bytes)
        self.batches = BatchApi(batches, worker)

    async def start(self, stack: AsyncExitStack) -> None:
        """Begins to connect to engines and to Redis, and never waits for them; ``stack`` closes what was started."""
        stack.callback(self.service.close)
        stack.push_async_callback(supervise("keys", self._keep_keys).stop)
        if self.tokens is not None:
            stack.push_async_callback(supervise("issuer", self.tokens.run).stop)
        stack.push_async_callback(self.journal.close)
        if self.shared_limiter is not None:
            stack.push_async_callback(self.shared_limiter.close)
        if self.load_sharing is not None:
            stack.push_async_callback(self.load_sharing.close)
            self.load_sharing.start()
        if self._load_publisher is not None:
            stack.push_async_callback(self._load_publisher.close)
            self.runner.on_load_changed(self._load_publisher.changed)
            self._load_publisher.start()
        stack.push_async_callback(self.load.close)
        stack.push_async_callback(self.fleet.close)
        await self.fleet.start()
        if self.lora_updater is not None:
            self.lora_updater.start()
            stack.push_async_callback(self.lora_updater.close)
        stack.push_async_callback(self._objects.close)
        stack.push_async_callback(supervise("batches", self.batches.worker.run).stop)
        stack.push_async_callback(self._background_jobs.stop)
        self._background_jobs.start()

    def _notify_capacity(self) -> None:
        """Requests that wait come before lines of batches."""
        self.queue.notify_capacity()
        self._spare_room.notify_capacity()

    async def _keep_keys(self) -> None:
        """Derives callers' identities, again whenever the tenants' file was replaced."""
        await self.service.keys.prepare()
        while self._tenants_file is not None:
            await asyncio.sleep(WATCH_PERIOD)
            if (file := await self._tenants_file.look()) is not None:
                self._tenants.replace_all(file.tenants)
                self.service.keys.replace(file)
                await self.service.keys.prepare()

    def fleet_endpoint(self, keepalive: KeepAlive) -> FleetEndpoint:
        """Returns the handler of the fleet's stream."""
        return FleetEndpoint(self.feed, self.service.keys, keepalive, for_all=self._allow_fleet)

    def _create_runner(
        self, settings: Settings, tokenizers: Mapping[str, ModelTokenizer], limits: RateLimiter
    ) -> RequestRunner:
        placement = PlacementSettings(policy=settings.placement_policy, max_affinity_wait=settings.max_affinity_wait)
        placer = Placer(self.fleet.table, self.index, placement, self.fleet.namespace, monotonic)
        placer.lora_columns = self.fleet.lora_columns
        if self.load_sharing is not None:
            placer.on_speculative_blocks = self.speculative_blocks.add
        dispatcher = Dispatcher(
            self.fleet,
            placer,
            self.queue,
            policy=settings.placement_policy,
            hold_timeout=settings.hold_timeout,
            explain=settings.debug_route,
            fleet_log=self._fleet_log,
        )
        return RequestRunner(
            self.fleet,
            placer,
            dispatcher,
            self.journal,
            tokenizers,
            limits=limits,
            request_timeout=settings.request_timeout,
            max_background=settings.max_concurrent_requests,
            expose_route=settings.debug_route,
            fleet_log=self._fleet_log,
        )


def _token_verifier(settings: OidcSettings) -> "OidcVerifier":
    from quire_router.api.oidc import OidcVerifier  # imports an HTTP client and cryptography, which take 20 MiB

    return OidcVerifier(settings)


def _connection_settings(settings: Settings) -> ConnectionSettings:
    key = None if settings.engine_api_key is None else settings.engine_api_key.get_secret_value()
    return ConnectionSettings(slow_client_timeout=settings.slow_client_timeout, tls=settings.engine_tls, api_key=key)


def _queue_settings(settings: Settings) -> QueueSettings:
    return QueueSettings(
        hold_timeout=settings.hold_timeout,
        max_seconds=max(settings.max_queue_seconds, settings.hold_timeout),
        bounds=QueueBounds(max_requests=settings.max_queued_requests, max_bytes=settings.max_queued_bytes),
    )


def _journal(settings: Settings, router_id: str) -> BufferedJournal | MemoryJournal:
    """Raises ``JournalFileError``."""
    times = JournalSettings(retention=settings.retention, usage_retention=settings.usage_retention)
    journal: BufferedJournal
    if settings.redis is not None:
        journal = RedisJournal(settings.redis, owner=router_id, settings=times)
    elif settings.journal_file is not None:
        most = settings.journal_max_bytes
        journal = SqliteJournal(settings.journal_file, owner=router_id, settings=times, max_bytes=most)
    else:
        return MemoryJournal(retention=settings.retention)
    journal.start()
    return journal


def _object_store(
    settings: Settings, journal: BufferedJournal | MemoryJournal
) -> RedisObjectStore | SqliteObjectStore | MemoryObjectStore:
    """Returns where files and batches are kept: in the journal's place."""
    if settings.redis is not None:
        return RedisObjectStore(settings.redis)
    return journal.objects if isinstance(journal, SqliteJournal) else MemoryObjectStore()


class BackgroundJobs:
    """What runs at intervals, from ``start`` to ``stop``; a run that fails is tried again the next time."""

    def __init__(self, runner: RequestRunner, index: PrefixIndex, journal: Journal) -> None:
        self._runner = runner
        self._index = index
        self._journal = journal
        self._tasks: list[SupervisedTask] = []

    def start(self) -> None:
        """Starts the tasks; never waits."""
        self._tasks = [
            supervise("orphans", self._claim_orphans),
            supervise("prefix index", self._sweep_index),
            supervise("usage", self._settle_usage),
            supervise("tally", _flush_token_metrics),
            supervise("memory", _trim_memory),
        ]

    async def stop(self) -> None:
        """Ends the tasks."""
        await asyncio.gather(*(task.stop() for task in self._tasks))

    async def _claim_orphans(self) -> None:
        while True:
            await asyncio.sleep(ADOPTION_PERIOD)
            try:
                adopted = await self._runner.claim_orphans()
            except QuireError:
                continue  # request state cannot be read now, which the journal logs
            except Exception:  # one record that cannot be claimed is no reason to restart a router
                log.exception("looking for orphans failed")
                continue
            if adopted:
                log.info("took up %d background requests that their routers had left", adopted)

    async def _settle_usage(self) -> None:
        """At random times, so that routers do not do the same at once."""
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.0) * SETTLE_PERIOD)  # noqa: S311 - no secret
            with suppress(QuireError):  # the journal is away, and logs that
                await self._journal.settle_usage()

    async def _sweep_index(self) -> None:
        """Seldom while there is nothing to sweep, so that an idle router is not woken for it."""
        more = False
        while True:
            await asyncio.sleep(SWEEP_PAUSE if more else SWEEP_PERIOD)
            more = self._index.sweep(SWEEP_BLOCKS)


async def _flush_token_metrics() -> None:
    while True:
        await asyncio.sleep(FLUSH_PERIOD)
        flush_token_metrics()


async def _trim_memory() -> None:
    """Gives free memory back to the system whenever the process has grown. Refused gRPC calls are garbage in cycles, of
    which Python sees a few objects and not the megabyte of headers behind each, and the C library keeps what its
    threads have freed in many small parts. So memory that hostile headers took would stay, and add up to gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # only glibc has it
        return
    least = after = _resident_memory()
    period, idle = TRIM_PERIOD, 0.0
    while True:
        await asyncio.sleep(TRIM_PERIOD)
        idle += TRIM_PERIOD
        before = _resident_memory()
        least = min(least, before)
        if before > after + TRIM_GROWTH or (before > least + TRIM_GROWTH and idle >= period):
            gc.collect(1)
            await asyncio.to_thread(trim, 0)
            after, idle = _resident_memory(), 0.0
            helped = before - after > TRIM_GROWTH / 4
            period = TRIM_PERIOD if helped else min(2 * period, TRIM_MAX_PERIOD)


def _resident_memory() -> int:
    """Resident memory of the process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0
