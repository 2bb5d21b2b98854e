"""``EngineRegistry``: the engines that discovery finds. It connects each of them, applies what they report, and lets go
of those that have left, once their last request has ended.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Protocol

from quire.v1 import engine_pb2, load_pb2
from quire_proto.supervise import SupervisedTask

from quire_router.core.retry import supervise
from quire_router.discovery.base import Discovery, Endpoint, split_external
from quire_router.engines.base import EngineClient, Offload, on_any_thread
from quire_router.engines.connection import EngineConnection
from quire_router.engines.engine import Engine
from quire_router.engines.load import EngineLoad, LoadLedger
from quire_router.engines.model_matcher import ModelMatcher
from quire_router.engines.rates import ReconnectLimiter, UpdateRate
from quire_router.engines.settings import ConnectionSettings, KnownModel
from quire_router.engines.update_sharing import UpdateSharing

log = logging.getLogger(__name__)

PROBES_PER_SECOND = 100
"""Of engines that owe nothing, on average, while others are late: one costs about half a millisecond of CPU."""

MIN_PROBE_SECONDS = 2.0
PROBES_AT_ONCE = 20
PROBES_FOR_A_SIGN = 4
"""Engines that are asked where one that is alive is enough."""

PROBE_SECONDS = 0.1
"""After which the next ones are asked though not all have answered."""


class EngineKvListener(Protocol):
    """Is called with every change of every engine's prefix cache."""

    def __call__(self, engine_id: str, change: engine_pb2.Snapshot | engine_pb2.KvEvent, /) -> None:
        """A snapshot replaces all that was known; an empty one means that nothing is known any more."""


class EngineRegistry:
    """The engines of one pool. ``engines`` are those that are known, by id and in the order in which they were found,
    and ``by_row`` the same by their row of the table; only the registry changes them. ``discovered`` says whether
    discovery has answered. ``ledger`` has the load of each.

    ``on_change`` is called when what can run where may have changed, ``on_removed`` when an engine is known no more,
    ``on_kv_event`` with what is cached. ``has_substitute`` says whether another engine can take what one that is silent
    or away runs. Which models an engine serves is decided by ``model_matcher``; ``known_models`` are for engines that
    others have written. With ``update_sharing``, other workers hear some of the engines, and pass on what they report.
    """

    def __init__(
        self,
        discovery: Discovery,
        ledger: LoadLedger,
        settings: ConnectionSettings,
        model_matcher: ModelMatcher,
        known_models: Mapping[str, KnownModel],
        *,
        on_change: Callable[[], None],
        on_removed: Callable[[], None],
        has_substitute: Callable[[str], bool],
        on_kv_event: EngineKvListener | None = None,
        update_sharing: UpdateSharing | None = None,
        offload: Offload = on_any_thread,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.by_row: dict[int, Engine] = {}
        self.discovered = False
        self.num_added = 0  # engines, since the start
        self._discovery = discovery
        self._ledger = ledger
        self._settings = settings
        self._model_matcher = model_matcher
        self._known_models = known_models
        self._on_change = on_change
        self._on_removed = on_removed
        self._has_substitute = has_substitute
        self._kv_listener = on_kv_event
        self._update_sharing = update_sharing
        self._offload = offload
        self._reconnect_limiter = ReconnectLimiter()
        self._update_rate = UpdateRate()
        self._not_started: list[EngineClient] = []
        self._next_probes = 0.0
        self._discovery_task: SupervisedTask | None = None
        self._closing: set[asyncio.Task[None]] = set()  # of connections; and probes
        if update_sharing is not None:
            update_sharing.apply, update_sharing.forget = self._apply_update, self._forget_reported
            update_sharing.engine_ids = lambda: [engine.id for engine in self.engines.values() if engine.is_passed_on]

    def start(self) -> None:
        """Starts to discover and to connect engines."""
        self._discovery_task = supervise("engine discovery", self._watch_discovery)

    async def close(self) -> None:
        """Closes every connection; what is in flight there ends with ``EngineLost``."""
        if self._discovery_task is not None:
            await self._discovery_task.stop()
        engines = list(self.engines.values())
        for engine in engines:
            engine.retired = True
        await asyncio.gather(*(engine.connection.close() for engine in engines))
        for engine in engines:
            self.remove_if_idle(engine)
        await asyncio.gather(*self._closing)

    # Engines that are added and removed

    async def _watch_discovery(self) -> None:
        async with aclosing(self._discovery.watch()) as views:
            async for endpoints in views:
                self.update(endpoints)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Applies what discovery reports: all engines that there are."""
        self.discovered = True
        for endpoint in endpoints:
            with _log_and_continue(endpoint.address):
                self._add_or_update(endpoint)
        self._update_rate.set_engines(len(self.engines))
        self._start_connections()
        known = frozenset(endpoint.address for endpoint in endpoints)
        for engine in list(self.engines.values()):
            engine.retired = engine.retired or engine.id not in known
            with _log_and_continue(engine.id):
                self.remove_if_idle(engine)
        self._on_change()

    def _add_or_update(self, endpoint: Endpoint) -> None:
        if endpoint.address not in self.engines and not endpoint.terminating:
            self._connect(endpoint.address)
        if (engine := self.engines.get(endpoint.address)) is not None:
            engine.update(endpoint)

    def _connect(self, address: str) -> None:
        self.num_added += 1
        kind, url = split_external(address)
        load = self._ledger.add(address, reports_tokens=not kind)
        sharing = None if kind else self._update_sharing  # others' servers are asked by every worker
        hears = sharing is None or sharing.hears(address)
        create: Callable[..., EngineClient] = partial(
            EngineConnection,
            update_rate=self._update_rate,
            hears_updates=hears,
            on_late=partial(self._on_late, address),
        )
        if kind:
            from quire_router.engines.external.client import ExternalEngine  # an HTTP client takes 12 MiB

            create = partial(ExternalEngine, url=url, kind=kind, models=self._known_models, offload=self._offload)
        connection = create(
            address,
            self._settings,
            on_change=partial(self._on_engine_change, address),
            on_kv_event=partial(self._on_kv_event, address, load) if hears and self._kv_listener is not None else None,
            on_load=partial(self._on_load, address, load) if hears else None,
            on_lost=partial(self._clear_reported, address, load) if hears else _nothing,
            reconnect_limiter=self._reconnect_limiter,
            has_substitute=partial(self._has_substitute, address),
        )
        engine = self.engines[address] = self.by_row[load.row] = Engine(
            connection, load, self._model_matcher, needs_readiness=self._settings.needs_readiness(external=bool(kind))
        )
        engine.is_passed_on = not hears
        self._not_started.append(connection)
        if sharing is not None and not hears:
            sharing.want(address)

    def _start_connections(self) -> None:
        """Starts the new connections in an order of this router's own: others find the same engines now."""
        random.shuffle(self._not_started)
        for connection in self._not_started:
            connection.start()
        self._not_started.clear()

    def remove_if_idle(self, engine: Engine) -> None:
        """Removes an engine that left the fleet, once its last request has ended."""
        if not engine.retired or engine.in_flight or self.engines.get(engine.id) is not engine:
            return
        self._forget_engine(engine)
        del self.engines[engine.id], self.by_row[engine.row]
        self._on_removed()
        self._ledger.remove(engine.id)
        task = asyncio.get_running_loop().create_task(engine.connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget_engine(self, engine: Engine) -> None:
        """Forgets what was reported of an engine that leaves."""
        if engine.is_passed_on:
            self._forget_reported(engine.id)
            return
        self._clear_reported(engine.id, engine.load)
        if self._update_sharing is not None:
            self._update_sharing.on_removed(engine.id)

    # What they report

    def _on_engine_change(self, engine_id: str) -> None:
        if (engine := self.engines.get(engine_id)) is not None:
            engine.refresh()
        self._on_change()

    def _on_load(self, engine_id: str, load: EngineLoad, report: engine_pb2.Load) -> None:
        self._report(load, report)
        if self._update_sharing is not None and not load.closed:
            self._update_sharing.on_load(engine_id, report)

    def _report(self, load: EngineLoad, report: engine_pb2.Load) -> None:
        was_awake = load.is_awake
        load.report(report)
        if load.is_awake != was_awake:
            self._on_change()

    def _on_kv_event(self, engine_id: str, load: EngineLoad, change: engine_pb2.Snapshot | engine_pb2.KvEvent) -> None:
        if load.closed:
            return
        if self._kv_listener is not None:
            self._kv_listener(engine_id, change)
        if self._update_sharing is not None:
            self._update_sharing.on_kv_event(engine_id, change)

    def _clear_reported(self, engine_id: str, load: EngineLoad) -> None:
        """Forgets the load and the cache contents that the engine reported."""
        self._on_load(engine_id, load, engine_pb2.Load())
        self._on_kv_event(engine_id, load, engine_pb2.Snapshot())

    def _apply_update(self, update: load_pb2.EngineUpdate) -> None:
        """Applies what another worker has heard of an engine."""
        engine = self.engines.get(update.engine_id)
        if engine is None or not engine.is_passed_on:
            return
        if update.HasField("load"):
            self._report(engine.load, update.load)
        if self._kv_listener is not None:
            if update.HasField("snapshot"):
                self._kv_listener(engine.id, update.snapshot)
            for event in update.kv_events:
                self._kv_listener(engine.id, event)

    def _forget_reported(self, engine_id: str) -> None:
        self._apply_update(
            load_pb2.EngineUpdate(engine_id=engine_id, load=engine_pb2.Load(), snapshot=engine_pb2.Snapshot())
        )

    # Whether they are alive

    def _on_late(self, engine_id: str) -> None:
        """Looks for a substitute before one is needed, and asks those that owe nothing whether they are alive: they may
        be on the same node, and what leaves the one is not to go there.
        """
        self._has_substitute(engine_id)
        now = asyncio.get_running_loop().time()
        if now >= self._next_probes:
            self._next_probes = now + max(MIN_PROBE_SECONDS, len(self.engines) / PROBES_PER_SECOND)
            self._begin_probes(list(self.engines.values()))

    def probe_some(self, engines: Sequence[Engine]) -> None:
        """Asks a few of ``engines`` for a sign of life, as one is enough."""
        self._begin_probes(random.sample(engines, min(PROBES_FOR_A_SIGN, len(engines))))

    def _begin_probes(self, engines: Sequence[Engine]) -> None:
        task = asyncio.create_task(_probe(engines), name="probes")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _probe(engines: Sequence[Engine]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for first in range(0, len(engines), PROBES_AT_ONCE):
            some = engines[first : first + PROBES_AT_ONCE]
            probes = [tasks.create_task(engine.connection.probe()) for engine in some]
            await asyncio.wait(probes, timeout=PROBE_SECONDS)


def _nothing() -> None:
    """What another worker has heard of an engine holds, whatever becomes of this one's own connection."""


@contextmanager
def _log_and_continue(engine_id: str) -> Iterator[None]:
    """Logs an error of one engine, so that the others are still discovered."""
    try:
        yield
    except Exception:
        log.exception("cannot add or remove engine %s", engine_id)
