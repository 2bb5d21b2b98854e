"""What happened in a simulation: the times of each request, and the state after each step."""

from array import array
from dataclasses import dataclass, field

from quire_proto.errors import QuireError

from quire_engine.core import EngineCoreOutputs
from quire_engine.kv.waste import count_leaked_blocks, measure_fragmentation
from quire_engine.scheduling.output import EngineCoreOutput
from quire_engine.scheduling.scheduler import Scheduler

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
