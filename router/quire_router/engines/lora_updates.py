"""``LoRAUpdater``: adapters that are loaded and unloaded at all engines of a model while these serve."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

import grpc
from quire_proto.errors import invalid

from quire_router.core.errors import lora_update_failed, no_engine_ready, not_an_adapters_name, unknown_model
from quire_router.engines.connection import EngineConnection
from quire_router.engines.output_stream import EngineLost
from quire_router.engines.pool import Engine, EnginePool

_SEEN_TIMEOUT = 5.0  # seconds


class LoRAUpdater:
    """Loads and unloads adapters at the engines of ``pool`` that are ready, of the configured ``models``. An engine
    that comes later has those that it is started with.
    """

    def __init__(self, pool: EnginePool, models: Sequence[str]) -> None:
        self._pool = pool
        self._models = tuple(models)

    async def load(self, name: str, path: str, model: str | None = None) -> None:
        """Loads the adapter in the folder ``path``, as engines see it, as ``name``, at every engine of ``model``; of
        the only model that has adapters if that is None. Returns once requests may name it. Raises ``QuireError``,
        also if a part of the engines has loaded it: then it is served by these.
        """
        if name in self._models:
            raise not_an_adapters_name(name)
        engines = self._engines_of(model)
        await _at_all(engines, lambda connection: connection.load_lora(name, path))
        await self._wait_seen(name)

    async def unload(self, name: str) -> None:
        """Unloads an adapter wherever it is. Requests that run with it go on. Raises ``QuireError``."""
        engines = [engine for engine in self._pool.engines() if name in engine.connection.session.loras]
        if not engines:
            raise unknown_model(name)
        await _at_all(engines, lambda connection: connection.unload_lora(name))

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
        if not engines and any(self._pool.ready(name) for name in ready):
            raise invalid("lora_name", "No engine serves adapters: start engines with --enable-lora.")
        if not engines:
            raise no_engine_ready()
        return engines

    async def _wait_seen(self, name: str) -> None:
        """Waits until the router has heard of the adapter, so that the next request finds it."""
        async with asyncio.timeout(_SEEN_TIMEOUT):
            while name not in self._pool.loras():
                await self._pool.changed()


async def _at_all(engines: Sequence[Engine], update: Callable[[EngineConnection], Awaitable[None]]) -> None:
    """Updates all engines. Raises the error of the first that failed, and says at how many it did not."""
    outcomes = await asyncio.gather(*(update(engine.connection) for engine in engines), return_exceptions=True)
    errors = [(engine, outcome) for engine, outcome in zip(engines, outcomes, strict=True) if outcome is not None]
    if not errors:
        return
    engine, error = errors[0]
    if not isinstance(error, grpc.aio.AioRpcError):
        raise no_engine_ready() if isinstance(error, EngineLost) else error
    done = len(engines) - len(errors)
    message = error.details() or "The engine does not say why."
    if done:
        message = f"{message} That is so at {engine.id}; {done} of {len(engines)} engines have done it."
    raise lora_update_failed(error.code().name, message)
