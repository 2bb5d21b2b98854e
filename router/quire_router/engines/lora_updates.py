"""``LoRAUpdater``: adapters that are loaded and unloaded at all engines of a model while these serve."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from time import monotonic
from typing import TypeVar

import grpc
from quire_proto.errors import QuireError, invalid
from quire_proto.supervise import SupervisedTask

from quire_router.core.errors import (
    lora_update_failed,
    model_not_known_yet,
    no_engine_ready,
    not_an_adapters_name,
    unknown_lora,
    unknown_model,
)
from quire_router.core.generation import LoRA
from quire_router.core.retry import supervise
from quire_router.engines.attempt import EngineLost
from quire_router.engines.base import EngineClient
from quire_router.engines.engine import Engine
from quire_router.engines.loaded_loras import LoadedLoRAs
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ServedLoRA

log = logging.getLogger(__name__)

_SEEN_TIMEOUT = 5.0  # seconds
_RETRY_SECONDS = 30.0
_STORE_RETRY_SECONDS = 1.0
_FORGET_SECONDS = 30.0
"""After an adapter was unloaded, engines that say for so long that they have it are not believed: the message may be
late, or they had begun to load it before."""
T = TypeVar("T")


class LoRAUpdater:
    """Loads and unloads adapters at the engines of ``pool`` that are ready, of the configured ``models``.

    Those that any engine has loaded while it served are remembered until they are unloaded, by this router or another,
    and are loaded at engines that join or begin again (``start``). Engines say what they have, and ``loaded`` keeps
    what clients have loaded, so that each router knows it, also one that starts later; ``hold_timeout`` is for how many
    seconds it waits to hear all of them.
    """

    def __init__(
        self, pool: EnginePool, models: Sequence[str], loaded: LoadedLoRAs, *, hold_timeout: float = 10.0
    ) -> None:
        self._pool = pool
        self._loaded = loaded
        self._stored: Mapping[str, ServedLoRA] = {}  # as all routers had it at the last reading
        self._read_at = -inf  # when to read it again
        self._away = False  # as the log has it
        self._hold_timeout = hold_timeout
        self._models = tuple(models)
        self._seen: dict[str, tuple[int, dict[str, LoRA]]] = {}  # by engine: its generation, and what it had loaded
        self._loading: dict[str, asyncio.Task[None]] = {}  # by engine
        self._loading_for_clients: Counter[str] = Counter()  # loads that clients wait for, by engine
        self._failed: dict[tuple[str, int, LoRA], float] = {}  # when: by engine, its generation and adapter
        self._forgotten: dict[LoRA, float] = {}  # when
        self._task: SupervisedTask | None = None

    def start(self) -> None:
        """Keeps engines that join up with the others from now on."""
        self._task = supervise("lora updates", self._watch)

    async def close(self) -> None:
        """Ends what ``start`` has begun."""
        if self._task is not None:
            await self._task.stop()
        for task in self._loading.values():
            task.cancel()

    # What clients ask for

    async def load(self, name: str, path: str, model: str | None = None) -> None:
        """Loads the adapter in the folder ``path``, as engines see it, as ``name``, at every engine of ``model``; of
        the only model that has adapters if that is None. Returns once requests may name it. Raises ``QuireError``,
        also if a part of the engines has loaded it: then it is served by these.
        """
        if name in self._models:
            raise not_an_adapters_name(name)
        engines = self._engines_of(model)
        ids = [engine.id for engine in engines]
        self._loading_for_clients.update(ids)
        try:
            digests = await _at_all(engines, lambda connection: connection.load_lora(name, path))
            loras = [LoRA(name, digest, path) for digest in digests]
            served = next(each for each in self._models if each in engines[0].models)
            self._forgotten.pop(loras[0], None)
            expected = self._pool.expected_loras[name] = ServedLoRA(served, loras[0])
            self._loaded.change(name, expected)
            await self._sync()
            await self._wait_seen(engines, loras)  # before that they seem to lack it
        finally:
            self._loading_for_clients.subtract(ids)

    async def unload(self, name: str) -> None:
        """Unloads an adapter wherever it is; returns once requests may not name it any more. Those that run with it go
        on. Raises ``QuireError``.
        """
        await self._pool.wait_for_lora(name, self._hold_timeout)
        engines = [engine for engine in self._pool.engines() if name in engine.connection.loras]
        if not (engines or name in self._pool.expected_loras or self._pool.knows_loras()):
            raise model_not_known_yet(name)
        if not engines and name not in self._pool.expected_loras:
            raise unknown_lora(name)
        self._forget(name)
        self._loaded.change(name, None)
        await self._sync()
        await _at_all(engines, lambda connection: connection.unload_lora(name))
        self._pool.refresh_loras()
        await self._wait_seen(engines, [None] * len(engines), name)

    def _engines_of(self, model: str | None) -> list[Engine]:
        if model is not None and model not in self._models:
            raise unknown_model(model, self._models)
        ready = {
            name: [engine for engine in self._pool.engines() if engine.serves_loras and engine.can_run(name)]
            for name in (self._models if model is None else (model,))
        }
        found = {frozenset(engine.id for engine in engines): engines for engines in ready.values() if engines}
        if len(found) > 1:
            names = ", ".join(name for name, engines in ready.items() if engines)
            raise invalid("base_model_name", f"base_model_name must say of which model the adapter is one: {names}.")
        engines = list(chain.from_iterable(found.values()))
        if not engines and self._pool.knows_loras() and any(self._pool.ready(name) for name in ready):
            raise invalid("lora_name", "No engine serves adapters: start engines with --enable-lora.")
        if not engines:
            raise no_engine_ready()
        return engines

    async def _wait_seen(self, engines: Sequence[Engine], loras: Sequence[LoRA | None], name: str = "") -> None:
        """Waits until each engine's stream has said that it has its one of ``loras``, or for None that it has none of
        this ``name``: the stream may be behind the answer to a load. Does not wait for engines that are lost, and at
        most ``_SEEN_TIMEOUT``.
        """

        def said(engine: Engine, lora: LoRA | None) -> bool:
            known = engine.connection.loras.get(name if lora is None else lora.name)
            return known == lora or not engine.connection.ready

        with suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_TIMEOUT):
                while not all(map(said, engines, loras)):
                    await self._pool.changed()
        self._observe()  # what they say they have is known before any of it can be gone again

    # Engines that join

    async def _watch(self) -> None:
        while True:
            if monotonic() >= self._read_at:
                await self._sync()
            self._observe()
            for engine in self._pool.engines():
                missing = self._missing_at(engine)
                if missing and engine.id not in self._loading and not self._loading_for_clients[engine.id]:
                    task = self._loading[engine.id] = asyncio.create_task(self._load_at(engine, missing))
                    task.add_done_callback(partial(self._on_loaded, engine.id))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pool.changed(), max(0.0, self._read_at - monotonic()))

    async def _sync(self) -> None:
        """Remembers what any router has loaded since the last time, and forgets what one has unloaded; writes what this
        one did. While the store cannot be used, that is for a later time.
        """
        try:
            stored = await self._loaded.sync()
        except QuireError as error:
            if not self._away:
                log.warning("cannot store the list of loaded adapters: %s", error.message)
            self._away, self._read_at = True, monotonic() + _STORE_RETRY_SECONDS
            return
        self._away, self._read_at = False, monotonic() + _RETRY_SECONDS
        before, self._stored = self._stored, stored
        for name in before.keys() - stored.keys():
            if self._remembers(name, before[name].lora):
                self._forget(name)
        for name, served in stored.items():
            is_new = name not in before or before[name] != served or before[name].lora.path != served.lora.path
            if is_new and served.model in self._models:
                self._pool.expected_loras[name] = served
        self._pool.refresh_loras()

    def _observe(self) -> None:
        """Remembers what engines have loaded since the last time, and forgets what one that has not begun again has no
        more: somebody has unloaded it. What an engine had before counts for neither, as others may be later.
        """
        before, self._seen = self._seen, {}
        for engine in self._pool.engines():
            model = next((name for name in self._models if name in engine.models), None)
            connection = engine.connection
            if model is None:
                continue
            now = {name: lora for name, lora in connection.loras.items() if lora.path and name not in self._models}
            generation, had = before.get(engine.id, (0, {}))
            if generation != connection.generation:
                had = {}
            for name in had.keys() - now.keys():
                if self._remembers(name, had[name]):
                    self._forget(name)
            for name in now.keys() - had.keys():
                if self._forgotten.get(now[name], -inf) <= monotonic() - _FORGET_SECONDS:
                    self._pool.expected_loras.setdefault(name, ServedLoRA(model, now[name]))
            self._seen[engine.id] = connection.generation, now
        self._pool.refresh_loras()

    def _forget(self, name: str) -> None:
        """An adapter was unloaded, here or by another router."""
        now = monotonic()
        self._forgotten = {lora: when for lora, when in self._forgotten.items() if when > now - _FORGET_SECONDS}
        if name in self._pool.expected_loras:
            self._forgotten[self._pool.expected_loras[name].lora] = now
        for engine in self._pool.engines():
            if name in engine.connection.loras:
                self._forgotten[engine.connection.loras[name]] = now
        self._pool.forget_lora(name)

    def _remembers(self, name: str, lora: LoRA) -> bool:
        expected = self._pool.expected_loras.get(name)
        return expected is not None and expected.lora == lora

    def _missing_at(self, engine: Engine) -> list[LoRA]:
        connection, until = engine.connection, monotonic() - _RETRY_SECONDS
        return [
            served.lora
            for name, served in self._pool.expected_loras.items()
            if engine.serves_loras
            and engine.can_run(served.model)
            and name not in connection.loras
            and self._failed.get((engine.id, connection.generation, served.lora), until) <= until
        ]

    def _on_loaded(self, engine_id: str, task: asyncio.Task[None]) -> None:
        del self._loading[engine_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cannot load adapters on engine %s", engine_id, exc_info=error)

    async def _load_at(self, engine: Engine, loras: Sequence[LoRA]) -> None:
        """Loads at one engine the adapters that others have and it lacks. What fails is tried again later."""
        generation = engine.connection.generation
        for lora in loras:
            try:
                await engine.connection.load_lora(lora.name, lora.path, lora.digest)
                if not self._remembers(lora.name, lora):  # it was unloaded meanwhile
                    await engine.connection.unload_lora(lora.name)
            except (grpc.aio.AioRpcError, EngineLost) as error:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                log.error("engine %s cannot load the adapter %s, which others have: %s", engine.id, lora.name, why)
                self._failed[engine.id, generation, lora] = monotonic()
            else:
                log.info("engine %s loaded the adapter %s, as others have it", engine.id, lora.name)
        await self._wait_seen([engine], [lora for lora in loras if self._remembers(lora.name, lora)][-1:])


async def _at_all(engines: Sequence[Engine], update: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
    """Updates all engines. Raises the error of the first that failed, and says at how many it did not."""
    outcomes = await asyncio.gather(*(update(engine.connection) for engine in engines), return_exceptions=True)
    failed = [(each, error) for each, error in zip(engines, outcomes, strict=True) if isinstance(error, BaseException)]
    if not failed:
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    engine, error = failed[0]
    done = len(engines) - len(failed)
    status, message, param = grpc.StatusCode.UNAVAILABLE, "The engine is not connected.", None
    if isinstance(error, grpc.aio.AioRpcError):
        status, message = error.code(), error.details() or "The engine does not say why."
        param = dict(error.trailing_metadata() or ()).get("quire-param")
    elif not isinstance(error, EngineLost):
        raise error
    elif not done:
        raise no_engine_ready()
    if done:
        message = f"{message} That is so at {engine.id}; {done} of {len(engines)} engines have done it."
    raise lora_update_failed(status.name, message, str(param) if param else None)
