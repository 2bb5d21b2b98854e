"""``EnginePool``: which engines of a router can run which model, and which have capacity. Placement chooses among them.
How they are found and connected is in ``engine_registry``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic

import numpy as np
from quire.v1 import engine_pb2
from quire_proto.priority import BEST_EFFORT
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core import metrics
from quire_router.core.generation import LoRA
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.retry import CpuThrottle
from quire_router.discovery.base import Discovery
from quire_router.engines.attempt import EngineLost
from quire_router.engines.base import Offload, on_any_thread
from quire_router.engines.engine import Dispatch, Engine
from quire_router.engines.engine_registry import EngineKvListener, EngineRegistry
from quire_router.engines.forwarded import Forwarded
from quire_router.engines.load import CAPACITY_SECONDS, EngineLoad, LoadLedger
from quire_router.engines.model_matcher import ModelIdentity, ModelMatcher
from quire_router.engines.output_stream import max_sequences
from quire_router.engines.settings import ConnectionSettings, KnownModel, ServedLoRA, ServedModelLimits
from quire_router.engines.update_sharing import UpdateSharing
from quire_router.placement.engine_table import EngineTable, Rows
from quire_router.placement.policies import LoRAColumns
from quire_router.placement.prefix_index import BlockNamespace

GATHER_SECONDS = 0.5
"""How long a model's first engine waits for others that were there before, so that requests that were held while there
was none are not all given to the one that comes back a moment earlier.
"""

MAX_RETRIED = 32
"""Engines that are tried again at once for that: a try costs about 2 ms of CPU."""

LOOK_SECONDS = 0.1
"""How long it holds that an engine of a model is alive: all engines of a large fleet may ask at once."""

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
    as an engine is going to have them: they wait for it. ``is_complete`` says whether each source of engines has
    answered. With ``update_sharing`` this pool is one of several of one router, and hears of the load and the caches of
    other pools' engines from these. What is long for servers of others, and of them, is written and read through
    ``offload``.

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
        is_complete: Callable[[], bool] = lambda: True,
        offload: Offload = on_any_thread,
    ) -> None:
        self.table = EngineTable() if table is None else table
        self.on_capacity = on_capacity
        self.ledger = LoadLedger(self.table, capacity_seconds=capacity_seconds, on_capacity=self._notify_capacity)
        self._models = tuple(models)
        self._is_complete = is_complete
        self._settings = settings or ConnectionSettings()
        self._folders = {name: identity.folder for name, identity in (vocabularies or {}).items()}
        known = {name: KnownModel((tokenizers or {}).get(name), (assumed or {}).get(name)) for name in self._models}
        self._candidates_cache: dict[tuple[str, LoRA | None], _Candidates] = {}
        self._registry = EngineRegistry(
            discovery,
            self.ledger,
            self._settings,
            ModelMatcher(self._models, vocabularies),
            known,
            on_change=self._on_change,
            on_removed=self._candidates_cache.clear,
            has_substitute=self._has_substitute,
            on_kv_event=on_kv_event,
            update_sharing=update_sharing,
            offload=offload,
        )
        self._engines, self._by_row = self._registry.engines, self._registry.by_row  # which changes them
        self.expected_loras: dict[str, ServedLoRA] = {}
        self._loras: Mapping[str, ServedLoRA] = {}
        self._knows_loras = False
        self._num_heard = 0  # of the engines that were ever added, those that the above counts
        self._live: dict[tuple[str, ModelVersion], tuple[float, list[Engine]]] = {}  # some, until when that holds
        self._gathered: set[str] = set()  # the models with engines that are ready
        self._gathering: dict[str, asyncio.TimerHandle] = {}
        self._limits = dict(assumed or {})
        self._stale_limits: set[str] = set()  # the models whose limits may have changed
        self._changed = asyncio.Event()
        self._waiting = Counter[str]()  # requests that wait for an engine to be ready, by model
        self.on_waiting: Callable[[], None] = lambda: None
        self._throttled_notify = CpuThrottle(self._notify)

    async def start(self) -> None:
        """Starts to discover and to connect engines; never waits for one."""
        self._registry.start()
        self._on_change()  # the metrics are to show that there is none yet

    async def close(self) -> None:
        """Closes every connection; what is in flight there ends with ``EngineLost``."""
        await self._registry.close()
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

    def are_names_of_one(self, models: Collection[str]) -> bool:
        """Returns whether each engine that serves any of these names serves all of them. While none is known that does,
        names with one folder are those of one model: a request waits for its engine. May be called on any thread.
        """
        names = set(models)
        serving = [engine.models for engine in self.engines() if not engine.models.isdisjoint(names)]
        if serving or not names <= self._folders.keys():
            return bool(serving) and all(names <= served for served in serving)
        return len({self._folders[name] for name in names}) == 1

    def loras(self) -> Mapping[str, ServedLoRA]:
        """All adapters by their names, which are not those of models. Where engines have different ones of a name, it
        is the one that more engines have. May be called on any thread; not to be written to.
        """
        return self._loras

    def refresh_loras(self) -> None:
        """Has ``loras`` say what engines have told by now, and what is expected. Whoever waits looks again if all are
        known now.
        """
        knew = self._knows_loras
        self._loras = self._find_loras()
        self._knows_loras = self._all_heard()
        self._num_heard = self._registry.num_added
        if self._knows_loras and not knew:
            self._throttled_notify.request()

    def knows_loras(self) -> bool:
        """Whether ``loras`` has all adapters that there are. May be called on any thread."""
        return self._knows_loras

    async def wait_for_lora(self, name: str, seconds: float) -> None:
        """Waits until an engine has an adapter of this name, or all adapters are known, so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while name not in self._loras and not self._knows_loras:
                    await self.changed()

    def _all_heard(self) -> bool:
        """Whether each source of engines has answered, and each engine. One that was never reached is not waited for
        longer than an engine takes to start, once others have answered.
        """
        if not (self._registry.discovered and self._is_complete()):
            return False
        engines = [engine for engine in self._engines.values() if not engine.retired]
        silent = [engine for engine in engines if not engine.described]
        late = monotonic() - self._settings.start_patience
        return not silent or (len(silent) < len(engines) and all(engine.known_since < late for engine in silent))

    def forget_lora(self, name: str) -> None:
        """An adapter was unloaded: it is expected no more."""
        self.expected_loras.pop(name, None)
        self._loras = {other: served for other, served in self._loras.items() if other != name}

    def has_lora(self, model: str, lora: LoRA) -> bool:
        """Whether it is worth waiting for an engine with an adapter: one has it that may not be ready, or may get it,
        as engines do that begin again. It is not where the adapter was unloaded, or where its name is another one's.
        """
        if self.expected_loras.get(lora.name) == ServedLoRA(model, lora):
            return True
        connections = [engine.connection for engine in self._engines.values() if model in engine.models]
        known = [each.loras[lora.name] for each in connections if lora.name in each.loras]
        return lora in known or not (known or any(lora in each.unloaded_loras for each in connections))

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

    def _all_ready(self, model: str | None, lora: LoRA | None, version: ModelVersion) -> bool:
        return all(self.ready(name, lora, version) for name in ((model,) if model is not None else self._models))

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

    def dispatch(
        self, engine_id: str, message: engine_pb2.Submit, *, pending_tokens: int, tenant: str = ""
    ) -> Dispatch:
        """Returns the dispatch of a tenant's request to one of the engines in ``rows``; ``pending_tokens`` of its
        prompt are not cached there. Raises ``EngineLost`` if the engine is not known any more.
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
        return Dispatch(engine, message, begin, self._on_release, tenant)

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
        self._registry.remove_if_idle(engine)
        self._notify_capacity()

    def _notify_capacity(self) -> None:
        self.on_capacity()

    # Candidates, and the wait for those that left together

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

    # Where an engine is late

    def is_alive(self, engine_id: str) -> bool:
        """Returns whether an engine has given a sign of life just now."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.connection.alive

    def _has_substitute(self, engine_id: str) -> bool:
        """Whether another engine can take what one runs that is silent, away or set aside: one that has given a sign of
        life since. Where none does, all may be short of processors, or it may be this router that hears nothing.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            return False
        models = [model for model in self._models if model in engine.models]
        return any(each is not engine for model in models for each in self._find_live(model, engine.version))

    def _find_live(self, model: str, version: ModelVersion) -> list[Engine]:
        """Returns two engines of a model's version that are ready and alive, if there are, and asks some where they are
        not known. Looked up for all that ask within ``LOOK_SECONDS``, as long as these are ready.
        """
        now = asyncio.get_running_loop().time()
        until, found = self._live.get((model, version), (0.0, list[Engine]()))
        if now >= until or not all(each.can_run(model) for each in found):
            able = [each for each in self._candidates(model).engines if each.version.continues(version)]
            found = list(islice((each for each in able if each.connection.alive), 2))
            if len(found) < 2:
                self._registry.probe_some(able)
            self._live[model, version] = now + LOOK_SECONDS, found
        return found

    # What changes

    def _on_change(self) -> None:
        """Drops what was cached of who can run what. Waiting requests and metrics are notified through a throttle,
        because the connections of a large fleet change often.
        """
        self._candidates_cache.clear()
        self._stale_limits.update(self._models)
        if self._registry.num_added != self._num_heard:  # what a new engine has is not known yet
            self._knows_loras = False
        self._throttled_notify.request()

    def _notify(self) -> None:
        for model in self._models:
            if model in self._gathering and not self._missing(model):
                self._end_gathering(model)
            metrics.ENGINES_READY.labels(model).set(self.ready(model))
            metrics.ENGINES_SLEEPING.labels(model).set(self.num_sleeping(model))
            self._update_limits(model)
        self.refresh_loras()
        # All that wait check again; the next ones wait for a new event.
        self._changed.set()
        self._changed = asyncio.Event()
        self._notify_capacity()

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

    def _update_limits(self, model: str) -> None:
        self._stale_limits.discard(model)
        described = [
            each.connection.description
            for each in self._engines.values()
            if model in each.models and each.connection.description is not None
        ]
        if described:
            self._limits[model] = ServedModelLimits.of(described)
