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
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_proto.sampling import SamplingParams

from quire_router.admission.queue import QueueSettings
from quire_router.admission.turn import QueuedRequest
from quire_router.fleet.ledger import LedgerEntry
from quire_router.fleet.share import LoadMessage
from quire_router.generation import GenerationRequest
from quire_router.placement.settings import PlacementSettings
from quire_router.simulation.engine import SimulatedEngine
from quire_router.simulation.line import SimulatedQueue
from quire_router.simulation.news import DelayedFeed
from quire_router.simulation.recorder import RequestTrace, RunRecord
from quire_router.simulation.replica import Delays, EngineFeeds, EngineHandshake, SimulatedRouter
from quire_router.simulation.told import cache_changes, describe
from quire_router.simulation.workload import Job

# What happens, in the order in which it does at one moment.
_STEP_ENDS, _QUEUE_TIMEOUT, _ARRIVAL, _QUEUE_RETRY = range(4)

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

    def __init__(self, fleet: FleetShape, settings: SimulatedEngineConfig, seed: int) -> None:
        self._fleet = fleet
        self._seed = seed
        self._engines = [SimulatedEngine(settings, splitmix(seed, index)) for index in range(fleet.engines)]
        self._feeds = [EngineFeeds(DelayedFeed(), DelayedFeed()) for _ in self._engines]
        shares: DelayedFeed[LoadMessage] = DelayedFeed()
        handshake = EngineHandshake(describe(settings), self._engines[0].report())
        self._replicas = [
            SimulatedRouter(
                number,
                fleet.placement,
                handshake,
                self._feeds,
                shares=shares,
                delays=fleet.delays,
                room_seconds=fleet.room_seconds,
            )
            for number in range(fleet.replicas)
        ]
        self._queues = [SimulatedQueue(replica, fleet.queue) for replica in self._replicas] if fleet.queue else []
        self._queue_retries = [-1] * fleet.replicas
        self._heap: list[tuple[int, int, int]] = []
        self._jobs: Sequence[Job] = ()
        self._traces: list[RequestTrace] = []
        self._in_flight: dict[int, LedgerEntry] = {}
        self._now = 0

    @property
    def in_flight(self) -> int:
        """Requests that routers count as running somewhere."""
        return sum(replica.in_flight for replica in self._replicas)

    def run(self, jobs: Sequence[Job]) -> RunRecord:
        """Every job to its end."""
        self._jobs = jobs
        self._traces = [self._new_trace(index, job) for index, job in enumerate(jobs)]
        self._heap = [(trace.arrived, _ARRIVAL, index) for index, trace in enumerate(self._traces)]
        heapify(self._heap)
        handlers = {
            _STEP_ENDS: self._end_step,
            _QUEUE_TIMEOUT: self._time_out_in_queue,
            _ARRIVAL: self._arrive,
            _QUEUE_RETRY: self._retry_queue,
        }
        while self._heap:
            self._now, kind, index = heappop(self._heap)
            handlers[kind](index)
        return self._record()

    def _new_trace(self, index: int, job: Job) -> RequestTrace:
        router = splitmix(self._seed, index) % len(self._replicas)
        return RequestTrace(round(job.time * NANOSECONDS), job.tenant, job.num_prompt, router)

    # Requests

    def _arrive(self, index: int) -> None:
        trace = self._traces[index]
        self._advance_router(trace.router)
        if self._fleet.queue is None:
            self._dispatch(index)
            return
        job, queue = self._jobs[index], self._queues[trace.router]
        tokens = trace.num_prompt + self._allowed(job)
        for refused in queue.add(QueuedRequest(str(index), MODEL, trace.tenant, tokens, 8 * trace.num_prompt)):
            self._end(int(refused.request_id), "OVERLOADED")
        self._dispatch_queued(trace.router)
        if trace.placed is None and trace.ended is None:
            timeout = round(self._fleet.queue.max_seconds * NANOSECONDS)
            heappush(self._heap, (self._now + timeout, _QUEUE_TIMEOUT, index))

    def _dispatch_queued(self, router: int) -> None:
        while (waiting := self._queues[router].next()) is not None:
            self._dispatch(int(waiting.request_id))

    def _advance_router(self, router: int) -> None:
        if len(self._replicas) > 1:
            for replica in self._replicas:
                replica.publisher.flush(self._now)
        self._replicas[router].advance(self._now)

    def _time_out_in_queue(self, index: int) -> None:
        if self._queues[self._traces[index].router].remove(str(index)):
            self._end(index, "OVERLOADED")

    def _retry_queue(self, router: int) -> None:
        self._advance_router(router)
        self._dispatch_queued(router)

    def _dispatch(self, index: int) -> None:
        trace = self._traces[index]
        replica, generation = self._replicas[trace.router], self._generation(index)
        decision = replica.place(generation)
        trace.engine, trace.placed = int(decision.engine_id), self._now
        self._in_flight[index] = replica.begin(decision, generation)
        self._engines[trace.engine].submit(generation, self._jobs[index].num_output)
        if not self._engines[trace.engine].is_stepping:
            self._begin_step(trace.engine)

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
        trace = self._traces[index]
        trace.ended, trace.error = self._now, error
        in_flight = self._in_flight.pop(index, None)
        if in_flight is not None:
            self._advance_router(trace.router)
            in_flight.end()

    # Engines

    def _begin_step(self, engine: int) -> None:
        for request_id, error in self._engines[engine].admit_arrived():
            self._end(int(request_id), error.code.name)
        ends = self._engines[engine].begin(self._now)
        if ends is not None:
            heappush(self._heap, (ends, _STEP_ENDS, engine))

    def _end_step(self, engine: int) -> None:
        step, load = self._engines[engine].end()
        for output in step.outputs:
            self._record_output(output)
        self._publish_step(engine, load, step.kv_events)
        self._begin_step(engine)

    def _record_output(self, output: EngineCoreOutput) -> None:
        index = int(output.request_id)
        trace = self._traces[index]
        if output.token_ids:
            if trace.first_token is None:
                trace.first_token, trace.cached_tokens = self._now, output.cached_tokens
                self._advance_router(trace.router)
                self._in_flight[index].on_first_output()
            trace.last_token = self._now
            trace.num_tokens += len(output.token_ids)
        if output.ends_request:
            self._end(index, None if output.error is None else output.error.code.name)

    def _publish_step(self, engine: int, load: engine_pb2.Load, events: list[KVCacheEvent]) -> None:
        """The engine's news are on their way. Whoever has requests that wait will look whether they bring room."""
        self._feeds[engine].loads.publish(self._now, load)
        if events:
            self._feeds[engine].changes.publish(self._now, cache_changes(events))
        for router, queue in enumerate(self._queues):
            if queue and self._queue_retries[router] < self._now:
                self._queue_retries[router] = self._now + self._fleet.delays.load
                heappush(self._heap, (self._queue_retries[router], _QUEUE_RETRY, router))

    def _record(self) -> RunRecord:
        return RunRecord(
            traces=self._traces,
            busy=[engine.busy for engine in self._engines],
            end=max((trace.ended or 0 for trace in self._traces), default=0),  # not when the last timeout would be
            preemptions=sum(sum(engine.scheduler.stats.preemptions.values()) for engine in self._engines),
            lost_blocks=sum(count_leaked_blocks(engine.memory, ()) for engine in self._engines),
        )
