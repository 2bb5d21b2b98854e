"""``SleepController``: puts engines to sleep and wakes them up, as ``sleep_plan`` decides."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic

import grpc
from quire.v1 import engine_pb2
from quire_proto.errors import QuireError
from quire_proto.supervise import SupervisedTask

from quire_router.core.retry import supervise, wait_at_most
from quire_router.engines.attempt import EngineLost
from quire_router.engines.engine import Engine
from quire_router.engines.pool import EnginePool
from quire_router.engines.sleep_plan import Demand, SleepCandidate, SleepSettings, plan

log = logging.getLogger(__name__)

AWAKE, ASLEEP = engine_pb2.SLEEP_STATE_AWAKE, engine_pb2.SLEEP_STATE_ASLEEP
PERIOD = 1.0  # seconds between two looks at the fleet
MIN_PAUSE = 0.05  # seconds between two looks that requests asked for
DRAIN_SECONDS = 30.0
"""How long an engine whose turn is over may finish its requests. If that is not enough, it goes on, and has another
turn.
"""
RETRY_SECONDS = 5.0  # until an engine is asked again that refused
SETTLE_LOOKS = 40  # at what an engine says that has done what it was asked for, each after a ``MIN_PAUSE``


class SleepController:
    """Looks at the engines of ``pool`` once a second, and at once when ``ask`` is called, which is when a request finds
    no room. ``num_waiting`` returns the requests of a model that wait in this router, and ``read_load`` those of all
    routers, waiting and running; it may raise ``QuireError``, and then the load is this router's waiting requests.
    """

    def __init__(
        self,
        pool: EnginePool,
        models: Sequence[str],
        settings: SleepSettings,
        *,
        num_waiting: Callable[[str], int],
        read_load: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:
        self._pool = pool
        self._models = tuple(models)
        self._settings = settings
        self._num_waiting = num_waiting
        self._read_load = read_load
        self._asked = asyncio.Event()
        self._idle_since: dict[str, float] = {}
        self._awake_since: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # what engines were asked for, by engine
        self._retry_at: dict[str, float] = {}
        self._task: SupervisedTask | None = None

    def start(self) -> None:
        """Begins to look."""
        self._task = supervise("sleeping engines", self._watch)

    async def close(self) -> None:
        """Ends what ``start`` has begun; engines stay as they are."""
        if self._task is not None:
            await self._task.stop()
        for task in self._running.values():
            task.cancel()

    def ask(self) -> None:
        """A request has found no room."""
        self._asked.set()

    async def _watch(self) -> None:
        while True:
            await wait_at_most(self._asked, PERIOD)
            self._asked.clear()
            await self._look()
            await asyncio.sleep(MIN_PAUSE)

    async def _look(self) -> None:
        if self._settings.sleep_after is None and not any(e.load.sleep_state == ASLEEP for e in self._pool.engines()):
            return  # nothing to put to sleep or to wake up, which every request without room would look for
        engines: dict[str, Engine] = {}
        candidates: list[SleepCandidate] = []
        now = monotonic()
        for engine in self._pool.engines():
            if engine.can_sleep and not engine.models.isdisjoint(self._models):
                engines[engine.id] = engine
                candidates.append(self._candidate(engine, now))
            elif _holds_shared_memory(engine):
                candidates.append(_holder(engine))
        for known in (self._idle_since, self._awake_since, self._retry_at):
            for engine_id in known.keys() - engines.keys():
                del known[engine_id]
        demands = await self._demands()
        decided = plan(candidates, demands, self._settings)
        for engine_id in decided.sleep:
            self._begin(engines[engine_id], ASLEEP, lambda engine: engine.connection.sleep(0.0))
        for engine_id in decided.drain:
            self._begin(engines[engine_id], ASLEEP, lambda engine: engine.connection.sleep(DRAIN_SECONDS))
        for engine_id in decided.wake_up:
            self._begin(engines[engine_id], AWAKE, _wake_up)

    def _candidate(self, engine: Engine, now: float) -> SleepCandidate:
        sleeping = engine.load.sleep_state == ASLEEP
        if sleeping or engine.load.has_work:
            self._idle_since.pop(engine.id, None)
        if not engine.load.is_awake:  # one that was to fall asleep, and goes on, has another turn
            self._awake_since.pop(engine.id, None)
        idle = not (sleeping or engine.load.has_work)
        return SleepCandidate(
            engine.id,
            next(model for model in self._models if model in engine.models),
            is_sleeping=sleeping,
            idle_seconds=max(1e-9, now - self._idle_since.setdefault(engine.id, now)) if idle else 0.0,
            awake_seconds=now - self._awake_since.setdefault(engine.id, now) if engine.load.is_awake else 0.0,
            shared_device=engine.shared_device,
            is_changing=engine.id in self._running or not (sleeping or engine.load.is_awake),
            has_refused=self._retry_at.get(engine.id, 0.0) > now,
        )

    async def _demands(self) -> Mapping[str, Demand]:
        waiting = {model: self._num_waiting(model) for model in self._models}
        load: Mapping[str, int] = waiting
        if self._settings.target_load is not None:
            try:
                load = await self._read_load()
            except QuireError:
                log.debug("the load of all routers is not known: no engine is woken up for it")
        return {
            model: Demand(count > 0 and not self._pool.has_capacity(model), load.get(model, 0))
            for model, count in waiting.items()
        }

    def _begin(
        self, engine: Engine, state: "engine_pb2.SleepState.ValueType", what: Callable[[Engine], Awaitable[None]]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(engine, state, what))
        self._running[engine.id] = task
        task.add_done_callback(lambda _: self._running.pop(engine.id, None))

    async def _carry_out(
        self, engine: Engine, state: "engine_pb2.SleepState.ValueType", what: Callable[[Engine], Awaitable[None]]
    ) -> None:
        try:
            await what(engine)
            # What it says of itself comes another way: until then it seems not to have the memory that it has taken.
            for _ in range(SETTLE_LOOKS):
                if engine.load.sleep_state == state:
                    break
                await asyncio.sleep(MIN_PAUSE)
        except (grpc.aio.AioRpcError, EngineLost) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            log.info("engine %s stays as it is: %s", engine.id, reason)
            self._retry_at[engine.id] = monotonic() + RETRY_SECONDS
        self.ask()


async def _wake_up(engine: Engine) -> None:
    """Raises as ``EngineClient.wake_up``; ``EngineLost`` soon where the engine does not answer, as no other one of its
    model is woken up meanwhile.
    """
    await engine.connection.probe()
    if not engine.connection.ready:
        raise EngineLost("it does not answer")
    await engine.connection.wake_up()


def _holds_shared_memory(engine: Engine) -> bool:
    """Whether an engine that cannot be put to sleep now has the memory of a device that others share with it. One that
    is lost is taken for dead.
    """
    is_lost = engine.connection.condition in ("connecting", "lost")
    return bool(engine.shared_device) and not is_lost and engine.load.sleep_state != ASLEEP


def _holder(engine: Engine) -> SleepCandidate:
    """Such an engine: it is in nobody's hands."""
    return SleepCandidate(engine.id, "", is_sleeping=False, shared_device=engine.shared_device, is_changing=True)
