"""The engine's loop: commands, plan, run, commit, publish. Knows neither torch nor grpc.

There is one loop for both kinds of executor. One that overlaps steps is given the next plan before the result of the
last one is looked at; the loop that runs step by step is the oracle of what comes out.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter, time_ns

from quire_proto.errors import QuireError, internal
from quire_proto.sampling import FinishReason

from quire_engine.executor.base import Executor, ExecutorError
from quire_engine.executor.flight import InFlightStep
from quire_engine.kv.events import BlockStored, KVCacheEvent
from quire_engine.kv.waste import KVCacheFragmentation
from quire_engine.request import Request
from quire_engine.scheduling.output import EngineCoreOutput, EngineLoad
from quire_engine.scheduling.plan import ModelOutput, SchedulerOutput, StepTimings
from quire_engine.scheduling.scheduler import MAX_DEPTH, Scheduler

log = logging.getLogger(__name__)

WASTE_INTERVAL = 64


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Runs a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Ends a request, or, where ``indexes`` are given, those of its choices."""

    request_id: str
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """Calls ``reply`` when all is published that was done, with the load and everything in the prefix cache."""

    reply: Callable[[EngineLoad, list[BlockStored]], None]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ends the loop when the step under way is done; what is running is left as it is."""


Command = AddRequest | AbortRequest | GetSnapshot | Shutdown


@dataclass(slots=True)
class StepTrace:
    """What a step did and how long it took. ``started`` in nanoseconds since 1970, the durations in seconds, and
    ``elapsed`` are those from the start of its planning to its end.

    ``num_decode`` counts the chunks of one token, which the last of a prompt may be too, and ``num_draws`` the tokens
    that were to be drawn. Where steps overlap, others are planned and ended in the ``pause`` between the launch of a
    step and the wait for what it makes.
    """

    step: int
    started: int
    timings: StepTimings
    schedule: float
    emit: float
    elapsed: float
    num_prefill: int
    num_decode: int
    num_tokens: int
    preempted: int
    swapped_blocks: int
    failed: bool
    request_ids: list[str]
    num_draws: int = 0

    @property
    def duration(self) -> float:
        """Seconds of the step's parts together."""
        return self.schedule + self.timings.swap + self.timings.forward + self.timings.sample + self.emit

    @property
    def pause(self) -> float:
        """Seconds that passed without any of the step's parts; next to none where steps do not overlap."""
        return max(0.0, self.elapsed - self.duration)


@dataclass(slots=True)
class EngineCoreOutputs:
    """All that a step made, for whoever listens. What memory is wasted is looked at now and then only."""

    outputs: list[EngineCoreOutput]
    load: EngineLoad
    kv_events: list[KVCacheEvent]
    trace: StepTrace
    fragmentation: KVCacheFragmentation | None = None


class EngineCore:
    """Runs steps for as long as there is work, on the thread that calls ``run``.

    ``publish`` is called on that thread after each step and must return quickly. ``send`` may be called from any
    thread.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, publish: Callable[[EngineCoreOutputs], None]) -> None:
        self.scheduler = scheduler
        assert executor.depth <= MAX_DEPTH, f"plans can be made for a depth of {MAX_DEPTH} at most"
        self._executor = executor
        self._publish = publish
        self._flights: deque[InFlightStep] = deque()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._refused: list[EngineCoreOutput] = []
        self._stopped = False
        self._waiting_since: float | None = None

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the loop last came round while it has something to do, 0 when it waits for work. An old one
        means that the loop hangs. May be read from any thread.
        """
        since = self._waiting_since
        return 0.0 if since is None else perf_counter() - since

    def send(self, command: Command) -> None:
        """Queues a command for the next gap between two steps."""
        if self._waiting_since is None:
            self._waiting_since = perf_counter()
        self._commands.put(command)

    def run(self) -> None:
        """Steps until ``Shutdown``. Raises what no single request is to blame for: then the engine must end."""
        while not self._stopped:
            self._take_commands()
            if self._has_work:
                self.step()
        self._land_all()

    @property
    def _has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._refused)

    def step(self) -> None:
        """One round of the loop: plans and launches a step, and lands the oldest one under way (takes its result,
        commits, publishes).

        With depth 1 that is the same step. With depth 2 it is the one before, so that this round's work passes while
        the device computes; then the tokens of the step that was launched are drawn, because only now all that they
        depend on is known. If there is nothing to launch, the one under way lands alone.
        """
        launched = self._launch()
        if not launched or len(self._flights) == self._executor.depth:
            self._land()
        if self._flights:
            self._flights[0].sample_tokens()
        while self._flights and self._flights[0].has_failed:
            self._land()

    def _launch(self) -> bool:
        """Whether there is anything to carry out. An empty plan is one to commit only when none is under way."""
        started, begin = time_ns(), perf_counter()
        plan = self.scheduler.schedule()
        schedule = perf_counter() - begin
        if not (plan.is_empty and self._flights):
            self._flights.append(InFlightStep(self._executor, plan, started, begin, schedule))
        return not plan.is_empty

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Takes the result of the oldest step under way, commits and publishes it."""
        flight = self._flights.popleft()
        result, plan = self._take(flight), flight.plan
        ran = perf_counter()
        request_ids = self.scheduler.request_ids(plan)
        outputs = self._refused + self.scheduler.update_from_output(plan, result)
        self._refused = []
        looks = plan.step % WASTE_INTERVAL == 0 or not self.scheduler.has_work
        waste = self.scheduler.get_fragmentation() if looks else None
        ended = perf_counter()
        trace = StepTrace(
            step=plan.step,
            started=flight.started,
            timings=result.timings,
            schedule=flight.schedule,
            emit=ended - ran,
            elapsed=ended - flight.begun,
            num_prefill=sum(len(chunk.token_ids) > 1 for chunk in plan.chunks),
            num_decode=sum(len(chunk.token_ids) == 1 for chunk in plan.chunks),
            num_tokens=plan.num_tokens,
            preempted=plan.num_preempted,
            swapped_blocks=plan.num_swapped_blocks,
            failed=bool(result.errors),
            request_ids=request_ids,
            num_draws=sum(len(chunk.draws) for chunk in plan.chunks),
        )
        self._publish(
            EngineCoreOutputs(
                outputs, self.scheduler.get_load(), self.scheduler.kv_cache_manager.take_events(), trace, waste
            )
        )

    def _take(self, flight: InFlightStep) -> ModelOutput:
        try:
            return flight.get_output()
        except ExecutorError:
            raise
        except Exception:
            plan = flight.plan
            log.exception("step %d failed; running its %d sequences one by one", plan.step, len(plan.chunks))
            for later in self._flights:
                later.give_up()
            return self._run_apart(plan)

    def _run_apart(self, plan: SchedulerOutput) -> ModelOutput:
        """Finds out whose fault it was: only a sequence that fails alone ends with an error."""
        merged = ModelOutput()
        for part in self.scheduler.split_for_retry(plan):
            try:
                result = self._executor.execute_model(part)
            except ExecutorError:
                raise
            except Exception:
                log.exception("sequence %d failed alone", part.chunks[0].sequence_id)
                merged.errors[part.chunks[0].sequence_id] = internal()
            else:
                merged.add(result)
        return merged

    def _take_commands(self) -> None:
        """Carries out what has arrived; waits for something to do when there is nothing else."""
        if not self._has_work:
            self._waiting_since = None
            self._carry_out(self._commands.get())
        self._waiting_since = perf_counter()
        while not (self._stopped or self._commands.empty()):
            self._carry_out(self._commands.get())

    def _carry_out(self, command: Command) -> None:
        match command:
            case AddRequest(request):
                self._add(request)
            case AbortRequest(request_id, indexes):
                self.scheduler.abort_request(request_id, indexes)
            case GetSnapshot(reply):
                self._land_all()  # what is under way has changed the prefix cache already
                reply(self.scheduler.get_load(), self.scheduler.kv_cache_manager.stored_blocks())
            case Shutdown():
                self._stopped = True

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add_request(request)
        except QuireError as error:
            refusal = EngineCoreOutput(
                request.request_id, finish_reason=FinishReason.ERROR, error=error, ends_request=True
            )
            self._refused.append(refusal)
