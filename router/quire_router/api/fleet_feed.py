"""``FleetFeed``: samples the fleet while somebody looks at it, once for all viewers, and streams what changes. Without
a viewer it does nothing.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from time import time

from pydantic import TypeAdapter
from quire.v1 import engine_pb2

from quire_router.admission.queue import AdmissionQueue
from quire_router.api.model_rates import ModelRates
from quire_router.core.errors import too_many_viewers
from quire_router.core.fleet_view import (
    EXPLAINED,
    ID_CHARACTERS,
    EngineView,
    FleetDelta,
    FleetLog,
    FleetSnapshot,
    KvPoolView,
    ModelView,
    RequestView,
    RouterView,
)
from quire_router.engines.engine import Engine
from quire_router.engines.pool import EnginePool
from quire_router.requests.runner import RequestRunner
from quire_router.requests.state import RequestState

log = logging.getLogger(__name__)

MAX_VIEWERS = 16
SAMPLE_PERIOD = 0.5  # seconds
MAX_INSPECTIONS = 4  # engines that are asked for their blocks in one sample, in turn: each costs 0.3 ms or so
MAX_REQUESTS = 50
MAX_ENGINES = 256
_SNAPSHOT, _DELTA = TypeAdapter(FleetSnapshot), TypeAdapter(FleetDelta)


class FleetFeed:
    """The stream of one router's view of its fleet. ``log`` has what happens to requests, and gets from here what
    happens to engines.
    """

    def __init__(
        self,
        pool: EnginePool,
        runner: RequestRunner,
        queue: AdmissionQueue,
        log: FleetLog,
        *,
        models: Iterable[str],
        router: RouterView,
        period: float = SAMPLE_PERIOD,
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._queue = queue
        self._log = log
        self._models = tuple(models)
        self._router = router
        self._rates: dict[str, ModelRates] = {}
        self._period = period
        self._viewers = 0
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._sampled = asyncio.Event()
        self._number = 0
        self._delta = b""
        self._last: FleetSnapshot | None = None
        self._inspections: dict[str, _Inspection] = {}

    async def watch(self) -> AsyncGenerator[bytes]:
        """Yields server-sent events: a snapshot, then what changes. A viewer that was too slow for a sample gets a
        snapshot again. Ends when the router stops. Raises ``QuireError`` OVERLOADED if too many look already.
        """
        if self._viewers >= MAX_VIEWERS:
            raise too_many_viewers()
        self._viewers += 1
        try:
            self._start()
            seen = -1
            while not self._closed:
                behind = self._number - seen
                if behind:
                    data = self._delta if behind == 1 and seen >= 0 else self._snapshot()
                    seen = self._number
                    yield data
                else:
                    await self._sampled.wait()
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        self._announce()

    def _start(self) -> None:
        if self._task is None:
            self._log.watched = True
            self._last = None
            self._rates = {name: ModelRates(name) for name in self._models}
            self._sample()
            self._task = asyncio.create_task(self._run(), name="fleet feed")

    def _stop(self) -> None:
        self._log.watched, self._log.explain = False, 0
        if self._task is not None:
            self._task.cancel()
        for inspection in self._inspections.values():
            inspection.cancel()
        self._task = None
        self._inspections.clear()

    async def _run(self) -> None:
        while True:
            self._inspect()
            await asyncio.sleep(self._period)
            try:
                self._sample()
            except Exception:  # the next one may succeed, and viewers wait for it
                log.exception("a sample of the fleet failed")

    def _announce(self) -> None:
        """Wakes the viewers; the next sample is a new event."""
        self._sampled.set()
        self._sampled = asyncio.Event()

    def _snapshot(self) -> bytes:
        assert self._last is not None, "a sample was taken"
        return _event(b"snapshot", _SNAPSHOT.dump_json(self._last))

    # Samples

    def _sample(self) -> None:
        self._log.explain = EXPLAINED
        before, engines = self._last, [self._view(engine) for engine in self._engines()]
        self._record_changes(engines if before is None else before.engines, engines)
        states = self._runner.in_progress()
        requests = [_request_view(state) for state in states[:MAX_REQUESTS]]
        now = FleetSnapshot(
            time=round(time(), 3),
            router=self._router,
            engines=engines,
            models=[self._model(name) for name in self._models],
            requests=requests,
            omitted_requests=len(states) - len(requests),
            events=list(self._log.since(0)),
            incidents=self._log.incidents,
        )
        self._last = now
        self._number += 1
        self._delta = b"" if before is None else _event(b"delta", _DELTA.dump_json(_difference(before, now)))
        self._announce()

    def _engines(self) -> list[Engine]:
        return self._pool.engines()[:MAX_ENGINES]

    def _model(self, name: str) -> ModelView:
        rates = self._rates[name]
        rates.sample()
        return ModelView(
            name=name,
            ready_engines=self._pool.ready(name),
            queued=self._queue.waiting(name),
            in_progress=self._runner.load(name),
            tokens_per_second=rates.tokens_per_second,
            ttft=rates.ttft,
            itl=rates.itl,
            hit_rate=rates.hit_rate,
        )

    def _view(self, engine: Engine) -> EngineView:
        table, row = self._pool.table, engine.row
        found = self._inspections.get(engine.id)
        device, host = (None, None) if found is None or found.last is None else (found.last.device, found.last.host)
        total = int(table.blocks_total[row])
        lost = engine.connection.condition in ("lost", "connecting")
        said = engine.description or engine_pb2.DescribeResponse()
        return EngineView(
            id=engine.id,
            condition=engine.condition,
            problem=engine.connection.problem,
            models=sorted(engine.models),
            device_name=said.device,
            dtype=said.dtype,
            version=said.version,
            max_model_len=said.max_model_len,
            started=round(said.started, 3),
            requests=int(table.requests[row]),
            decoding=int(table.decoding[row]),
            waiting=int(table.waiting[row]),
            swapped=int(table.swapped[row]),
            pending_tokens=int(table.pending_tokens[row]),
            max_sequences=int(table.max_sequences[row]),
            block_size=int(table.block_size[row]),
            device=_pool_view(None if lost else device, total, total - int(table.blocks_free[row])),
            host=_pool_view(None if lost else host, 0, 0),
            tokens_per_second=None if found is None or lost else found.tokens_per_second,
            hit_rate=None if found is None or lost else found.hit_rate,
            preemptions=None if found is None or found.last is None or lost else found.last.preemptions,
        )

    def _record_changes(self, before: Sequence[EngineView], now: Sequence[EngineView]) -> None:
        """Records engines that came, went, or had sequences give way between two samples, and those that are back that
        requests had to leave before or between them.
        """
        away = {incident.engine for incident in self._log.incidents if not incident.back}
        old = {engine.id: engine for engine in before}
        for engine in now:
            was = old.pop(engine.id, None)
            condition = None if was is None else was.condition
            if engine.condition == "ready" and (engine.condition != condition or engine.id in away):
                self._log.add("engine_ready", engine.id)
            elif engine.condition == "lost" and condition != "lost":
                self._log.add("engine_lost", engine.id, reason=engine.problem)
            if was is not None and engine.preemptions is not None and was.preemptions is not None:
                more = engine.preemptions - was.preemptions
                if more > 0:
                    self._log.add("preempted", engine.id, count=more)
        for engine_id in old:
            self._log.add("engine_left", engine_id)

    # What engines say of their blocks

    def _inspect(self) -> None:
        """Asks some engines, in turn, for what their blocks hold. None waits for the answer of another."""
        engines = {engine.id: engine for engine in self._engines()}
        for engine_id in self._inspections.keys() - engines.keys():
            self._inspections.pop(engine_id).cancel()
        for engine_id in engines:
            self._inspections.setdefault(engine_id, _Inspection())
        free = [each for each in engines if not self._inspections[each].running]
        for engine_id in sorted(free, key=lambda each: self._inspections[each].asked)[:MAX_INSPECTIONS]:
            self._inspections[engine_id].ask(engines[engine_id])


class _Inspection:
    """What one engine answered last, and how fast it draws tokens, from its last two answers."""

    def __init__(self) -> None:
        self.last: engine_pb2.InspectResponse | None = None
        self.asked = 0.0
        self.tokens_per_second: float | None = None
        self._answered = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it has been asked and has not answered."""
        return self._task is not None and not self._task.done()

    @property
    def hit_rate(self) -> float | None:
        """The part of all prompt tokens since its start that was cached."""
        if self.last is None or not self.last.prompt_tokens:
            return None
        return round(self.last.cached_prompt_tokens / self.last.prompt_tokens, 3)

    def ask(self, engine: Engine) -> None:
        """Asks it again, without waiting."""
        loop = asyncio.get_running_loop()
        self.asked = loop.time()
        self._task = asyncio.create_task(self._ask(engine, loop.time))

    def cancel(self) -> None:
        """Gives up a question."""
        if self._task is not None:
            self._task.cancel()

    async def _ask(self, engine: Engine, clock: Callable[[], float]) -> None:
        # A channel that closes cancels the calls on it.
        with suppress(asyncio.CancelledError):
            answer, now = await engine.connection.inspect(), clock()
            before, self.last = self.last, answer
            if answer is not None and before is not None and answer.generated_tokens >= before.generated_tokens:
                drawn = answer.generated_tokens - before.generated_tokens
                self.tokens_per_second = round(drawn / (now - self._answered), 1)
            else:
                self.tokens_per_second = None
            self._answered = now


def _pool_view(pool: engine_pb2.KvPool | None, total: int, used: int) -> KvPoolView:
    """A pool as the engine described it, or of what its load says."""
    if pool is None:
        return KvPoolView(total, used)
    return KvPoolView(pool.total, pool.used, pool.cached, b64encode(pool.cells).decode(), pool.blocks_per_cell)


def _request_view(state: RequestState) -> RequestView:
    generation, usage = state.generation, state.usage
    return RequestView(
        id=generation.request_id[:ID_CHARACTERS],
        model=generation.model_name,
        engine=state.engine_id,
        attempt=state.attempt,
        created=round(generation.created, 3),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _difference(before: FleetSnapshot, now: FleetSnapshot) -> FleetDelta:
    known = {engine.id: engine for engine in before.engines}
    last = before.events[-1].number if before.events else 0
    return FleetDelta(
        time=now.time,
        engines=[engine for engine in now.engines if known.get(engine.id) != engine],
        removed=sorted(known.keys() - {engine.id for engine in now.engines}),
        models=None if now.models == before.models else now.models,
        requests=None if now.requests == before.requests else now.requests,
        omitted_requests=now.omitted_requests,
        events=[event for event in now.events if event.number > last],
        incidents=None if now.incidents == before.incidents else now.incidents,
    )


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"
