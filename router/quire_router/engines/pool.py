"""``EnginePool``: discovers the engines, keeps a connection to each, and knows which can run which model. Placement
chooses among them.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

import numpy as np
from quire.v1 import engine_pb2, load_pb2
from quire_proto.priority import BEST_EFFORT
from quire_proto.supervise import SupervisedTask
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core import metrics
from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.retry import CpuThrottle, supervise
from quire_router.discovery.base import Discovery, Endpoint, split_external
from quire_router.engines.base import EngineClient
from quire_router.engines.connection import EngineConnection
from quire_router.engines.forwarded import Forwarded
from quire_router.engines.load import ASSUMED_BLOCK_SIZE, CAPACITY_SECONDS, EngineLoad, LedgerEntry, LoadLedger
from quire_router.engines.model_matcher import ModelIdentity, ModelMatcher
from quire_router.engines.output_stream import EngineLost, OutputStream, max_sequences
from quire_router.engines.rates import MAX_CONNECTS_PER_SECOND, ReconnectLimiter, UpdateRate
from quire_router.engines.settings import ConnectionSettings, KnownModel, ServedLoRA, ServedModelLimits
from quire_router.engines.update_sharing import UpdateSharing
from quire_router.placement.engine_table import EngineTable, Rows
from quire_router.placement.policies import LoRAColumns
from quire_router.placement.prefix_index import BlockNamespace

log = logging.getLogger(__name__)


class Engine:
    """One engine, with its connection and its load: from its discovery until it left the fleet and its last request
    ended. ``served`` decides under which of its names it gets requests.
    """

    def __init__(self, connection: EngineClient, load: EngineLoad, served: ModelMatcher | None = None) -> None:
        self.connection = connection
        self.load = load
        self._model_matcher = served
        self.endpoint = Endpoint(connection.address)
        self.is_passed_on = False  # by another worker of this router, which hears it
        self.retired = False
        self._description: engine_pb2.DescribeResponse | None = None
        self._models: frozenset[str] = frozenset()
        self._namespace: BlockNamespace | None = None
        self._version = UNKNOWN_VERSION

    @property
    def id(self) -> str:
        """Its address."""
        return self.connection.address

    @property
    def row(self) -> int:
        """Its row of the table."""
        return self.load.row

    @property
    def in_flight(self) -> int:
        """Requests of this router there."""
        return self.load.local[0] + self.load.best_effort

    @property
    def models(self) -> frozenset[str]:
        """The names under which it serves its model, also while it is not connected."""
        self._refresh()
        return self._models

    @property
    def namespace(self) -> BlockNamespace | None:
        """The namespace of its block hashes; None until it has described itself."""
        self._refresh()
        return self._namespace

    @property
    def version(self) -> ModelVersion:
        """The version of its model, as far as it says."""
        self._refresh()
        return self._version

    def update(self, endpoint: Endpoint) -> None:
        """Applies what discovery reports. One that has become ready is connected at once."""
        if endpoint.ready and not self.endpoint.ready:
            self.connection.retry_now()
        self.endpoint = endpoint
        self.retired = endpoint.terminating

    def can_run(self, model: str, lora: LoRA | None = None) -> bool:
        """Whether it would run a request for the model, or for an adapter of it, now."""
        ready = self.connection.ready and not self.retired and self.load.is_awake and model in self.models
        return ready and (lora is None or self.connection.loras.get(lora.name) == lora)

    @property
    def can_sleep(self) -> bool:
        """Whether it can be put to sleep, or woken up, now."""
        self._refresh()
        able = self._description is not None and self._description.can_sleep and bool(self._models)
        return able and self.connection.ready and not self.retired

    @property
    def shared_device(self) -> str:
        """The name of what it shares with engines that are awake in turns with it; empty if it is alone."""
        self._refresh()
        return "" if self._description is None else self._description.shared_device

    @property
    def condition(self) -> EngineCondition:
        """How it is, in a word."""
        condition = self.connection.condition
        return condition if condition != "ready" or self.load.is_awake else "sleeping"

    @property
    def serves_loras(self) -> bool:
        """Whether adapters can be loaded there."""
        self._refresh()
        return self._description is not None and self._description.max_loras > 0

    def lacks_lora_slot(self) -> bool:
        """Whether as many adapters are in use there as can be at once."""
        most = 0 if self._description is None else self._description.max_loras
        return len(self.connection.active_loras) >= most

    def _refresh(self) -> None:
        description = self.connection.description
        if description is None or description is self._description:
            return
        self._description = description
        names = frozenset(description.served_model_names)
        self._models = (
            names if self._model_matcher is None else self._model_matcher.matching_names(self.id, description)
        )
        self._namespace = BlockNamespace(description.model_revision, description.block_size or ASSUMED_BLOCK_SIZE)
        self._version = ModelVersion.of(description)
        self.load.describe(description)


class Dispatch:
    """One attempt of a request at one engine. Entering submits it and counts it with ``begin``; leaving, on every
    path, ends the count, cancels what has not ended and calls ``on_release``.

    Entering raises what ``EngineClient.submit`` raises, and then nothing is counted.
    """

    def __init__(
        self,
        engine: Engine,
        message: engine_pb2.Submit,
        begin: Callable[[], LedgerEntry],
        on_release: Callable[[Engine], None],
    ) -> None:
        self._engine = engine
        self._message = message
        self._begin = begin
        self._on_release = on_release
        self._outputs: OutputStream | None = None
        self._entry: LedgerEntry | None = None

    def __enter__(self) -> OutputStream:
        self._outputs = self._engine.connection.submit(self._message)
        if self._message.lora_name:  # until the engine says so itself
            self._engine.connection.active_loras.add(self._message.lora_name)
        self._entry = self._begin()
        self._outputs.on_first = self._entry.on_first_output
        return self._outputs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outputs is None or self._entry is None:
            return
        self._entry.end()
        self._outputs.close()
        self._on_release(self._engine)


GATHER_SECONDS = 0.5
"""How long a model's first engine waits for others that were there before, so that requests that were held while there
was none are not all given to the one that comes back a moment earlier.
"""

MAX_RETRIED = 32
"""Engines that are tried again at once for that: a try costs about 2 ms of CPU."""

LOOK_SECONDS = 0.1
"""How long it holds that an engine of a model is alive: all engines of a large fleet may ask at once."""

PROBES_PER_SECOND = 100
"""Of engines that owe nothing, on average, while others are late: one costs about half a millisecond of CPU."""

MIN_PROBE_SECONDS = 2.0
PROBES_AT_ONCE = 20

_KEPT_PART = 4
"""One engine in so many is kept mostly idle, for tenants who use less than their share. In the fleet simulator, one in
two hardly helps them more, and makes the others wait several times as long.
"""


def any_has_capacity(loads: Sequence[EngineLoad]) -> bool:
    """Whether an engine could start a request soon."""
    return any(load.has_capacity for load in loads)


def has_spare_capacity(loads: Sequence[EngineLoad]) -> bool:
    """Whether an engine is mostly idle, and a quarter of all engines would be so with one more request."""
    return sum(load.is_mostly_idle for load in loads) > len(loads) // _KEPT_PART


def has_best_effort_capacity(loads: Sequence[EngineLoad]) -> bool:
    """Whether an engine has room for one more request that is best effort. Where it would delay others, because the
    engine does not know the difference, spare capacity is needed.
    """
    others = [load for load in loads if not load.schedules_best_effort]
    return any(load.has_best_effort_capacity for load in loads) or has_spare_capacity(others)


class EngineKvListener(Protocol):
    """Is called with every change of every engine's prefix cache."""

    def __call__(self, engine_id: str, change: engine_pb2.Snapshot | engine_pb2.KvEvent, /) -> None:
        """A snapshot replaces all that was known; an empty one means that nothing is known any more."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The engines that can run a model now, with their loads and their rows of the table."""

    engines: tuple[Engine, ...]
    loads: tuple[EngineLoad, ...]
    rows: Rows


class EnginePool:
    """The engines of one router. ``models`` are the names that requests can ask for.

    An engine has capacity while it runs fewer requests than it can at once and its prompts take less than
    ``capacity_seconds`` to compute; ``on_capacity`` is called when one may have got some. ``table`` has a row for each
    known engine, with the load of all routers that ``ledger`` knows of. ``assumed`` are the limits of models until an
    engine reports some. Engines whose tokens are not those of ``vocabularies`` do not serve the model. ``tokenizers``
    are for engines that do not say which one they have, or know only text. Requests may also name ``expected_loras``,
    as an engine is going to have them: they wait for it. With ``update_sharing`` this pool is one of several of one
    router, and hears of the load and the caches of other pools' engines from these.

    Where no engine of a model was ready and one is, but others are known to have it that are not, none counts as ready
    before all are or ``GATHER_SECONDS`` have passed.
    """

    def __init__(
        self,
        discovery: Discovery,
        models: Iterable[str],
        settings: ConnectionSettings | None = None,
        *,
        on_kv_event: EngineKvListener | None = None,
        on_capacity: Callable[[], None] = lambda: None,
        capacity_seconds: float = CAPACITY_SECONDS,
        table: EngineTable | None = None,
        assumed: Mapping[str, ServedModelLimits] | None = None,
        vocabularies: Mapping[str, ModelIdentity] | None = None,
        tokenizers: Mapping[str, ModelTokenizer] | None = None,
        update_sharing: UpdateSharing | None = None,
    ) -> None:
        self.table = EngineTable() if table is None else table
        self.on_capacity = on_capacity
        self.ledger = LoadLedger(self.table, capacity_seconds=capacity_seconds, on_capacity=self._notify_capacity)
        self._discovery = discovery
        self._settings = settings or ConnectionSettings()
        self._models = tuple(models)
        self._known_models = {
            name: KnownModel((tokenizers or {}).get(name), (assumed or {}).get(name)) for name in self._models
        }
        self._model_matcher = ModelMatcher(self._models, vocabularies)
        self.on_kv_event = on_kv_event
        self.expected_loras: dict[str, ServedLoRA] = {}
        self._reconnect_limiter = ReconnectLimiter()
        self._update_rate = UpdateRate()
        self._engines: dict[str, Engine] = {}
        self._not_started: list[EngineClient] = []
        self._by_row: dict[int, Engine] = {}
        self._candidates_cache: dict[tuple[str, LoRA | None], _Candidates] = {}
        self._loras: Mapping[str, ServedLoRA] = {}
        self._live: dict[tuple[str, ModelVersion], tuple[float, bool]] = {}  # whether an engine is, until when it holds
        self._next_probes = 0.0
        self._gathered: set[str] = set()  # the models with engines that are ready
        self._gathering: dict[str, asyncio.TimerHandle] = {}
        self._limits = dict(assumed or {})
        self._stale_limits: set[str] = set()  # the models whose limits may have changed
        self._changed = asyncio.Event()
        self._waiting = Counter[str]()  # requests that wait for an engine to be ready, by model
        self.on_waiting: Callable[[], None] = lambda: None
        self._throttled_notify = CpuThrottle(self._notify)
        self._discovery_task: SupervisedTask | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._update_sharing = update_sharing
        if update_sharing is not None:
            update_sharing.apply, update_sharing.forget = self._apply_update, self._forget_reported
            update_sharing.engine_ids = lambda: [engine.id for engine in self._engines.values() if engine.is_passed_on]

    async def start(self) -> None:
        """Starts to discover and to connect engines; never waits for one."""
        self._discovery_task = supervise("engine discovery", self._watch_discovery)
        self._on_change()  # the metrics are to show that there is none yet

    async def close(self) -> None:
        """Closes every connection; what is in flight there ends with ``EngineLost``."""
        if self._discovery_task is not None:
            await self._discovery_task.stop()
        engines = list(self._engines.values())
        for engine in engines:
            engine.retired = True
        await asyncio.gather(*(engine.connection.close() for engine in engines))
        for engine in engines:
            self._remove_if_idle(engine)
        await asyncio.gather(*self._closing)
        for timer in self._gathering.values():
            timer.cancel()
        self._candidates_cache.clear()
        self._throttled_notify.run_now()

    def engines(self) -> list[Engine]:
        """Returns all engines that are known, in the order in which they were found."""
        return list(self._engines.values())

    # What can run where

    def rows(self, model: str, lora: LoRA | None = None) -> Rows:
        """The rows of the engines that can run the model now, or an adapter of it, in the order in which they were
        found. Not to be written to; the same array until that changes.
        """
        return self._candidates(model, lora).rows

    def rows_of_version(self, rows: Rows, version: ModelVersion) -> Rows:
        """Returns those of ``rows`` whose engines may continue what one of this version has begun."""
        return np.array([row for row in rows.tolist() if self._by_row[row].version.continues(version)], np.intp)

    def version(self, engine_id: str) -> ModelVersion:
        """Returns the version of an engine's model, as far as it is known."""
        engine = self._engines.get(engine_id)
        return UNKNOWN_VERSION if engine is None else engine.version

    def ready(self, model: str, lora: LoRA | None = None, version: ModelVersion = UNKNOWN_VERSION) -> int:
        """How many engines can run the model now, or an adapter of it; of those that may continue a version."""
        engines = self._candidates(model, lora).engines
        if version == UNKNOWN_VERSION:
            return len(engines)
        return sum(engine.version.continues(version) for engine in engines)

    def num_sleeping(self, model: str) -> int:
        """How many engines of the model sleep, or are about to, and could be woken up."""
        return sum(engine.condition == "sleeping" and model in engine.models for engine in self._engines.values())

    def loras(self) -> Mapping[str, ServedLoRA]:
        """All adapters by their names, which are not those of models. Where engines have different ones of a name, it
        is the one that more engines have. May be called on any thread; not to be written to.
        """
        return self._loras

    def refresh_loras(self) -> None:
        """Has ``loras`` say what engines have told by now, and what is expected."""
        self._loras = self._find_loras()

    def forget_lora(self, name: str) -> None:
        """An adapter was unloaded: it is expected no more."""
        self.expected_loras.pop(name, None)
        self._loras = {other: served for other, served in self._loras.items() if other != name}

    def has_lora(self, model: str, lora: LoRA) -> bool:
        """Whether it is worth waiting for an engine with an adapter: one has it that may not be ready, or is to get it;
        or there is none of the model.
        """
        if self.expected_loras.get(lora.name) == ServedLoRA(model, lora):
            return True
        engines = [engine for engine in self._engines.values() if model in engine.models]
        return not engines or any(engine.connection.loras.get(lora.name) == lora for engine in engines)

    def lora_columns(self, rows: Rows, lora: LoRA) -> LoRAColumns:
        """What the engines of ``rows`` do with adapters now."""
        engines = [self._by_row[row] for row in rows.tolist()]
        active = np.array([lora.name in engine.connection.active_loras for engine in engines])
        return LoRAColumns(active, np.array([engine.lacks_lora_slot() for engine in engines]))

    def namespace(self, row: int) -> BlockNamespace:
        """Returns the namespace of the block hashes of one of the engines of ``rows``."""
        namespace = self._by_row[row].namespace
        assert namespace is not None, "it has not said what it is"
        return namespace

    def zone(self, engine_id: str) -> str | None:
        """Returns the zone of the engine's node, as discovery reports it; None if it or the engine is unknown."""
        engine = self._engines.get(engine_id)
        return None if engine is None else engine.endpoint.zone

    def has_capacity(self, model: str) -> bool:
        """Whether an engine could start a request for the model soon."""
        return any_has_capacity(self._candidates(model).loads)

    def has_spare_capacity(self, model: str) -> bool:
        """Whether so many engines are mostly idle that one more request delays no other."""
        return has_spare_capacity(self._candidates(model).loads)

    def has_best_effort_capacity(self, model: str) -> bool:
        """Whether an engine has room for one more request for the model that is best effort."""
        return has_best_effort_capacity(self._candidates(model).loads)

    def with_best_effort_capacity(self, rows: Rows) -> Rows:
        """Returns those of ``rows`` whose engines have room for one more request that is best effort; all, if none
        has: one that was admitted before goes on somewhere.
        """
        loads = {row: self._by_row[row].load for row in rows.tolist()}
        found = [row for row, load in loads.items() if load.has_best_effort_capacity]
        found = found or [row for row, load in loads.items() if load.is_mostly_idle and not load.schedules_best_effort]
        return np.array(found, np.intp) if found else rows

    def limits(self, model: str) -> ServedModelLimits | None:
        """Returns the model's limits as engines reported them, also after these are gone; until then those ``assumed``,
        or None.
        """
        if model in self._stale_limits:
            self._update_limits(model)
        return self._limits.get(model)

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - the answer is a bool
        model: str | None = None,
        lora: LoRA | None = None,
        version: ModelVersion = UNKNOWN_VERSION,
    ) -> bool:
        """Waits until an engine can run ``model``, with an adapter if one is given and in a ``version`` if that is
        known, or each configured model if it is None. Returns False on timeout.
        """
        names = self._models if model is None else (model,)
        self._waiting.update(names)
        try:
            async with asyncio.timeout(timeout):
                while not self._all_ready(model, lora, version):
                    self.on_waiting()
                    await self.changed()
        except TimeoutError:
            return False
        finally:
            self._waiting.subtract(names)
        return True

    def num_waiting(self, model: str) -> int:
        """How many wait until an engine is ready."""
        return self._waiting[model]

    async def changed(self) -> None:
        """Waits until something may have changed in what can run where."""
        await self._changed.wait()

    def expect_cached(self, engine_id: str, hashes: Sequence[bytes]) -> None:
        """Another router has sent a prompt with these blocks to an engine."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.connection.expect_cached(hashes)

    # What runs

    def dispatch(self, engine_id: str, message: engine_pb2.Submit, *, pending_tokens: int) -> Dispatch:
        """Returns the dispatch of a request to one of the engines in ``rows``; ``pending_tokens`` of its prompt are not
        cached there. Raises ``EngineLost`` if the engine is not known any more.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            raise EngineLost("the engine has left the fleet")
        sequences = max_sequences(message)
        best_effort = message.priority == BEST_EFFORT
        begin = partial(
            self.ledger.begin,
            engine_id,
            pending_tokens=pending_tokens,
            sequences=sequences,
            best_effort=best_effort,
        )
        return Dispatch(engine, message, begin, self._on_release)

    def forward(
        self, engine_id: str, *, pending_tokens: int, sequences: int, block_hashes: Iterable[bytes] = ()
    ) -> Forwarded:
        """Returns what counts a request that somebody else sends to one of the engines in ``rows``; arguments as in
        ``dispatch``. Raises ``EngineLost`` if the engine is not known any more.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            raise EngineLost("the engine has left the fleet")
        return Forwarded(
            engine.connection,
            engine.load,
            partial(self.ledger.begin, engine_id, pending_tokens=pending_tokens, sequences=sequences),
            partial(self._on_release, engine),
            uncached_tokens=pending_tokens,
            sequences=sequences,
            block_hashes=block_hashes,
        )

    def _on_release(self, engine: Engine) -> None:
        self._remove_if_idle(engine)
        self._notify_capacity()

    def _notify_capacity(self) -> None:
        self.on_capacity()

    # Engines that are added and removed

    def _candidates(self, model: str, lora: LoRA | None = None) -> _Candidates:
        candidates = self._candidates_cache.get((model, lora))
        if candidates is None:
            engines = tuple(engine for engine in self._engines.values() if engine.can_run(model, lora))
            if lora is not None:
                self._candidates(model)  # which may begin to gather
            elif model in self._models:
                self._gather(model, any_ready=bool(engines))
            if model in self._gathering:
                engines = ()
            rows = np.array([engine.row for engine in engines], dtype=np.intp)
            rows.flags.writeable = False
            candidates = _Candidates(engines, tuple(engine.load for engine in engines), rows)
            known = lora is None or self._loras.get(lora.name) == ServedLoRA(model, lora)
            if model in self._models and known:  # others are not cached: a client can ask for any name
                self._candidates_cache[model, lora] = candidates
        return candidates

    def _has_substitute(self, engine_id: str) -> bool:
        """Whether another engine can take what one that is silent or away runs. Where the others are late as well, it
        may be this router that hears nothing.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            return False
        return any(self._has_live(model, engine.version) for model in self._models if model in engine.models)

    def _has_live(self, model: str, version: ModelVersion) -> bool:
        """Whether an engine of a model's version is ready and not late. Looked up for all that ask within
        ``LOOK_SECONDS``.
        """
        now = asyncio.get_running_loop().time()
        until, found = self._live.get((model, version), (0.0, False))
        if now >= until:
            others = self._candidates(model).engines
            found = any(not each.connection.late and each.version.continues(version) for each in others)
            self._live[model, version] = now + LOOK_SECONDS, found
        return found

    def _probe_idle(self) -> None:
        """An engine is late. Asks those that owe nothing whether they are alive: they may be on the same node, and what
        leaves the one is not to go there.
        """
        now = asyncio.get_running_loop().time()
        if now < self._next_probes:
            return
        self._next_probes = now + max(MIN_PROBE_SECONDS, len(self._engines) / PROBES_PER_SECOND)
        task = asyncio.create_task(self._probe_all(), name="probes")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _probe_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, engine in enumerate(self.engines(), 1):
                tasks.create_task(engine.connection.probe())
                if number % PROBES_AT_ONCE == 0:
                    await asyncio.sleep(PROBES_AT_ONCE / MAX_CONNECTS_PER_SECOND)

    def _all_ready(self, model: str | None, lora: LoRA | None, version: ModelVersion) -> bool:
        return all(self.ready(name, lora, version) for name in ((model,) if model is not None else self._models))

    def _find_loras(self) -> Mapping[str, ServedLoRA]:
        """See ``loras``. Those of a model without engines are kept: requests for them are to bring some back."""
        found: dict[str, Counter[ServedLoRA]] = {}
        with_engines: set[str] = set()
        for engine in self._engines.values():
            model = next((name for name in self._models if name in engine.models), None)
            if model is not None:
                with_engines.add(model)
                loras = engine.connection.loras
                for name in loras.keys() - self._models:
                    found.setdefault(name, Counter())[ServedLoRA(model, loras[name])] += 1 + engine.connection.ready
        kept = {name: served for name, served in self._loras.items() if served.model not in with_engines}
        return {**self.expected_loras, **kept} | {
            name: counts.most_common(1)[0][0] for name, counts in sorted(found.items())
        }

    async def _watch_discovery(self) -> None:
        async with aclosing(self._discovery.watch()) as views:
            async for endpoints in views:
                self._update(endpoints)

    def _update(self, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            with _log_and_continue(endpoint.address):
                self._add_or_update(endpoint)
        self._update_rate.set_engines(len(self._engines))
        self._start_connections()
        known = frozenset(endpoint.address for endpoint in endpoints)
        for engine in list(self._engines.values()):
            engine.retired = engine.retired or engine.id not in known
            with _log_and_continue(engine.id):
                self._remove_if_idle(engine)
        self._on_change()

    def _add_or_update(self, endpoint: Endpoint) -> None:
        if endpoint.address not in self._engines and not endpoint.terminating:
            self._connect(endpoint.address)
        if (engine := self._engines.get(endpoint.address)) is not None:
            engine.update(endpoint)

    def _connect(self, address: str) -> None:
        kind, url = split_external(address)
        load = self.ledger.add(address, reports_tokens=not kind)
        sharing = None if kind else self._update_sharing  # others' servers are asked by every worker
        hears = sharing is None or sharing.hears(address)
        create: Callable[..., EngineClient] = partial(
            EngineConnection,
            update_rate=self._update_rate,
            hears_updates=hears,
            has_substitute=partial(self._has_substitute, address),
            on_late=self._probe_idle,
        )
        if kind:
            from quire_router.engines.external.client import ExternalEngine  # an HTTP client takes 12 MiB

            create = partial(ExternalEngine, url=url, kind=kind, models=self._known_models)
        connection = create(
            address,
            self._settings,
            on_change=self._on_change,
            on_kv_event=partial(self._on_kv_event, address, load) if hears and self.on_kv_event is not None else None,
            on_load=partial(self._on_load, address, load) if hears else None,
            on_lost=partial(self._clear_reported, address, load) if hears else _nothing,
            reconnect_limiter=self._reconnect_limiter,
        )
        engine = self._engines[address] = self._by_row[load.row] = Engine(connection, load, self._model_matcher)
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
        if self.on_kv_event is not None:
            self.on_kv_event(engine_id, change)
        if self._update_sharing is not None:
            self._update_sharing.on_kv_event(engine_id, change)

    def _clear_reported(self, engine_id: str, load: EngineLoad) -> None:
        """Forgets the load and the cache contents that the engine reported."""
        self._on_load(engine_id, load, engine_pb2.Load())
        self._on_kv_event(engine_id, load, engine_pb2.Snapshot())

    def _apply_update(self, update: load_pb2.EngineUpdate) -> None:
        """Applies what another worker has heard of an engine."""
        engine = self._engines.get(update.engine_id)
        if engine is None or not engine.is_passed_on:
            return
        if update.HasField("load"):
            self._report(engine.load, update.load)
        if self.on_kv_event is not None:
            if update.HasField("snapshot"):
                self.on_kv_event(engine.id, update.snapshot)
            for event in update.kv_events:
                self.on_kv_event(engine.id, event)

    def _forget_engine(self, engine: Engine) -> None:
        """Forgets what was reported of an engine that leaves."""
        if engine.is_passed_on:
            self._forget_reported(engine.id)
            return
        self._clear_reported(engine.id, engine.load)
        if self._update_sharing is not None:
            self._update_sharing.on_removed(engine.id)

    def _forget_reported(self, engine_id: str) -> None:
        self._apply_update(
            load_pb2.EngineUpdate(engine_id=engine_id, load=engine_pb2.Load(), snapshot=engine_pb2.Snapshot())
        )

    def _remove_if_idle(self, engine: Engine) -> None:
        """Removes an engine that left the fleet, once its last request has ended."""
        if not engine.retired or engine.in_flight or self._engines.get(engine.id) is not engine:
            return
        self._forget_engine(engine)
        del self._engines[engine.id], self._by_row[engine.row]
        self._candidates_cache.clear()
        self.ledger.remove(engine.id)
        task = asyncio.get_running_loop().create_task(engine.connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _on_change(self) -> None:
        """Drops what was cached of who can run what. Waiting requests and metrics are notified through a throttle,
        because the connections of a large fleet change often.
        """
        self._candidates_cache.clear()
        self._stale_limits.update(self._models)
        self._throttled_notify.request()

    def _gather(self, model: str, *, any_ready: bool) -> None:
        """Begins to wait for the others of the model where the first one is ready, or ends it where none is."""
        if not any_ready:
            self._gathered.discard(model)
            self._end_gathering(model)
        elif model not in self._gathered:
            self._gathered.add(model)
            if missing := self._missing(model):
                timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._on_gathered, model)
                self._gathering[model] = timer
                for engine in missing[:MAX_RETRIED]:
                    engine.connection.retry_now()

    def _missing(self, model: str) -> list[Engine]:
        """The engines that ran the model before, and may come back."""
        return [
            engine
            for engine in self._engines.values()
            if model in engine.models
            and not (engine.retired or engine.connection.ready or engine.connection.condition == "leaving")
        ]

    def _end_gathering(self, model: str) -> None:
        if (timer := self._gathering.pop(model, None)) is not None:
            timer.cancel()
            self._candidates_cache.clear()

    def _on_gathered(self, model: str) -> None:
        self._end_gathering(model)
        self._throttled_notify.request()

    def _notify(self) -> None:
        self.refresh_loras()
        for model in self._models:
            if model in self._gathering and not self._missing(model):
                self._end_gathering(model)
            self._update_limits(model)
            metrics.ENGINES_READY.labels(model).set(self.ready(model))
            metrics.ENGINES_SLEEPING.labels(model).set(self.num_sleeping(model))
        # All that wait check again; the next ones wait for a new event.
        self._changed.set()
        self._changed = asyncio.Event()
        self._notify_capacity()

    def _update_limits(self, model: str) -> None:
        self._stale_limits.discard(model)
        described = [
            each.connection.description
            for each in self._engines.values()
            if model in each.models and each.connection.description is not None
        ]
        if described:
            self._limits[model] = ServedModelLimits.of(described)


def _nothing() -> None:
    """What another worker has heard of an engine holds, whatever becomes of this one's own connection."""


@contextmanager
def _log_and_continue(engine_id: str) -> Iterator[None]:
    """Logs an error of one engine, so that the others are still discovered."""
    try:
        yield
    except Exception:
        log.exception("engine %s cannot be taken in or let go of", engine_id)
