"""A whole fleet on virtual time. Decides nothing: requests come to routers when they are due, routers send them to
engines, and engines step for as long as they have work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.v1 import engine_pb2
from quire_engine.executor.mixing import splitmix
from quire_engine.kv.events import KVCacheEvent
from quire_engine.kv.waste import count_leaked_blocks
from quire_engine.scheduling.output import EngineCoreOutput
from quire_engine.simulation.clock import NANOSECONDS
from quire_engine.simulation.config import EngineSettings
from quire_proto.sampling import SamplingParams

from quire_router.admission.queue import QueueSettings
from quire_router.admission.turn import QueuedRequest
from quire_router.fleet.ledger import LedgerEntry
from quire_router.fleet.share import Message
from quire_router.generation import GenerationRequest
from quire_router.placement.settings import PlacementSettings
from quire_router.simulation.engine import SimulatedEngine
from quire_router.simulation.line import Line
from quire_router.simulation.news import News
from quire_router.simulation.recorder import Life, Record
from quire_router.simulation.replica import Delays, EngineNews, EngineWords, Replica
from quire_router.simulation.told import cache_changes, describe
from quire_router.simulation.workload import Job

# What happens, in the order in which it does at one moment.
_STEP_ENDS, _PATIENCE_ENDS, _ARRIVAL, _STIR = range(4)

MODEL = "model"


@dataclass(frozen=True, slots=True)
class FleetShape:
    """So many engines and routers, when routers hear of what, how they place, how requests wait for their turn (None:
    nobody waits) and until how much an engine has to compute, and how many tokens each allows its output to have.
    """

    engines: int
    replicas: int
    delays: Delays
    placement: PlacementSettings
    queue: QueueSettings | None
    room_seconds: float
    max_tokens: int


class FleetSimulation:
    """For one run."""

    def __init__(self, fleet: FleetShape, settings: EngineSettings, seed: int) -> None:
        self._fleet = fleet
        self._seed = seed
        self._engines = [SimulatedEngine(settings, splitmix(seed, index)) for index in range(fleet.engines)]
        self._news = [EngineNews(News(), News()) for _ in self._engines]
        shares: News[Message] = News()
        words = EngineWords(describe(settings), self._engines[0].report())
        self._replicas = [
            Replica(
                number,
                fleet.placement,
                words,
                self._news,
                shares=shares,
                delays=fleet.delays,
                room_seconds=fleet.room_seconds,
            )
            for number in range(fleet.replicas)
        ]
        self._lines = [Line(replica, fleet.queue) for replica in self._replicas] if fleet.queue else []
        self._stirs = [-1] * fleet.replicas
        self._heap: list[tuple[int, int, int]] = []
        self._jobs: Sequence[Job] = ()
        self._lives: list[Life] = []
        self._in_flight: dict[int, LedgerEntry] = {}
        self._now = 0

    @property
    def in_flight(self) -> int:
        """Requests that routers count as running somewhere."""
        return sum(replica.in_flight for replica in self._replicas)

    def run(self, jobs: Sequence[Job]) -> Record:
        """Every job to its end."""
        self._jobs = jobs
        self._lives = [self._life(index, job) for index, job in enumerate(jobs)]
        self._heap = [(life.arrived, _ARRIVAL, index) for index, life in enumerate(self._lives)]
        heapify(self._heap)
        happens = {
            _STEP_ENDS: self._end_step,
            _PATIENCE_ENDS: self._lose_patience,
            _ARRIVAL: self._arrive,
            _STIR: self._stir,
        }
        while self._heap:
            self._now, kind, index = heappop(self._heap)
            happens[kind](index)
        return self._record()

    def _life(self, index: int, job: Job) -> Life:
        router = splitmix(self._seed, index) % len(self._replicas)
        return Life(round(job.time * NANOSECONDS), job.tenant, job.num_prompt, router)

    # Requests

    def _arrive(self, index: int) -> None:
        life = self._lives[index]
        self._listen(life.router)
        if self._fleet.queue is None:
            self._dispatch(index)
            return
        job, line = self._jobs[index], self._lines[life.router]
        tokens = life.num_prompt + self._allowed(job)
        for refused in line.add(QueuedRequest(str(index), MODEL, life.tenant, tokens, 8 * life.num_prompt)):
            self._end(int(refused.request_id), "OVERLOADED")
        self._take_turns(life.router)
        if life.placed is None and life.ended is None:
            patience = round(self._fleet.queue.max_seconds * NANOSECONDS)
            heappush(self._heap, (self._now + patience, _PATIENCE_ENDS, index))

    def _take_turns(self, router: int) -> None:
        while (waiting := self._lines[router].next()) is not None:
            self._dispatch(int(waiting.request_id))

    def _listen(self, router: int) -> None:
        if len(self._replicas) > 1:
            for replica in self._replicas:
                replica.publisher.flush(self._now)
        self._replicas[router].listen(self._now)

    def _lose_patience(self, index: int) -> None:
        if self._lines[self._lives[index].router].leave(str(index)):
            self._end(index, "OVERLOADED")

    def _stir(self, router: int) -> None:
        self._listen(router)
        self._take_turns(router)

    def _dispatch(self, index: int) -> None:
        life = self._lives[index]
        replica, generation = self._replicas[life.router], self._generation(index)
        decision = replica.place(generation)
        life.engine, life.placed = int(decision.engine_id), self._now
        self._in_flight[index] = replica.begin(decision, generation)
        self._engines[life.engine].submit(generation, self._jobs[index].num_output)
        if not self._engines[life.engine].is_stepping:
            self._begin_step(life.engine)

    def _generation(self, index: int) -> GenerationRequest:
        job = self._jobs[index]
        return GenerationRequest(
            request_id=str(index),
            model=MODEL,
            prompt_token_ids=job.prompt(),
            params=SamplingParams(temperature=0, seed=0, max_tokens=self._allowed(job)),
            tenant=job.tenant,
            cache_salt=job.tenant.encode(),
            created=0.0,
        )

    def _allowed(self, job: Job) -> int:
        return max(job.num_output, self._fleet.max_tokens)

    def _end(self, index: int, error: str | None) -> None:
        life = self._lives[index]
        life.ended, life.error = self._now, error
        in_flight = self._in_flight.pop(index, None)
        if in_flight is not None:
            self._listen(life.router)
            in_flight.end()

    # Engines

    def _begin_step(self, engine: int) -> None:
        for request_id, error in self._engines[engine].take_in():
            self._end(int(request_id), error.code.name)
        ends = self._engines[engine].begin(self._now)
        if ends is not None:
            heappush(self._heap, (ends, _STEP_ENDS, engine))

    def _end_step(self, engine: int) -> None:
        step, load = self._engines[engine].end()
        for output in step.outputs:
            self._note(output)
        self._tell(engine, load, step.kv_events)
        self._begin_step(engine)

    def _note(self, output: EngineCoreOutput) -> None:
        index = int(output.request_id)
        life = self._lives[index]
        if output.token_ids:
            if life.first_token is None:
                life.first_token, life.cached_tokens = self._now, output.cached_tokens
                self._listen(life.router)
                self._in_flight[index].hear()
            life.last_token = self._now
            life.num_tokens += len(output.token_ids)
        if output.ends_request:
            self._end(index, None if output.error is None else output.error.code.name)

    def _tell(self, engine: int, load: engine_pb2.Load, events: list[KVCacheEvent]) -> None:
        """The engine's news are on their way. Whoever has requests that wait will look whether they bring room."""
        self._news[engine].loads.tell(self._now, load)
        if events:
            self._news[engine].changes.tell(self._now, cache_changes(events))
        for router, line in enumerate(self._lines):
            if line and self._stirs[router] < self._now:
                self._stirs[router] = self._now + self._fleet.delays.load
                heappush(self._heap, (self._stirs[router], _STIR, router))

    def _record(self) -> Record:
        return Record(
            lives=self._lives,
            busy=[engine.busy for engine in self._engines],
            end=max((life.ended or 0 for life in self._lives), default=0),  # not when the last patience would
            preemptions=sum(sum(engine.scheduler.stats.preemptions.values()) for engine in self._engines),
            lost_blocks=sum(count_leaked_blocks(engine.memory, ()) for engine in self._engines),
        )
