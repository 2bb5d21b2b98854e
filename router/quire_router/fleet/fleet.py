"""All engines: finds them, keeps a link to each, and says who can run what. Which one does is placement's choice."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.v1 import engine_pb2

from quire_router import metrics
from quire_router.fleet.discovery import Discovery
from quire_router.fleet.engine import Dispatch, Engine
from quire_router.fleet.link import EngineLink
from quire_router.fleet.output import EngineLost
from quire_router.fleet.settings import LinkSettings
from quire_router.placement.view import EngineView

log = logging.getLogger(__name__)

FleetKvListener = Callable[[str, engine_pb2.Snapshot | engine_pb2.KvEvent], None]
"""Hears of every change of every engine's prefix cache, with the engine's id."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model's engines have in common: the smallest length and vocabulary among them."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Fleet:
    """The engines of one router. ``models`` are the names that requests can ask for."""

    def __init__(
        self,
        discovery: Discovery,
        models: Iterable[str],
        settings: LinkSettings | None = None,
        *,
        on_kv_event: FleetKvListener | None = None,
    ) -> None:
        self._discovery = discovery
        self._settings = settings or LinkSettings()
        self._models = tuple(models)
        self._on_kv_event = on_kv_event
        self._engines: dict[str, Engine] = {}
        self._limits: dict[str, ModelLimits] = {}
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to find and to connect engines; never waits for one."""
        self._following = asyncio.create_task(self._follow(), name="engine discovery")

    async def close(self) -> None:
        """Closes every link; what is in flight there is given back with ``EngineLost``."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        engines, self._engines = list(self._engines.values()), {}
        await asyncio.gather(*(engine.link.close() for engine in engines), *self._closing)
        self._on_change()

    def candidates(self, model: str) -> list[EngineView]:
        """The engines that can run the model now, in the order in which they were found."""
        return [engine.view() for engine in self._engines.values() if engine.can_run(model)]

    def dispatch(self, engine_id: str, message: engine_pb2.Submit) -> Dispatch:
        """An attempt at one of the ``candidates``. Raises ``EngineLost`` when the engine is not known any more."""
        engine = self._engines.get(engine_id)
        if engine is None:
            raise EngineLost("the engine has left the fleet")
        return Dispatch(engine, message, self._release)

    def ready(self, model: str) -> int:
        """How many engines can run the model now."""
        return sum(engine.can_run(model) for engine in self._engines.values())

    def limits(self, model: str) -> ModelLimits | None:
        """The model's limits as engines told them, also after they went away; None while no engine has told."""
        return self._limits.get(model)

    async def wait_ready(self, timeout: float, model: str | None = None) -> bool:  # noqa: ASYNC109 - the answer is a bool
        """Waits until an engine can run ``model`` (every configured model, without one); whether it came to that."""
        try:
            async with asyncio.timeout(timeout):
                while not self._all_ready(model):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _all_ready(self, model: str | None) -> bool:
        return all(self.ready(name) for name in ((model,) if model is not None else self._models))

    async def _follow(self) -> None:
        async for addresses in self._discovery.watch():
            self._update(addresses)

    def _update(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self._engines:
                self._engines[address] = self._connect(address)
            self._engines[address].retired = False
        for engine in list(self._engines.values()):
            if engine.id not in addresses:
                engine.retired = True
                self._release(engine)
        self._on_change()

    def _connect(self, address: str) -> Engine:
        listener = None if self._on_kv_event is None else partial(self._on_kv_event, address)
        link = EngineLink(address, self._settings, on_change=self._on_change, on_kv_event=listener)
        link.start()
        return Engine(link)

    def _release(self, engine: Engine) -> None:
        """Lets go of an engine that left, once its last request has ended."""
        if engine.retired and engine.in_flight == 0 and self._engines.pop(engine.id, None) is not None:
            task = asyncio.get_running_loop().create_task(engine.link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _on_change(self) -> None:
        for model in self._models:
            self._remember_limits(model)
            metrics.ENGINES_READY.labels(model).set(self.ready(model))
        # Whoever waits looks again; a fresh event makes the next wait wait.
        self._changed.set()
        self._changed = asyncio.Event()

    def _remember_limits(self, model: str) -> None:
        described = [e.link.description for e in self._engines.values() if e.link.description and e.serves(model)]
        if described:
            self._limits[model] = ModelLimits(
                max_model_len=min(d.max_model_len for d in described),
                vocab_size=min(d.vocab_size for d in described),
                eos_token_ids=tuple(described[0].eos_token_ids),
            )
