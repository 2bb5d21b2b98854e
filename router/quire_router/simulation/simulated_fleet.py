"""All engines and routers on virtual time, as a heap of events: requests come to routers when they are due, routers
send them to engines, and engines step for as long as they have work. The decisions are those of the real placement,
queue and scheduler. Times are in nanoseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby

from quire.v1 import engine_pb2
from quire_engine.core.block_pool import BlockStored, KVCacheEvent, Tier
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput, count_leaked_blocks
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.server.messages import load_to_proto
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_engine.simulation.simulated_executor import SimulatedExecutor, splitmix
from quire_engine.simulation.simulator import NANOSECONDS
from quire_engine.simulation.step_policies import STEP_POLICIES
from quire_proto.errors import QuireError
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import SamplingParams

from quire_router.admission.fair_queue import FairQueue, QueueBounds, QueuedRequest
from quire_router.admission.queue import QueueSettings
from quire_router.admission.tenants import Tenants
from quire_router.core.generation import GenerationRequest
from quire_router.engines.load import LedgerEntry
from quire_router.engines.load_messages import LoadMessage
from quire_router.placement import prefix_index
from quire_router.placement.policies import PlacementSettings
from quire_router.simulation.report import RequestTrace, RunRecord
from quire_router.simulation.simulated_router import (
    CacheChange,
    DelayedFeed,
    Delays,
    EngineFeeds,
    EngineHandshake,
    SimulatedRouter,
)
from quire_router.simulation.workload import Job

_TIERS = {Tier.DEVICE: prefix_index.Tier.DEVICE, Tier.HOST: prefix_index.Tier.HOST}

STUCK_AFTER = 1000

MODEL = "model"

# Kinds of events, in their order at one moment.
_STEP_ENDS, _QUEUE_TIMEOUT, _ARRIVAL, _QUEUE_RETRY = range(4)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """So many engines and routers (``replicas``), the delays between them, how routers place, how requests are queued
    (None: they are not) and with how many seconds of prompts to compute an engine has no capacity, and how many tokens
    each request allows its output to have.
    """

    engines: int
    replicas: int
    delays: Delays
    placement: PlacementSettings
    queue: QueueSettings | None
    room_seconds: float
    max_tokens: int


class FleetSimulation:
    """One run of a fleet. May be run once."""

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
        """Number of requests that routers count as in flight."""
        return sum(replica.in_flight for replica in self._replicas)

    def run(self, jobs: Sequence[Job]) -> RunRecord:
        """Runs every job to its end."""
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

    def _arrive(self, index: int) -> None:
        trace = self._traces[index]
        self._advance_router(trace.router)
        if self._fleet.queue is None:
            self._dispatch(index)
            return
        job, queue = self._jobs[index], self._queues[trace.router]
        tokens = trace.num_prompt + self._allowed(job)
        request = QueuedRequest(
            str(index), MODEL, trace.tenant, tokens, 8 * trace.num_prompt, BEST_EFFORT if job.best_effort else 0
        )
        for refused in queue.add(request):
            self._end(int(refused.request_id), "OVERLOADED")
        self._dispatch_queued(trace.router)
        if trace.placed is None and trace.ended is None and not job.best_effort:
            timeout = round(self._fleet.queue.max_seconds * NANOSECONDS)
            heappush(self._heap, (self._now + timeout, _QUEUE_TIMEOUT, index))

    def _dispatch_queued(self, router: int) -> None:
        while (request := self._queues[router].next()) is not None:
            self._dispatch(int(request.request_id))

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
            priority=BEST_EFFORT if job.best_effort else 0,
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

    def _begin_step(self, engine: int) -> None:
        for request_id, error in self._engines[engine].admit_arrived():
            self._end(int(request_id), error.code.name)
        ends = self._engines[engine].begin(self._now)
        if ends is not None:
            heappush(self._heap, (ends, _STEP_ENDS, engine))

    def _end_step(self, engine: int) -> None:
        step, load = self._engines[engine].end()
        for output in step.all_outputs():
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
        """Publishes the load and cache events of a step. Routers with a queue retry it when the load arrives."""
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
            leaked_blocks=sum(count_leaked_blocks(engine.memory, ()) for engine in self._engines),
        )


class SimulatedQueue:
    """The queue of one router: the fair queue of a real one, in virtual time. ``AdmissionQueue`` admits requests in
    tasks, this one when ``next`` is called.
    """

    def __init__(self, replica: SimulatedRouter, settings: QueueSettings) -> None:
        self._replica = replica
        self._queue = FairQueue(Tenants(), settings.bounds)
        self._best_effort = FairQueue(Tenants(), QueueBounds(1 << 30, 1 << 62))

    def __len__(self) -> int:
        return len(self._queue) + len(self._best_effort)

    def add(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Adds a request. Returns those that are dropped, itself too if it is refused."""
        try:
            return (self._best_effort if request.best_effort else self._queue).add(request)
        except QuireError:
            return [request]

    def next(self) -> QueuedRequest | None:
        """Removes and returns the next request, None if none can be admitted."""
        replica, now = self._replica, self._replica.seconds
        if not self._queue:
            has_one = len(self._best_effort) > 0 and replica.has_best_effort_capacity
            return self._best_effort.pop(now) if has_one else None
        is_ahead = self._queue.is_ahead(self._queue.peek().tenant, now)
        return self._queue.pop(now) if (replica.has_spare_capacity if is_ahead else replica.has_capacity) else None

    def remove(self, request_id: str) -> bool:
        """Removes a request. Returns False if it does not wait."""
        return self._queue.remove(request_id) or self._best_effort.remove(request_id)


class SimulatedEngine:
    """One engine: the engine's own core, scheduler and pools, with the simulated executor. What a step makes is
    computed when it begins and is published when it ends: nothing reaches the engine between the two. ``busy`` are the
    nanoseconds in which it stepped, but for those in which it had no requests and waited for its disk.
    """

    def __init__(self, settings: SimulatedEngineConfig, seed: int) -> None:
        self.busy = 0
        limits = settings.scheduler_config(settings.scheduling_policy)
        executor = SimulatedExecutor(
            settings.kv_cache_config,
            settings.latency,
            seed=seed,
            vocab_size=limits.vocab_size,
            sleep=self._advance_clock,
            clock=self._seconds,
        )
        self.memory = KVCacheManager(
            settings.kv_cache_config,
            prefix_caching=settings.enable_prefix_caching,
            host_caching=settings.enable_host_caching,
            disk=settings.latency.empty_disk(settings.num_disk_blocks, settings.kv_cache_config.block_bytes),
            clock=self._time,
        )
        self.scheduler = Scheduler(
            limits,
            self.memory,
            rates=settings.latency.rates,
            clock=self._time,
            step_policy=STEP_POLICIES[settings.batching],
        )
        self._now = 0
        self._core = EngineCore(self.scheduler, executor, self._receive, self._seconds)
        self._idle_steps = 0
        self._inbox: list[Request] = []
        self._step: EngineCoreOutputs | None = None

    @property
    def is_stepping(self) -> bool:
        """Whether a step has started and not ended."""
        return self._step is not None

    def report(self) -> engine_pb2.Load:
        """Returns the load that it reports now."""
        return load_to_proto(self.scheduler.get_load())

    def submit(self, generation: GenerationRequest, num_output: int) -> None:
        """Adds a request that will draw so many tokens to the inbox; ``admit_arrived`` takes it when the next step
        begins.
        """
        params = replace(generation.params, max_tokens=num_output, ignore_eos=True)
        tokens, salt = generation.prompt_token_ids, generation.cache_salt
        request = Request(generation.request_id, tokens, params, cache_salt=salt, priority=generation.priority)
        self._inbox.append(request)

    def admit_arrived(self) -> list[tuple[str, QuireError]]:
        """Adds what is in the inbox to the scheduler. Returns the requests that it rejects."""
        refused: list[tuple[str, QuireError]] = []
        for request in self._inbox:
            try:
                self.scheduler.add_request(request)
            except QuireError as error:
                refused.append((request.request_id, error))
        self._inbox.clear()
        return refused

    def begin(self, now: int) -> int | None:
        """Begins a step. Returns when it ends, in nanoseconds, None if there is no work."""
        if not self.scheduler.has_work:
            return None
        self._now, has_requests = now, self.scheduler.has_requests
        self._core.step()
        self.busy += self._now - now if has_requests else 0
        self._idle_steps = 0 if self._now > now else self._idle_steps + 1
        assert self._idle_steps < STUCK_AFTER, "the engine has work and does none"
        return self._now

    def end(self) -> tuple[EngineCoreOutputs, engine_pb2.Load]:
        """Ends the step. Returns its outputs and the load after it."""
        step, self._step = self._step, None
        assert step is not None, "no step has started"
        return step, load_to_proto(step.load)

    def _receive(self, step: EngineCoreOutputs) -> None:
        self._step = step

    def _time(self) -> int:
        return self._now

    def _seconds(self) -> float:
        return self._now / NANOSECONDS

    def _advance_clock(self, seconds: float) -> None:
        self._now += round(seconds * NANOSECONDS)


def describe(settings: SimulatedEngineConfig) -> engine_pb2.DescribeResponse:
    """Returns the description that such an engine sends."""
    capacity = settings.kv_cache_config
    return engine_pb2.DescribeResponse(
        block_size=capacity.block_size,
        blocks_total=capacity.device_blocks - 1,
        host_blocks_total=capacity.host_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.enable_prefix_caching,
        unbounded_steps=settings.max_step_seconds == 0,
        best_effort=True,
    )


def cache_changes(events: Sequence[KVCacheEvent]) -> list[CacheChange]:
    """Returns the events in order, with consecutive events of one kind and tier together."""
    groups = groupby(events, key=lambda event: (isinstance(event, BlockStored), event.tier))
    return [CacheChange(stored, _TIERS[where], [e.block_hash for e in group]) for (stored, where), group in groups]
