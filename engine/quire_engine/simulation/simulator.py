"""``Simulation``: runs the engine's own core, scheduler and pools on virtual time. Requests arrive at the times of a
trace, and the simulated executor says how long steps take. ``SimulationRecorder`` records the times of each request and
the state after each step.
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
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput, count_leaked_blocks
from quire_engine.core.request import Request, SequenceTimings
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.reservation import (
    RESERVATIONS,
    KVSlots,
    Memory,
    ReservingKVCacheManager,
    count_slots,
)
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_engine.simulation.step_policies import STEP_POLICIES, Batching
from quire_engine.simulation.trace import Arrival

NANOSECONDS = 1_000_000_000  # per second
INSPECTION_STEPS = 256  # between two searches for leaked blocks
STUCK_AFTER = 1000  # steps that take no time


class Simulation:
    """One engine for one run, which ``recorder`` records. ``memory`` says how its KV memory is allocated. Reserved
    memory has no prefix cache and no host pool, and with static ``batching`` is held until the end of the batch. The
    disk has ``num_disk_blocks`` blocks and is empty at the start.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        capacity: KVCacheConfig,
        latency: LatencyModel,
        *,
        seed: int = 0,
        prefix_caching: bool = True,
        host_caching: bool = True,
        num_disk_blocks: int = 0,
        memory: Memory = "paged",
        batching: Batching = "continuous",
    ) -> None:
        self.clock = VirtualClock()
        executor = SimulatedExecutor(
            capacity,
            latency,
            seed=seed,
            vocab_size=limits.vocab_size,
            num_stages=limits.num_stages,
            sleep=self._spend,
            clock=lambda: self.clock.seconds,
        )
        if memory == "paged":
            manager = KVCacheManager(
                capacity,
                prefix_caching=prefix_caching,
                host_caching=host_caching,
                disk=latency.empty_disk(num_disk_blocks, capacity.block_bytes),
                clock=self.clock,
            )
        else:
            manager = ReservingKVCacheManager(
                capacity, RESERVATIONS[memory], limits.max_model_len, until_batch_ends=batching == "static"
            )
        self.scheduler = Scheduler(
            limits, manager, rates=latency.rates, clock=self.clock, step_policy=STEP_POLICIES[batching]
        )
        self.recorder = SimulationRecorder(self.scheduler)
        self._core = EngineCore(self.scheduler, executor, self._on_step, lambda: self.clock.seconds)
        self._step_start = 0.0
        self._lora_names: dict[str, int] = {}

    def run(self, arrivals: Iterable[Arrival]) -> "SimulationRecorder":
        """Runs every request to its end. ``arrivals`` must be in the order of their times."""
        start = perf_counter()
        for index, arrival in enumerate(arrivals):
            self._step_until(arrival.time)
            self._add_request(index, arrival)
        self._step_until(float("inf"))
        self.recorder.wall_seconds = perf_counter() - start
        return self.recorder

    def _step_until(self, time: float) -> None:
        """Runs steps while there is work and the clock is before ``time``. Requests that arrive during a step wait for
        its end.
        """
        idle_steps = 0
        while self.scheduler.has_work and self.clock.seconds < time:
            self._step_start = self.clock.seconds
            self._core.step()
            idle_steps = 0 if self.clock.seconds > self._step_start else idle_steps + 1
            assert idle_steps < STUCK_AFTER, "the engine has work and does none"
        if not self.scheduler.has_work:
            self.recorder.check_leaks()
            if time < float("inf"):
                self.clock.advance_to(time)

    def _spend(self, seconds: float) -> None:
        """Lets the time of a step pass, and records the slots of the scheduled step for that time."""
        self.recorder.record_slots(seconds)
        self.clock.sleep(seconds)

    def _add_request(self, index: int, arrival: Arrival) -> None:
        request_id = str(index)
        prompt = arrival.prompt(self.scheduler.config.vocab_size)
        params = SamplingParams(temperature=0, seed=index, max_tokens=arrival.num_output, ignore_eos=True)
        self.recorder.record_arrival(request_id, arrival.time)
        try:
            self.scheduler.add_request(Request(request_id, prompt, params, lora=self._lora(arrival.lora_name)))
        except QuireError as error:
            self.recorder.record_refusal(request_id, error)

    def _lora(self, name: str) -> LoRARequest | None:
        if not name:
            return None
        number = self._lora_names.setdefault(name, 1 + len(self._lora_names))
        return LoRARequest(name, number, "", digest=number.to_bytes(16, "little"))

    def _on_step(self, step: EngineCoreOutputs) -> None:
        self.recorder.record_step(self._step_start, self.clock.seconds, step)


class SimulationRecorder:
    """Records arrivals and steps. ``admissions`` are ranks of requests in the order of their first admission.
    ``token_gaps`` are the seconds between two tokens of one request. ``slot_seconds`` are the KV slots times the
    seconds of the steps. ``leaked_blocks`` is the most that were found at any time. ``wall_seconds`` is the real
    duration of the whole run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._memory = memory = scheduler.kv_cache_manager
        self._ended = memory.ended if isinstance(memory, ReservingKVCacheManager) else []
        self.requests: dict[str, RequestRecord] = {}
        self.samples = StepSamples()
        self.admissions: list[int] = []
        self.token_gaps: array[float] = array("d")
        self.slot_seconds = KVSlots()
        self.leaked_blocks = 0
        self.wall_seconds = 0.0

    def record_arrival(self, request_id: str, time: float) -> None:
        """Records the arrival of a request."""
        self.requests[request_id] = RequestRecord(len(self.requests), time)

    def record_refusal(self, request_id: str, error: QuireError) -> None:
        """Records that the scheduler refused the request."""
        self.requests[request_id].error = error.code.name

    def record_step(self, started: float, ended: float, step: EngineCoreOutputs) -> None:
        """Records a step from ``started`` to ``ended``, in seconds."""
        self._record_admissions(started, step.trace.request_ids)
        for output in step.all_outputs():
            self._record_output(ended, output)
        self._sample(started, ended, step)
        if len(self.samples.time) % INSPECTION_STEPS == 0:
            self.check_leaks()

    def record_slots(self, seconds: float) -> None:
        """Records the use of the slots while a step is computed."""
        self.slot_seconds.add(count_slots(self._memory, self.scheduler.running, self._ended), seconds)

    def check_leaks(self) -> None:
        """Looks for leaked blocks. O(used blocks), so not after each step."""
        tables = [s.block_table for queue in (self.scheduler.running, self.scheduler.swapped) for s in queue]
        tables += self._ended
        self.leaked_blocks = max(self.leaked_blocks, count_leaked_blocks(self._memory, tables))

    def _record_admissions(self, time: float, request_ids: list[str]) -> None:
        for request_id in request_ids:
            record = self.requests[request_id]
            if record.admitted is None:
                record.admitted = time
                self.admissions.append(record.rank)

    def _record_output(self, time: float, output: EngineCoreOutput) -> None:
        record = self.requests[output.request_id]
        if output.token_ids:
            if record.last_token is None:
                record.first_token = time
            else:
                gap = time - record.last_token
                self.token_gaps.append(gap)
                record.longest_gap = max(record.longest_gap, gap)
            record.last_token = time
            record.num_tokens += len(output.token_ids)
        if output.timings is not None:
            record.timings = output.timings
        if output.ends_request:
            record.ended = time
        if output.error is not None:
            record.error = output.error.code.name

    def _sample(self, started: float, ended: float, step: EngineCoreOutputs) -> None:
        load, samples = step.load, self.samples
        samples.time.append(ended)
        samples.duration.append(ended - started)
        samples.running.append(load.running)
        samples.waiting.append(load.waiting + load.swapped)
        samples.used_blocks.append(load.blocks_total - load.blocks_free)
        samples.host_seconds.append(step.trace.schedule + step.trace.update)


@dataclass(slots=True)
class RequestRecord:
    """The times of one request, in seconds since the start; None for events that have not happened. ``rank`` is its
    index in the order of arrivals, ``error`` the code with which it ended, ``longest_gap`` the longest time between two
    tokens, and ``timings`` the engine's own record.
    """

    rank: int
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0
    error: str | None = None
    longest_gap: float = 0.0
    timings: SequenceTimings | None = None

    @property
    def was_preempted(self) -> bool:
        """Whether the request was preempted at least once."""
        return self.timings is not None and self.timings.num_preemptions > 0


@dataclass(slots=True)
class StepSamples:
    """One entry per step: when it ended and its duration, in seconds, and the engine's state at its end.
    ``host_seconds`` is the real time of scheduling and output processing.
    """

    time: "array[float]" = field(default_factory=lambda: array("d"))
    duration: "array[float]" = field(default_factory=lambda: array("d"))
    running: "array[int]" = field(default_factory=lambda: array("q"))
    waiting: "array[int]" = field(default_factory=lambda: array("q"))
    used_blocks: "array[int]" = field(default_factory=lambda: array("q"))
    host_seconds: "array[float]" = field(default_factory=lambda: array("d"))


class VirtualClock:
    """A clock that starts at 0, and advances only in ``sleep`` and ``advance_to``."""

    def __init__(self) -> None:
        self._now = 0

    def __call__(self) -> int:
        """Returns the time in nanoseconds, like ``time.time_ns``."""
        return self._now

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self._now / NANOSECONDS

    def sleep(self, seconds: float) -> None:
        """Advances the clock by ``seconds``."""
        self._now += round(seconds * NANOSECONDS)

    def advance_to(self, seconds: float) -> None:
        """Advances the clock to ``seconds``, unless it is later already."""
        self._now = max(self._now, ceil(seconds * NANOSECONDS))
