"""A router's inner rooms, with scripted engines behind real streams."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from quire.v1 import engine_pb2
from quire_proto.sampling import FinishReason
from quire_router.admission.queue import AdmissionQueue, QueueSettings
from quire_router.core.generation import Delta, GenerationRequest
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.journal.base import Journal
from quire_router.journal.memory import MemoryJournal
from quire_router.placement.engine_table import EngineTable, Rows
from quire_router.placement.placer import PlacementDecision
from quire_router.placement.prefix_index import HashesByNamespace
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.runner import RequestRunner

from tests.support.byte_tokenizer import TOKENIZER, tokens
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

QUICK = {"backoff": 0.01, "max_backoff": 0.05, "slow_client_timeout": 0.05}


class FirstIdle:
    """Places a request where the fewest are in flight, on the earliest engine among equals: tests know where."""

    def __init__(self, table: EngineTable) -> None:
        self._table = table

    def compute_hashes(self, generation: GenerationRequest, rows: Rows, hashes: HashesByNamespace) -> Iterator[None]:
        return iter(())

    def place(
        self, generation: GenerationRequest, rows: Rows, hashes: HashesByNamespace, *, explained: bool = False
    ) -> PlacementDecision | None:
        row = min(rows.tolist(), key=lambda row: self._table.requests[row], default=None)
        return None if row is None else PlacementDecision(str(self._table.ids[row]), row, "first_idle", 0)

    def record_dispatch(self, decision: PlacementDecision, generation: GenerationRequest) -> None:
        pass


@dataclass
class RunnerHarness:
    """A router's inner rooms and its engines."""

    lifecycle: RequestRunner
    fleet: EnginePool
    journal: Journal
    engines: list[ScriptedEngine]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def ready(self, count: int) -> None:
        await until(lambda: self.fleet.ready("m") == count)

    async def heard(self) -> None:
        """Waits until the router has heard all that the first engine said, and its readers have read it."""
        (link,) = [each.connection for each in self.fleet.engines() if each.id == self.engine.address]
        await until(lambda: link.session.sequence == self.engine.sequence)
        for _ in range(10):
            await asyncio.sleep(0)

    async def delivered(self, *texts: str) -> None:
        """Waits until the record tells so much of each choice."""
        async with asyncio.timeout(10):
            while await self._recorded() != list(map(tokens, texts)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)

    async def left_nothing(self, request_id: str, reason: FinishReason, *delivered: str) -> None:
        """Nothing is in flight anywhere, and the record tells what the client got."""
        assert self.lifecycle.in_flight == 0
        for _, row in self.fleet.table:
            assert self.fleet.table.requests[row] == self.fleet.table.decoding[row] == 0
        record = await self.journal.read(request_id)
        assert record is not None
        assert record.finish_reason is reason
        assert [choice.token_ids for choice in record.choices] == list(map(tokens, delivered))

    async def _recorded(self) -> list[list[int]]:
        record = await self.journal.read("r")
        return [] if record is None else [choice.token_ids for choice in record.choices]


@asynccontextmanager
async def open_runner(
    count: int = 1,
    *,
    ready: int | None = None,
    grace: float = 30,
    link: Mapping[str, float] = QUICK,
    hold_timeout: float = 10.0,
    journal: Journal | None = None,
    descriptions: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> AsyncIterator[RunnerHarness]:
    engines = [ScriptedEngine(**(descriptions[number] if descriptions else {})) for number in range(count)]
    for engine in engines:
        await engine.start()
        if ready == 0:
            await engine.stop()
    settings = ConnectionSettings(grace=grace, **link)
    fleet = EnginePool(StaticDiscovery([engine.address for engine in engines]), ["m"], settings)
    await fleet.start()
    queue = AdmissionQueue(["m"], fleet, settings=QueueSettings(hold_timeout=hold_timeout))
    fleet.on_capacity = queue.notify_capacity
    placer = FirstIdle(fleet.table)
    routing = Dispatcher(fleet, placer, queue, policy="first_idle", hold_timeout=hold_timeout)
    journal = journal or MemoryJournal()
    place = RunnerHarness(
        RequestRunner(fleet, placer, routing, journal, {"m": TOKENIZER}, **options), fleet, journal, engines
    )
    try:
        await place.ready(count if ready is None else ready)
        yield place
    finally:
        await fleet.close()
        for engine in engines:
            await engine.stop()


async def collect(answer: AsyncGenerator[Delta, None]) -> list[Delta]:
    async with asyncio.timeout(10):
        return [delta async for delta in answer]


def delta_text(deltas: list[Delta], index: int = 0) -> str:
    """The text of one choice."""
    return "".join(delta.text for delta in deltas if delta.index == index)


async def started(
    place: RunnerHarness, answer: AsyncGenerator[Delta, None]
) -> tuple[asyncio.Task[list[Delta]], engine_pb2.Submit]:
    """The answer being read, and the Submit that it led to."""
    task = asyncio.create_task(collect(answer))
    return task, await place.engine.submit()
