"""``Simulation``: the engine's own core, scheduler and pools on virtual time. Decides nothing itself: it lets requests
arrive when they are due, and time pass as the simulated executor says.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter

from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput, count_leaked_blocks, measure_fragmentation
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_engine.simulation.trace import Arrival

# ``VirtualClock``: time that passes only in ``sleep`` and ``advance_to``.


NANOSECONDS = 1_000_000_000


class VirtualClock:
    """Starts at 0."""

    def __init__(self) -> None:
        self._now = 0

    def __call__(self) -> int:
        """The time in nanoseconds, as from ``time.time_ns``."""
        return self._now

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self._now / NANOSECONDS

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self._now += round(seconds * NANOSECONDS)

    def advance_to(self, seconds: float) -> None:
        """Lets time pass until ``seconds``, if that has not come yet."""
        self._now = max(self._now, ceil(seconds * NANOSECONDS))


# What happened in a simulation: the times of each request, and the state after each step.


INSPECTION_STEPS = 256


@dataclass(slots=True)
class RequestRecord:
    """The times of one request, in seconds since the start; None for what never came. ``rank`` is its place in the
    order of arrivals, and ``error`` the code of a typed end.
    """

    rank: int
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class StepSamples:
    """One entry a step: when it ended, how long it took (seconds), and what was there then."""

    time: "array[float]" = field(default_factory=lambda: array("d"))
    duration: "array[float]" = field(default_factory=lambda: array("d"))
    running: "array[int]" = field(default_factory=lambda: array("q"))
    waiting: "array[int]" = field(default_factory=lambda: array("q"))
    used_blocks: "array[int]" = field(default_factory=lambda: array("q"))
    held_slots: "array[int]" = field(default_factory=lambda: array("q"))
    empty_slots: "array[int]" = field(default_factory=lambda: array("q"))
    host_seconds: "array[float]" = field(default_factory=lambda: array("d"))


class SimulationRecorder:
    """Hears of arrivals and steps. ``admissions`` are ranks of requests in the order of their first admission,
    ``gaps`` the seconds between two tokens of one request, ``unreachable_blocks`` the most that were ever found, and
    ``wall_seconds`` what the whole run took in real time.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, RequestRecord] = {}
        self.samples = StepSamples()
        self.admissions: list[int] = []
        self.token_gaps: array[float] = array("d")
        self.unreachable_blocks = 0
        self.wall_seconds = 0.0

    def arrive(self, request_id: str, time: float) -> None:
        """A request came, whatever becomes of it."""
        self.requests[request_id] = RequestRecord(len(self.requests), time)

    def refuse(self, request_id: str, error: QuireError) -> None:
        """The engine did not take it."""
        self.requests[request_id].error = error.code.name

    def observe(self, began: float, ended: float, step: EngineCoreOutputs) -> None:
        """A step was made, from ``began`` to ``ended``."""
        self._record_admissions(began, step.trace.request_ids)
        for output in step.outputs:
            self._record_output(ended, output)
        self._sample(began, ended, step)
        if len(self.samples.time) % INSPECTION_STEPS == 0:
            self.inspect()

    def inspect(self) -> None:
        """Looks for blocks that were lost. O(blocks held), so not after each step."""
        tables = [s.table for queue in (self.scheduler.running, self.scheduler.swapped) for s in queue]
        self.unreachable_blocks = max(
            self.unreachable_blocks, count_leaked_blocks(self.scheduler.kv_cache_manager, tables)
        )

    def _record_admissions(self, time: float, request_ids: list[str]) -> None:
        for request_id in request_ids:
            life = self.requests[request_id]
            if life.admitted is None:
                life.admitted = time
                self.admissions.append(life.rank)

    def _record_output(self, time: float, output: EngineCoreOutput) -> None:
        life = self.requests[output.request_id]
        if output.token_ids:
            if life.last_token is None:
                life.first_token = time
            else:
                self.token_gaps.append(time - life.last_token)
            life.last_token = time
            life.num_tokens += len(output.token_ids)
        if output.ends_request:
            life.ended = time
        if output.error is not None:
            life.error = output.error.code.name

    def _sample(self, began: float, ended: float, step: EngineCoreOutputs) -> None:
        load, samples = step.load, self.samples
        waste = measure_fragmentation(
            self.scheduler.kv_cache_manager, ((s.table, s.num_computed_tokens) for s in self.scheduler.running)
        )
        samples.time.append(ended)
        samples.duration.append(ended - began)
        samples.running.append(load.running)
        samples.waiting.append(load.waiting + load.swapped)
        samples.used_blocks.append(load.blocks_total - load.blocks_free)
        samples.held_slots.append(waste.used_slots)
        samples.empty_slots.append(waste.empty_slots)
        samples.host_seconds.append(step.trace.schedule + step.trace.emit)


STUCK_AFTER = 1000


class Simulation:
    """One engine, for one run. ``recorder`` has seen all of it afterwards."""

    def __init__(
        self,
        limits: SchedulerConfig,
        capacity: KVCacheConfig,
        latency: LatencyModel,
        *,
        seed: int = 0,
        prefix_caching: bool = True,
        host_caching: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        executor = SimulatedExecutor(capacity, latency, seed=seed, vocab_size=limits.vocab_size, sleep=self.clock.sleep)
        memory = KVCacheManager(capacity, prefix_caching=prefix_caching, host_caching=host_caching)
        self.scheduler = Scheduler(limits, memory, rates=latency.rates, clock=self.clock)
        self.recorder = SimulationRecorder(self.scheduler)
        self._core = EngineCore(self.scheduler, executor, self._receive)
        self._step_began = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> SimulationRecorder:
        """Every request to its end; ``arrivals`` are in the order of their times."""
        begin = perf_counter()
        for index, arrival in enumerate(arrivals):
            self._work_until(arrival.time)
            self._arrive(index, arrival)
        self._work_until(float("inf"))
        self.recorder.wall_seconds = perf_counter() - begin
        return self.recorder

    def _work_until(self, time: float) -> None:
        """Steps while there is work and ``time`` has not come. What arrives during a step waits for its end."""
        idle_steps = 0
        while self.scheduler.has_work and self.clock.seconds < time:
            self._step_began = self.clock.seconds
            self._core.step()
            idle_steps = 0 if self.clock.seconds > self._step_began else idle_steps + 1
            assert idle_steps < STUCK_AFTER, "the engine has work and does none"
        if not self.scheduler.has_work:
            self.recorder.inspect()
            if time < float("inf"):
                self.clock.advance_to(time)

    def _arrive(self, index: int, arrival: Arrival) -> None:
        request_id = str(index)
        prompt = arrival.prompt(self.scheduler.config.vocab_size)
        params = SamplingParams(temperature=0, seed=index, max_tokens=arrival.num_output, ignore_eos=True)
        self.recorder.arrive(request_id, arrival.time)
        try:
            self.scheduler.add_request(Request(request_id, prompt, params))
        except QuireError as error:
            self.recorder.refuse(request_id, error)

    def _receive(self, step: EngineCoreOutputs) -> None:
        self.recorder.observe(self._step_began, self.clock.seconds, step)
