"""The engine's loop: handle commands, schedule, execute, update, publish.

Both kinds of executor use the same loop. An executor that overlaps steps gets the next scheduler output before the
model output of the last step is read. The synchronous loop is the reference that tests compare it with.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter, time_ns
from typing import cast

from quire_proto.errors import ErrorCode, QuireError, internal

from quire_engine.core.absence import TimeAway
from quire_engine.core.block_pool import BlockStored, KVCacheEvent
from quire_engine.core.executor import (
    AsyncExecutor,
    AsyncModelOutput,
    Executor,
    ExecutorError,
    Sleeper,
    SleepError,
)
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad, KVCacheFragmentation, TokenColumns
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput, StepTimings
from quire_engine.core.step_recording import StepRecorder
from quire_engine.core.step_time_model import StepWork

log = logging.getLogger(__name__)

FRAGMENTATION_INTERVAL = 64
CANNOT_SLEEP = "This engine does not sleep: one that shares experts with other engines, or streams weights, cannot."
DISK_WAIT_SECONDS = 0.01
"""How long a round without a step waits for the disk, and so the most that a new request waits for the round."""

MOVE_SECONDS = 300.0  # sleeping or waking this long is not a hang: a slow disk writes 16 GiB in 90 seconds


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Runs a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Aborts a request, or only the choices at ``indexes`` if given."""

    request_id: str
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """Calls ``reply`` with the load and all blocks in the prefix cache, after everything done so far was published."""

    reply: Callable[[EngineLoad, list[BlockStored]], None]


@dataclass(frozen=True, slots=True)
class GetBlockStates:
    """Calls ``reply`` with the states of the device's and the host's blocks (see ``BlockPool.block_states``)."""

    reply: Callable[[bytes, bytes], None]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ends the loop when the steps in flight are done. Running requests are left as they are."""


@dataclass(frozen=True, slots=True)
class RemoveLoRA:
    """Frees the memory of an adapter that no request uses any more."""

    lora_id: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Puts the engine to sleep unless it has work. Calls ``reply`` with None, or with the reason why it does not
    sleep.
    """

    reply: Callable[[QuireError | None], None]


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Wakes the engine up, as a request does. Calls ``reply`` with None, or with the reason why it stays asleep."""

    reply: Callable[[QuireError | None], None]


Command = AddRequest | AbortRequest | GetSnapshot | GetBlockStates | Shutdown | RemoveLoRA | Sleep | WakeUp


@dataclass(slots=True)
class StepTrace:
    """What a step did and how long it took. ``started`` is in nanoseconds since 1970, durations are in seconds.
    ``elapsed`` runs from the start of the step's scheduling to its end. Metrics and spans call the ``update`` of the
    scheduler ``emit``.

    ``num_decode`` counts the chunks of one token, with or without drafts; the last chunk of a prompt may be one of
    them. ``num_tokens`` excludes drafts. ``num_draws`` counts the tokens to sample, including those after drafts. If
    steps overlap, other steps are scheduled and finished during the ``pause`` between a step's launch and the wait for
    its output. ``seconds`` is the step's duration on the core's clock; overlapping steps count from the end of the step
    before. ``max_seconds`` is the planned time limit; 0 without one.
    """

    step: int
    started: int
    timings: StepTimings
    schedule: float
    update: float
    elapsed: float
    num_prefill: int
    num_decode: int
    num_tokens: int
    preempted: int
    swapped_blocks: int
    failed: bool
    request_ids: list[str]
    num_draws: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0

    @property
    def duration(self) -> float:
        """The sum of the step's parts, in seconds."""
        return self.schedule + self.timings.swap + self.timings.forward + self.timings.sample + self.update

    @property
    def pause(self) -> float:
        """Seconds in which none of the step's parts ran; almost 0 if steps do not overlap."""
        return max(0.0, self.elapsed - self.duration)


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything that a step made: ``tokens`` of choices that go on, and all other ``outputs``. ``fragmentation`` is
    measured in every ``FRAGMENTATION_INTERVAL``-th step and in the last step before the engine is idle; otherwise it is
    None. ``times_away`` are the times of preempted sequences that came back or ended since the last step.
    """

    outputs: list[EngineCoreOutput]
    load: EngineLoad
    kv_events: list[KVCacheEvent]
    trace: StepTrace
    fragmentation: KVCacheFragmentation | None = None
    times_away: list[TimeAway] = field(default_factory=list)
    tokens: TokenColumns = field(default_factory=TokenColumns)

    def all_outputs(self) -> list[EngineCoreOutput]:
        """Returns ``tokens`` and ``outputs`` in one form. Slow: not for the hot path."""
        return [*self.tokens.outputs(), *self.outputs]


class Heartbeat:
    """When the loop last made progress. Thread-safe."""

    def __init__(self) -> None:
        self._busy_since: float | None = None
        self._allowance = 0.0  # seconds without progress that do not count as a hang

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last round of the loop while it has work; 0 if it waits for work. A large value means that
        the loop hangs.
        """
        since = self._busy_since
        return 0.0 if since is None else max(0.0, perf_counter() - since - self._allowance)

    def begin_work(self) -> None:
        """Notes that there is work, unless the loop has some already."""
        if self._busy_since is None:
            self._busy_since = perf_counter()

    def beat(self) -> None:
        """Notes that the loop makes progress."""
        self._busy_since = perf_counter()

    def stop(self) -> None:
        """Notes that the loop waits for work."""
        self._busy_since = None

    @contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Within this context, the loop may make no progress for ``seconds``."""
        self._allowance = seconds
        try:
            yield
        finally:
            self.beat()
            self._allowance = 0.0


class EngineCore:
    """Runs steps while there is work, on the thread that calls ``run``.

    ``publish`` is called on that thread after each step and must return quickly. ``send`` is thread-safe. The
    scheduler's ``step_times`` learn from each step, whose duration is read from ``clock``, in seconds.

    ``recorder`` gets each completed step, and is closed when the loop ends.

    While ``is_sleeping``, which may be read on any thread, ``sleeper`` has freed memory; a request wakes the engine up
    first. Without a ``sleeper`` the engine does not sleep.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[EngineCoreOutputs], None],
        clock: Callable[[], float] = perf_counter,
        *,
        sleeper: Sleeper | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        if executor.depth > 1:
            scheduler.disable_speculation()
        assert executor.depth <= scheduler.max_depth, f"the executor's depth is more than {scheduler.max_depth}"
        self._executor = executor
        self._sleeper = sleeper
        self._recorder = recorder
        self._publish = publish
        self._clock = clock
        self._ended = clock()
        self._in_flight: deque[LaunchedStep] = deque()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._stopped = False
        self._heartbeat = Heartbeat()
        self.is_sleeping = False

    @property
    def seconds_since_progress(self) -> float:
        """See ``Heartbeat``. Thread-safe."""
        return self._heartbeat.seconds_since_progress

    def send(self, command: Command) -> None:
        """Queues a command, to be handled between two steps. Thread-safe."""
        self._heartbeat.begin_work()
        self._commands.put(command)

    def run(self) -> None:
        """Runs steps until ``Shutdown``. Raises errors that no single request caused: then the engine must end."""
        try:
            self._run()
        finally:
            if self._recorder is not None:
                self._recorder.close()

    def _run(self) -> None:
        while not self._stopped:
            self._process_commands()
            if self.scheduler.has_work:
                self.step()
        self._finish_all_steps()

    def step(self) -> None:
        """Runs one round of the loop: schedules and launches a step, then finishes the oldest one in flight (gets its
        model output, updates the scheduler, publishes).

        Depth 1: launch step N, sample it, finish it. Depth 2: launch step N, finish step N-1 while the device computes
        N, then sample N, whose grammars and penalties need the tokens of N-1. If there is nothing to launch, the step
        in flight is finished alone. Pipeline of P stages, in which no step needs the tokens of the steps in flight:
        launch step N, then sample and finish step N-P+1, which the last stage has computed.
        """
        start_clock, start_ns, start_perf = self._clock(), time_ns(), perf_counter()
        scheduler_output = self.scheduler.schedule()
        schedule = perf_counter() - start_perf
        is_empty = scheduler_output.is_empty
        if self.scheduler.kv_cache_manager.tiers.asynchronous:
            self._take_transfers(wait=is_empty and not self._in_flight)
        if not (is_empty and self._in_flight):  # an empty step is finished too, but only if none is in flight
            step = LaunchedStep(
                self._executor,
                scheduler_output,
                start_ns=start_ns,
                start_perf=start_perf,
                start_clock=start_clock,
                schedule=schedule,
            )
            self._in_flight.append(step)
        if is_empty or len(self._in_flight) == self._executor.depth:
            self._finish_step()
        if self._in_flight and self.scheduler.config.num_stages == 1:
            self._in_flight[0].sample_tokens()
        while self._in_flight and self._in_flight[-1].failure is not None:  # launch nothing after a failure
            self._finish_step()

    def _take_transfers(self, *, wait: bool) -> None:
        """Processes transfers that have ended. Waits a little if there is nothing else to do."""
        if self.scheduler.kv_cache_manager.tiers.has_transfers:
            waits = wait and self._commands.empty()
            self.scheduler.finish_transfers(self._wait_for_transfers() if waits else self._executor.take_transfers(0.0))

    def _wait_for_transfers(self) -> Sequence[TransferResult]:
        return self._executor.take_transfers(DISK_WAIT_SECONDS)

    def _finish_all_steps(self) -> None:
        while self._in_flight:
            self._finish_step()

    def _finish_step(self) -> None:
        """Gets the model output of the oldest step in flight, updates the scheduler with it, and publishes."""
        step = self._in_flight.popleft()
        scheduler_output = step.scheduler_output
        if self.scheduler.config.num_stages > 1:
            step.sample_tokens()
        try:
            model_output = step.get_output()
        except ExecutorError:
            raise
        except Exception:
            log.exception(
                "step %d failed; running its %d sequences one by one", scheduler_output.step, len(scheduler_output.rows)
            )
            model_output = self._retry(scheduler_output)
        executed = perf_counter()
        request_ids = [] if scheduler_output.is_empty else self.scheduler.request_ids()
        outputs, tokens = self.scheduler.update_from_output(scheduler_output, model_output)
        measures = scheduler_output.step % FRAGMENTATION_INTERVAL == 0 or not self.scheduler.has_work
        fragmentation = self.scheduler.get_fragmentation() if measures else None
        trace = _trace(step, model_output, request_ids, executed, perf_counter())
        trace.seconds = self._measure(step, model_output)
        if self._recorder is not None and not scheduler_output.is_empty:
            self._recorder.record(scheduler_output, model_output, trace.seconds)
        events = self.scheduler.kv_cache_manager.take_events()
        away = self.scheduler.take_times_away()
        load = self.scheduler.get_load(is_sleeping=self.is_sleeping)
        self._publish(EngineCoreOutputs(outputs, load, events, trace, fragmentation, away, tokens))

    def _measure(self, step: "LaunchedStep", model_output: ModelOutput) -> float:
        """Returns the step's duration on the core's clock, in seconds; overlapping steps count from the end of the step
        before. The scheduler learns from it, unless the step failed, waited for other engines' tokens, or has
        fragments.
        """
        ended = self._clock()
        seconds, self._ended = ended - max(step.start_clock, self._ended), ended
        if not (model_output.has_errors or model_output.waited_for_others or step.scheduler_output.has_fragments):
            work = StepWork.of(step.scheduler_output)
            self.scheduler.step_times.observe(work, seconds - model_output.timings.swap, ended)
        return seconds

    def _retry(self, failed: SchedulerOutput) -> ModelOutput:
        """Runs each sequence of a failed step alone: only a sequence that also fails alone ends with an error."""
        for later in self._in_flight:
            later.discard()
        merged = ModelOutput()
        for number, single in enumerate(self.scheduler.split_for_retry(failed)):
            model_output = ModelOutput([0] * failed.num_draws[number])
            if single is not None:
                try:
                    model_output = self._executor.execute_model(single)
                except ExecutorError:
                    raise
                except Exception:
                    log.exception("sequence %d failed alone", failed.sequence_ids[number])
                    model_output.errors[0] = internal()
            merged.add(model_output, number)
        return merged

    def _process_commands(self) -> None:
        """Handles the queued commands. Waits for one if the engine has no other work."""
        if not self.scheduler.has_work:
            self._heartbeat.stop()
            self._wait_for_work()
        self._heartbeat.beat()
        while not (self._stopped or self._commands.empty()):
            self._handle_command(self._commands.get())

    def _wait_for_work(self) -> None:
        self._handle_command(self._commands.get())

    def _handle_command(self, command: Command) -> None:
        match command:
            case AddRequest(request):
                self._add_request(request)
            case AbortRequest(request_id, indexes):
                self.scheduler.abort_request(request_id, indexes)
            case GetSnapshot(reply):
                self._finish_all_steps()  # steps in flight have already changed the prefix cache
                load = self.scheduler.get_load(is_sleeping=self.is_sleeping)
                reply(load, self.scheduler.kv_cache_manager.stored_blocks())
            case GetBlockStates(reply):
                pools = self.scheduler.kv_cache_manager
                reply(pools.device_pool.block_states(), pools.host_pool.block_states())
            case RemoveLoRA(lora_id):
                self._executor.remove_lora(lora_id)
            case Sleep(reply):
                reply(self._sleep())
            case WakeUp(reply):
                reply(self._wake_up())
            case Shutdown():
                self._stopped = True

    def _add_request(self, request: Request) -> None:
        try:
            if (failure := self._wake_up()) is not None:
                raise failure
            self.scheduler.add_request(request)
        except QuireError as error:
            self.scheduler.reject_request(request.request_id, error)

    def _sleep(self) -> QuireError | None:
        if self._sleeper is None:
            return QuireError(ErrorCode.UNAVAILABLE, CANNOT_SLEEP)
        self._finish_all_steps()
        if self.scheduler.has_work:
            return QuireError(ErrorCode.OVERLOADED, "The engine has requests, and does not sleep before they end.")
        if self.is_sleeping:
            return None
        begun = perf_counter()
        self.scheduler.kv_cache_manager.evict_all()
        self.step()  # copies the evicted blocks that are worth it to the host
        self._finish_all_steps()
        try:
            with self._heartbeat.allowing(MOVE_SECONDS):
                self._sleeper.sleep()
        except SleepError as error:
            return QuireError(ErrorCode.UNAVAILABLE, f"The engine cannot sleep: {error}.")
        self.is_sleeping = True
        log.info("asleep after %.2f s", perf_counter() - begun)
        self.step()  # publishes that the engine sleeps
        return None

    def _wake_up(self) -> QuireError | None:
        if not self.is_sleeping:
            return None
        assert self._sleeper is not None, "it was put to sleep"
        begun = perf_counter()
        try:
            with self._heartbeat.allowing(MOVE_SECONDS):
                self._sleeper.wake_up()
        except SleepError as error:
            return QuireError(ErrorCode.UNAVAILABLE, f"The engine cannot wake up: {error}.", retry_after=1.0)
        self.is_sleeping = False
        seconds = perf_counter() - begun
        self.scheduler.stats.wake_ups += 1
        self.scheduler.stats.wake_seconds += seconds
        log.info("awake after %.2f s", seconds)
        self.step()
        return None


class LaunchedStep:
    """A scheduler output and its way to a model output. With depth 1, ``get_output`` runs the whole step. With more,
    the creation of this object launches the step. ``get_output`` raises an exception of the launch, so that failures
    appear in the order of the steps. Only an ``ExecutorError`` of a discarded step is raised at once, because nothing
    can follow it.

    ``start_clock`` is the time on the core's clock when scheduling began. ``start_ns`` (since 1970) and ``start_perf``
    (``perf_counter``) are the same moment, and ``schedule`` is the seconds that scheduling took. After a ``failure``,
    ``get_output`` only raises it, and nothing of the step is in flight.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_output: SchedulerOutput,
        *,
        start_ns: int,
        start_perf: float,
        start_clock: float,
        schedule: float,
    ) -> None:
        self.scheduler_output = scheduler_output
        self.start_ns = start_ns
        self.start_perf = start_perf
        self.start_clock = start_clock
        self.schedule = schedule
        self._executor = executor
        self.failure: Exception | None = None
        self._async_output: AsyncModelOutput | None = None
        if executor.depth > 1 and not scheduler_output.is_empty:
            try:
                self._async_output = cast("AsyncExecutor", executor).execute_model_async(scheduler_output)
            except Exception as failure:  # noqa: BLE001 - ``get_output`` raises it
                self.failure = failure

    def sample_tokens(self) -> None:
        """Samples the step's tokens. All tokens before them must be known."""
        if self._async_output is not None:
            self._async_output.sample_tokens()

    def discard(self) -> None:
        """Waits for the end of a step that computes garbage, because the step before it has failed. Raises
        ``ExecutorError``.
        """
        if self._async_output is None:
            return  # it failed at its launch
        self.sample_tokens()
        try:
            self._async_output.get_output()
        except ExecutorError:
            raise
        except Exception:
            log.debug("step %d was given up and has failed", self.scheduler_output.step, exc_info=True)
        self._async_output, self.failure = None, RuntimeError("the step before it failed")

    def get_output(self) -> ModelOutput:
        """Waits until the step is done. Raises like ``Executor.execute_model``."""
        if self.failure is not None:
            raise self.failure
        if self._async_output is not None:
            return self._async_output.get_output()
        return ModelOutput() if self.scheduler_output.is_empty else self._executor.execute_model(self.scheduler_output)


def _trace(
    step: LaunchedStep, model_output: ModelOutput, request_ids: list[str], executed: float, ended: float
) -> StepTrace:
    """Returns the trace of a step. ``executed`` is when its model output was available and ``ended`` when the scheduler
    was updated, both on ``perf_counter``.
    """
    scheduler_output = step.scheduler_output
    lengths = list(scheduler_output.lengths)
    for number, drafts in scheduler_output.drafts.items():
        lengths[number] -= len(drafts)
    num_decode = lengths.count(1)
    return StepTrace(
        step=scheduler_output.step,
        started=step.start_ns,
        timings=model_output.timings,
        schedule=step.schedule,
        update=ended - executed,
        elapsed=ended - step.start_perf,
        num_prefill=len(lengths) - num_decode,
        num_decode=num_decode,
        num_tokens=sum(lengths),
        preempted=scheduler_output.num_preempted,
        swapped_blocks=scheduler_output.num_swapped_blocks,
        failed=model_output.has_errors,
        request_ids=request_ids,
        max_seconds=scheduler_output.max_seconds,
        num_draws=scheduler_output.total_num_draws,
    )
