"""``Components``: the parts of a router, made from the settings and connected to each other."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from quire_proto.engine_token import EngineTokens
from quire_proto.text.model_folder import recommended_sampling
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.admission.fair_queue import QueueBounds
from quire_router.admission.limits import RateLimiter
from quire_router.admission.model_targets import ModelTargets
from quire_router.admission.queue import AdmissionQueue, QueueSettings
from quire_router.admission.settings_file import WATCH_PERIOD, FileWatch, SettingsFileError
from quire_router.admission.targets_file import TargetsFile, read_targets
from quire_router.admission.tenants_file import TenantsFile
from quire_router.api.auth import Authenticator, OidcSettings
from quire_router.api.conversations import Conversations
from quire_router.api.fleet_feed import FleetFeed
from quire_router.api.request_limits import BodyBudget, ConcurrencyLimit
from quire_router.api.rest.batch_endpoints import BatchApi
from quire_router.api.rest.batch_lines import BatchLines
from quire_router.api.rest.endpoints import FleetEndpoint
from quire_router.api.rest.sse import KeepAlive
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.api.tokenizer_pool import TokenizerPool
from quire_router.autoscale.local_load import Load, LocalLoad
from quire_router.autoscale.pod_deletion_cost import PodDeletionCosts
from quire_router.background_jobs import BackgroundJobs
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import Files, FileSettings
from quire_router.batches.worker import BatchWorker
from quire_router.clients.kube_client import KubeAccess
from quire_router.config import Settings
from quire_router.core import metrics
from quire_router.core.fleet_view import FleetLog, RouterView
from quire_router.core.metrics import WorkerContext
from quire_router.core.retry import supervise
from quire_router.discovery.combined import create_discovery
from quire_router.engines.attempt import ATTEMPT_FAILURES
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.load_messages import SpeculativeBlocks
from quire_router.engines.loaded_loras import LoadedLoRAs
from quire_router.engines.lora_updates import LoRAUpdater
from quire_router.engines.model_matcher import ModelIdentity
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings, assumed_limits
from quire_router.engines.sleep_controller import SleepController
from quire_router.engines.sleep_plan import SleepSettings
from quire_router.engines.update_sharing import UpdateSharing, WorkerPlace
from quire_router.journal.codec import JournalSettings
from quire_router.journal.fleet_secret import FleetSecret
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.objects import MemoryObjectStore, Quota
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.placer import Placer
from quire_router.placement.policies import PlacementSettings
from quire_router.placement.prefix_index import PrefixIndex
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.runner import RequestRunner
from quire_router.requests.shadow import ShadowRunner

if TYPE_CHECKING:
    from quire_router.admission.redis_rate_limit import RedisRateLimiter
    from quire_router.api.oidc import OidcVerifier
    from quire_router.autoscale.load_totals import LoadPublisher
    from quire_router.clients.redis_client import RedisAccess
    from quire_router.engines.load_sharing import LoadSharing
    from quire_router.journal.buffered_journal import BufferedJournal
    from quire_router.journal.redis.redis_objects import RedisObjectStore
    from quire_router.journal.sqlite.sqlite_objects import SqliteObjectStore
    from quire_router.picker.picker import EndpointPicker


@dataclass(frozen=True, slots=True)
class SharedState:
    """What routers share through Redis beside the journal."""

    limiter: "RedisRateLimiter"
    load_sharing: "LoadSharing"
    load: Load
    load_publisher: "LoadPublisher"


class Components:
    """Everything of a router but its ports; ``worker`` is given if it is one of several. Raises ``ValueError`` for
    settings that cannot be used.
    """

    def __init__(
        self, settings: Settings, tokenizers: Mapping[str, ModelTokenizer], worker: WorkerContext | None = None
    ) -> None:
        metrics.init_series(settings.models, ATTEMPT_FAILURES)
        self._settings = settings
        tenants = settings.read_tenants() or TenantsFile(open=True)
        self._targets, self._targets_file = model_targets(settings, tokenizers)
        self.index = PrefixIndex()
        self.update_sharing = (
            None if worker is None else UpdateSharing(WorkerPlace(Path(worker.folder), worker.number, settings.workers))
        )
        table = EngineTable()
        cache_events = CacheEvents(self.index, table)
        if self.update_sharing is not None:
            self.update_sharing.blocks = cache_events.blocks
        threads = TokenizerPool()
        discovery = create_discovery(settings.engine, dns_period=settings.engine_dns_period)
        redis = settings.redis  # one for all, so that a failover that one client notices counts for every one
        # One membership: the owner of leases in the journal, and the sender of load to routers and autoscalers.
        router_id = uuid4().hex
        self.journal = _journal(settings, redis, router_id)
        self._objects = _object_store(redis, self.journal)
        loaded_loras = LoadedLoRAs(self._objects)
        self.fleet = EnginePool(
            discovery,
            settings.models,
            _connection_settings(settings),
            on_kv_event=cache_events,
            table=table,
            assumed=assumed_limits(settings.models),
            vocabularies={
                name: ModelIdentity.of(folder, tokenizers[name].vocabulary_digest)
                for name, folder in settings.models.items()
            },
            tokenizers=tokenizers,
            update_sharing=self.update_sharing,
            is_complete=lambda: discovery.is_complete() and (loaded_loras.is_read or not settings.allow_lora_updates),
            offload=threads.run_admitted,
        )
        self.queue = AdmissionQueue(settings.models, self.fleet, tenants.tenants, _queue_settings(settings))
        self.fleet.on_capacity = self.queue.notify_capacity
        self.speculative_blocks = SpeculativeBlocks(self.fleet.table, self.index)
        self.speculative_blocks.on_remote = self.fleet.expect_cached
        local = LocalLoad(settings.models, self._count_load)
        shared = None if redis is None else self._share(redis, settings, local, router_id)
        self.shared_limiter = None if shared is None else shared.limiter
        self.load_sharing = None if shared is None else shared.load_sharing
        self.load = local if shared is None else shared.load
        self._load_publisher = None if shared is None else shared.load_publisher
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
            router=RouterView(
                version("quire-router"), round(time(), 3), settings.placement_policy, settings.metrics_port
            ),
        )
        self._tenants_file = (
            None
            if settings.tenants is None
            else FileWatch(settings.tenants, tenants, self._read_tenants, metrics.TENANTS_FILE_CURRENT)
        )
        self.lora_updater = (
            LoRAUpdater(self.fleet, list(tokenizers), loaded_loras, hold_timeout=settings.hold_timeout)
            if settings.allow_lora_updates
            else None
        )
        self._fleet_secret = FleetSecret(self._objects)
        self.service = ApiService(
            tokenizers,
            self.fleet,
            self.runner,
            Authenticator(
                (key.get_secret_value() for key in settings.api_key),
                tenants,
                self.tokens,
                self._fleet_secret,
                fleet_for_all=settings.allow_fleet,
            ),
            ConcurrencyLimit(settings.max_concurrent_requests),
            allow_priority=settings.allow_priority,
            refuse_unknown=settings.unknown_parameters == "refuse",
            sampling_defaults=sampling_defaults(settings),
            request_timeout=settings.request_timeout,
            hold_timeout=settings.hold_timeout,
            durable=self.journal.is_durable,
            tenant_limits=limits,
            bodies=BodyBudget(settings.max_inflight_body_bytes),
            responses_retention=settings.responses_retention,
            read_usage=self.journal.usage,
            targets=None if self._targets_file is None else self._targets,
            fleet_secret=self._fleet_secret,
            threads=threads,
        )
        self.queue.on_queued = self.service.bodies.release_queued
        self.sleep = SleepController(
            self.fleet,
            list(settings.models),
            SleepSettings(settings.sleep_after, settings.min_awake, settings.target_load),
            num_waiting=self._num_waiting,
            read_load=self.load.read,
        )
        self.queue.on_waiting = self.fleet.on_waiting = self.sleep.ask
        self.picker = None if settings.picker_port is None else self._create_picker(settings, limits)
        self._deletion_costs = self._create_deletion_costs(settings, router_id, worker)
        self._background_jobs = BackgroundJobs(self.runner, self.index, self.journal)
        file_settings = FileSettings(settings.max_file_bytes, settings.max_tenant_file_bytes, settings.file_retention)
        batches = Batches(self._objects, Files(self._objects, file_settings))
        self.response_quota = ResponseQuota(self._objects, settings.max_tenant_response_bytes)
        batch_worker = BatchWorker(
            batches,
            BatchLines(self.service, tenants.tenants, self.response_quota),
            owner=router_id,
            max_line_bytes=settings.max_body_bytes,
        )
        self.batches = BatchApi(batches, batch_worker)
        self.conversations = Conversations(
            self._objects,
            settings.responses_retention,
            Quota(settings.max_tenant_conversations, settings.max_tenant_conversation_bytes),
        )

    async def start(self, stack: AsyncExitStack) -> None:
        """Begins to connect to engines and to Redis, and never waits for them; ``stack`` closes what was started."""
        stack.callback(self.service.close)
        stack.push_async_callback(supervise("keys", self._keep_keys).stop)
        if self._targets_file is not None:
            stack.push_async_callback(supervise("targets", self._keep_targets).stop)
        if self.tokens is not None:
            stack.push_async_callback(supervise("issuer", self.tokens.run).stop)
        stack.push_async_callback(self.journal.close)
        stack.push_async_callback(self._objects.close)
        if self.shared_limiter is not None:
            stack.push_async_callback(self.shared_limiter.close)
        if self.load_sharing is not None:
            stack.push_async_callback(self.load_sharing.close)
            self.load_sharing.start()
        if self._load_publisher is not None:
            stack.push_async_callback(self._load_publisher.close)
            self.runner.on_load_changed(self._load_publisher.changed)
            if self.picker is not None:
                self.picker.on_load_changed = self._load_publisher.changed
            self._load_publisher.start()
        stack.push_async_callback(self.load.close)
        if self.update_sharing is not None:
            self.update_sharing.start()
            stack.push_async_callback(self.update_sharing.close)
        stack.push_async_callback(self.fleet.close)
        await self.fleet.start()
        self.sleep.start()
        stack.push_async_callback(self.sleep.close)
        if self.lora_updater is not None:
            self.lora_updater.start()
            stack.push_async_callback(self.lora_updater.close)
        stack.push_async_callback(supervise("fleet secret", self._fleet_secret.run).stop)
        stack.push_async_callback(supervise("batches", self.batches.worker.run).stop)
        if self._deletion_costs is not None:
            stack.push_async_callback(supervise("deletion costs", self._deletion_costs.run, vital=False).stop)
        stack.push_async_callback(self._background_jobs.stop)
        self._background_jobs.start()

    async def _keep_keys(self) -> None:
        """Derives callers' identities, again whenever the tenants' file was replaced."""
        await self.service.keys.prepare()
        while self._tenants_file is not None:
            await asyncio.sleep(WATCH_PERIOD)
            if (file := await self._tenants_file.look()) is not None:
                self._tenants.replace_all(file.tenants)
                self.service.keys.replace(file)
                await self.service.keys.prepare()

    def _read_tenants(self, path: Path) -> TenantsFile:
        """Reads the tenants' file again. Raises ``SettingsFileError``, also for one that would open a closed API."""
        file = self._settings.read_tenants()
        assert file is not None, "it was there at the start"
        if file.open and self.service.keys.required:
            raise SettingsFileError(f"{path}: open: this router asks for keys: restart it to let everybody in.")
        return file

    async def _keep_targets(self) -> None:
        """Takes over the file of targets whenever it was replaced."""
        while self._targets_file is not None:
            await asyncio.sleep(WATCH_PERIOD)
            if (file := await self._targets_file.look()) is not None:
                self._targets.replace_all(file.groups)

    def fleet_endpoint(self, keepalive: KeepAlive) -> FleetEndpoint:
        """Returns the handler of the fleet's stream."""
        return FleetEndpoint(self.feed, self.service.keys, keepalive)

    def _create_runner(
        self, settings: Settings, tokenizers: Mapping[str, ModelTokenizer], limits: RateLimiter
    ) -> RequestRunner:
        placement = PlacementSettings(policy=settings.placement_policy, max_affinity_wait=settings.max_affinity_wait)
        self._placer = placer = Placer(self.fleet.table, self.index, placement, self.fleet.namespace, monotonic)
        placer.lora_columns = self.fleet.lora_columns
        if self.load_sharing is not None:
            placer.on_speculative_blocks = self.speculative_blocks.add
        self._dispatcher = dispatcher = Dispatcher(
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
            shadows=None
            if settings.model_targets is None
            else ShadowRunner(self.fleet, placer, self.queue, self._targets),
        )

    def _share(self, redis: "RedisAccess", settings: Settings, local: LocalLoad, router_id: str) -> SharedState:
        from quire_router.admission.redis_rate_limit import RedisRateLimiter
        from quire_router.autoscale.load_totals import LoadPublisher, RedisLoad
        from quire_router.engines.load_sharing import LoadSharing

        return SharedState(
            RedisRateLimiter(redis),
            LoadSharing(redis, self.fleet.ledger, self.speculative_blocks, router_id=router_id),
            RedisLoad(redis, settings.models),
            LoadPublisher(redis, local.now, router_id=router_id),
        )

    def _create_picker(self, settings: Settings, limits: RateLimiter) -> "EndpointPicker":
        from quire_router.picker.picker import EndpointPicker

        return EndpointPicker(
            self.service,
            self.fleet,
            self._placer,
            self.queue,
            self._dispatcher,
            limits=limits,
            fallbacks=settings.picker_fallbacks,
            request_timeout=settings.request_timeout,
            expose_route=settings.debug_route,
            forwarded=settings.picker_forward,
            count_usage=self.journal.count_usage,
        )

    def _create_deletion_costs(
        self, settings: Settings, router_id: str, worker: WorkerContext | None
    ) -> PodDeletionCosts | None:
        """Of several workers the first one has it, as all of them know the same of the engines."""
        lease = settings.pod_deletion_cost_lease
        if lease is None or (worker is not None and worker.number != 1):
            return None
        return PodDeletionCosts(self.fleet, self.index, lease, router_id, KubeAccess.of_environment())

    def _num_waiting(self, model: str) -> int:
        """Requests of a model that wait here for an engine. What is best effort waits for one that is ready: none is
        woken up beside others for it.
        """
        queued = self.queue.waiting(model) if self.fleet.ready(model) else self.queue.waiting_of_all_classes(model)
        return queued + self.fleet.num_waiting(model)

    def _count_load(self, model: str) -> int:
        """What runs here, and what gateways were sent on with."""
        return self.runner.load(model) + (0 if self.picker is None else self.picker.load(model))


def sampling_defaults(settings: Settings) -> dict[str, dict[str, Any]]:
    """What the models' folders recommend for sampling, by model. Raises ``ValueError`` for a file it cannot use."""
    if settings.generation_config == "none":
        return {}
    try:
        return {name: recommended_sampling(folder) for name, folder in settings.models.items()}
    except ValueError as error:
        raise ValueError(f"{error} (it is not read with --generation-config none)") from None


def model_targets(
    settings: Settings, tokenizers: Mapping[str, ModelTokenizer]
) -> tuple[ModelTargets, FileWatch[TargetsFile] | None]:
    """Returns the targets, and what looks for another file of them. Raises ``SettingsFileError``."""
    path = settings.model_targets
    if path is None:
        return ModelTargets(), None
    digests = {name: tokenizer.vocabulary_digest for name, tokenizer in tokenizers.items()}
    read = partial(read_targets, vocabularies=digests)
    file = read(path)
    return ModelTargets(file.groups), FileWatch(path, file, read, metrics.TARGETS_FILE_CURRENT)


def _token_verifier(settings: OidcSettings) -> "OidcVerifier":
    from quire_router.api.oidc import OidcVerifier  # imports an HTTP client and cryptography, which take 20 MiB

    return OidcVerifier(settings)


def _connection_settings(settings: Settings) -> ConnectionSettings:
    key = None if settings.engine_api_key is None else settings.engine_api_key.get_secret_value()
    return ConnectionSettings(
        stall_timeout=settings.stall_timeout,
        readiness=settings.engine_readiness,
        slow_client_timeout=settings.slow_client_timeout,
        tls=settings.engine_tls,
        tokens=None if settings.engine_token_file is None else EngineTokens(settings.engine_token_file),
        api_key=key,
        kv_events_port=settings.engine_kv_events_port,
        kv_events_replay_port=settings.engine_kv_events_replay_port,
    )


def _queue_settings(settings: Settings) -> QueueSettings:
    return QueueSettings(
        hold_timeout=settings.hold_timeout,
        max_seconds=max(settings.max_queue_seconds, settings.hold_timeout),
        bounds=QueueBounds(max_requests=settings.max_queued_requests, max_bytes=settings.max_queued_bytes),
    )


def _journal(settings: Settings, redis: "RedisAccess | None", router_id: str) -> "BufferedJournal | MemoryJournal":
    """Raises ``JournalFileError``. Imports the one that the settings ask for."""
    times = JournalSettings(retention=settings.retention, usage_retention=settings.usage_retention)
    journal: BufferedJournal
    if redis is not None:
        from quire_router.journal.redis.redis_journal import RedisJournal

        journal = RedisJournal(redis, owner=router_id, settings=times)
    elif settings.journal_file is not None:
        from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

        most = settings.journal_max_bytes
        journal = SqliteJournal(settings.journal_file, owner=router_id, settings=times, max_bytes=most)
    else:
        return MemoryJournal(retention=settings.retention)
    journal.start()
    return journal


def _object_store(
    redis: "RedisAccess | None", journal: "BufferedJournal | MemoryJournal"
) -> "RedisObjectStore | SqliteObjectStore | MemoryObjectStore":
    """Returns where files and batches are kept: in the journal's place."""
    if redis is not None:
        from quire_router.journal.redis.redis_objects import RedisObjectStore

        return RedisObjectStore(redis)
    if isinstance(journal, MemoryJournal):
        return MemoryObjectStore()
    from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

    assert isinstance(journal, SqliteJournal), "it is neither in Redis nor in memory"
    return journal.objects
