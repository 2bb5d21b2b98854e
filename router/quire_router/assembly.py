"""A router's parts from its settings, connected to each other. Opens no port."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from time import monotonic

from quire_proto.text.model_text import ModelTokenizer

from quire_router import metrics
from quire_router.admission.fair import QueueBounds
from quire_router.admission.limits import RateLimiter
from quire_router.admission.queue import AdmissionQueue, QueueSettings
from quire_router.admission.redis_meter import RedisRateLimiter
from quire_router.admission.tenants_file import TenantsFile, read_tenants
from quire_router.api.frontend import ApiService
from quire_router.api.identity import StaticKeys
from quire_router.api.running import BodyBudget, ConcurrencyLimit
from quire_router.autoscale.load import Load, OwnLoad
from quire_router.autoscale.redis_load import LoadTeller, RedisLoad
from quire_router.config import Settings
from quire_router.fleet.assumed import assumed_limits
from quire_router.fleet.cache_events import CacheEvents
from quire_router.fleet.combined import discovery_of
from quire_router.fleet.expectations import SpeculativeBlocks
from quire_router.fleet.fleet import EnginePool
from quire_router.fleet.output import ATTEMPT_FAILURES
from quire_router.fleet.peers import LoadSharing
from quire_router.fleet.served import ModelIdentity
from quire_router.fleet.settings import ConnectionSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis import RedisJournal
from quire_router.journal.settings import JournalSettings
from quire_router.lifecycle import RequestRunner
from quire_router.placement.index import PrefixIndex
from quire_router.placement.placer import Placer
from quire_router.placement.settings import PlacementSettings
from quire_router.redis_access import RedisAccess
from quire_router.routing import Dispatcher
from quire_router.supervise import supervise
from quire_router.upkeep import Upkeep


class Parts:
    """Everything of a router that is behind its doors. Raises ``ValueError`` for settings that cannot be."""

    def __init__(self, settings: Settings, texts: Mapping[str, ModelTokenizer]) -> None:
        metrics.init_series(settings.models, ATTEMPT_FAILURES)
        file = TenantsFile() if settings.tenants is None else read_tenants(settings.tenants)
        self.index = PrefixIndex()
        self.fleet = EnginePool(
            discovery_of(settings.engine, dns_period=settings.engine_dns_period),
            settings.models,
            ConnectionSettings(slow_client_timeout=settings.slow_client_timeout, tls=settings.engine_tls),
            assumed=assumed_limits(settings.models),
            vocabularies={
                name: ModelIdentity.of(folder, texts[name].vocabulary_digest)
                for name, folder in settings.models.items()
            },
        )
        self.fleet.on_kv_event = CacheEvents(self.index, self.fleet.table)
        self.queue = AdmissionQueue(settings.models, self.fleet, file.tenants, _queue_settings(settings))
        self.fleet.on_room = self.queue.notify_capacity
        redis = settings.redis
        self.journal = _journal(redis, settings.retention)
        self.meter = None if redis is None else RedisRateLimiter(redis)
        self.expectations = SpeculativeBlocks(self.fleet.table, self.index)
        self.peers = None if redis is None else LoadSharing(redis, self.fleet.ledger, self.expectations)
        limits = RateLimiter(file.tenants, self.meter)
        self.lifecycle = self._lifecycle(settings, texts, limits)
        self.frontend = ApiService(
            texts,
            self.fleet,
            self.lifecycle,
            StaticKeys((key.get_secret_value() for key in settings.api_key), file),
            ConcurrencyLimit(settings.max_concurrent_requests),
            allow_priority=settings.allow_priority,
            refuse_unknown=settings.unknown_parameters == "refuse",
            request_timeout=settings.request_timeout,
            durable=lambda: self.journal.available,
            tenant_limits=limits,
            bodies=BodyBudget(settings.max_inflight_body_bytes),
        )
        self.queue.on_queued = self.frontend.bodies.release_queued
        own = OwnLoad(settings.models, self.lifecycle.load)
        self.load: Load = own if redis is None else RedisLoad(redis, settings.models)
        self._teller = None if redis is None else LoadTeller(redis, own.now)
        self._upkeep = Upkeep(self.lifecycle, self.index)

    async def start(self, ending: AsyncExitStack) -> None:
        """Begins to connect to engines and to Redis, and never waits for them; ``ending`` closes what is begun."""
        ending.callback(self.frontend.close)
        ending.push_async_callback(supervise("keys", self.frontend.keys.prepare).stop)
        ending.push_async_callback(self.journal.close)
        if self.meter is not None:
            ending.push_async_callback(self.meter.close)
        if self.peers is not None:
            ending.push_async_callback(self.peers.close)
            self.peers.start()
        if self._teller is not None:
            ending.push_async_callback(self._teller.close)
            self.lifecycle.on_load_changed(self._teller.changed)
            self._teller.start()
        ending.push_async_callback(self.load.close)
        ending.push_async_callback(self.fleet.close)
        await self.fleet.start()
        ending.push_async_callback(self._upkeep.stop)
        self._upkeep.start()

    def _lifecycle(self, settings: Settings, texts: Mapping[str, ModelTokenizer], limits: RateLimiter) -> RequestRunner:
        placement = PlacementSettings(policy=settings.placement_policy, max_affinity_wait=settings.max_affinity_wait)
        placer = Placer(self.fleet.table, self.index, placement, self.fleet.namespace, monotonic)
        if self.peers is not None:
            placer.on_speculative_blocks = self.expectations.add
        routing = Dispatcher(
            self.fleet,
            placer,
            self.queue,
            policy=settings.placement_policy,
            hold_timeout=settings.hold_timeout,
            explain=settings.debug_route,
        )
        return RequestRunner(
            self.fleet,
            placer,
            routing,
            self.journal,
            texts,
            limits=limits,
            request_timeout=settings.request_timeout,
            max_background=settings.max_concurrent_requests,
            expose_route=settings.debug_route,
        )


def _queue_settings(settings: Settings) -> QueueSettings:
    return QueueSettings(
        hold_timeout=settings.hold_timeout,
        max_seconds=max(settings.max_queue_seconds, settings.hold_timeout),
        bounds=QueueBounds(max_requests=settings.max_queued_requests, max_bytes=settings.max_queued_bytes),
    )


def _journal(redis: RedisAccess | None, retention: float) -> RedisJournal | MemoryJournal:
    if redis is None:
        return MemoryJournal(retention=retention)
    journal = RedisJournal(redis, settings=JournalSettings(retention=retention))
    journal.start()
    return journal
