"""The engine's loop: what a failing step, a bad request and an abort do to everybody else."""

from threading import Event, Thread
from time import sleep

import pytest
from quire_engine.core import engine_core
from quire_engine.core.block_pool import BlockStored, KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import (
    AbortRequest,
    AddRequest,
    EngineCore,
    EngineCoreOutputs,
    GetSnapshot,
    Shutdown,
    Sleep,
    WakeUp,
)
from quire_engine.core.executor import CopyError
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_time_model import StepWork
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor, expected_output

CAPACITY = KVCacheConfig(block_size=4, device_blocks=30, host_blocks=30)


class PoisonedExecutor(PagedExecutor):
    """Fails whenever the poison token is computed."""

    poison = 13

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.take_rows(scheduler_output)
        if any(self.poison in chunk.token_ids for chunk in self.given):
            raise RuntimeError("the kernel cannot do this")
        return super().execute_model(scheduler_output)


class Engine:
    """A core that is stepped by hand, and what it published."""

    def __init__(self, executor: PagedExecutor, **limits: int) -> None:
        settings = {"max_num_batched_tokens": 64, "max_model_len": 100, "vocab_size": VOCAB_SIZE, **limits}
        self.memory = KVCacheManager(CAPACITY)
        self.steps: list[EngineCoreOutputs] = []
        self.core = EngineCore(Scheduler(SchedulerConfig(**settings), self.memory), executor, self.steps.append)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 6) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.core.send(AddRequest(Request(request_id, prompt, params)))

    def run(self) -> dict[str, list[EngineCoreOutput]]:
        """Steps until nothing is left; the outputs of each request."""
        self.core.send(Shutdown())
        self.core.run()
        for _ in range(1000):
            if self.core.scheduler.has_work:
                self.core.step()
        assert not self.core.scheduler.has_work
        outputs: dict[str, list[EngineCoreOutput]] = {}
        for step in self.steps:
            for output in step.all_outputs():
                outputs.setdefault(output.request_id, []).append(output)
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks
        return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def clean_prompt(seed: int) -> list[int]:
    """A prompt whose whole expected output is free of the poison."""
    for start in range(seed * 1000, seed * 1000 + 1000):
        prompt = [start % VOCAB_SIZE, (start // VOCAB_SIZE) % VOCAB_SIZE, seed]
        if PoisonedExecutor.poison not in prompt + expected_output(prompt, 0, 6):
            return prompt
    raise AssertionError("no clean prompt")


def test_a_request_that_makes_the_step_fail_ends_alone() -> None:
    engine = Engine(PoisonedExecutor(CAPACITY))
    good = {f"good{i}": clean_prompt(i) for i in range(3)}
    for request_id, prompt in good.items():
        engine.add(request_id, prompt)
    engine.add("bad", [1, 2, PoisonedExecutor.poison])
    outputs = engine.run()
    for request_id, prompt in good.items():
        assert tokens(outputs[request_id]) == expected_output(prompt, 0, 6)
    (end,) = outputs["bad"]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.code is ErrorCode.INTERNAL
    assert "kernel" not in end.error.message, "the internal reason was sent"


def test_a_failed_copy_ends_the_engine() -> None:
    class BrokenCopies(PagedExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
            raise CopyError("no such memory")

    engine = Engine(BrokenCopies(CAPACITY))
    engine.add("a", [1, 2, 3])
    with pytest.raises(CopyError):
        engine.run()


def test_an_abort_frees_everything_by_the_next_step() -> None:
    engine = Engine(PagedExecutor(CAPACITY))
    engine.core._handle_command(AddRequest(Request("a", [1] * 20, SamplingParams(max_tokens=50, ignore_eos=True))))
    for _ in range(5):
        engine.core.step()
    assert engine.memory.device_pool.num_free < engine.memory.device_pool.num_blocks
    engine.core._handle_command(AbortRequest("a"))
    assert engine.memory.device_pool.num_free == engine.memory.device_pool.num_blocks
    engine.core.step()
    (end,) = engine.steps[-1].outputs
    assert end.finish_reason is FinishReason.ABORT


def test_the_queue_is_bounded() -> None:
    engine = Engine(PagedExecutor(CAPACITY), max_waiting=2)
    for index in range(4):
        engine.add(str(index), [index + 1])
    refused = [o for outputs in engine.run().values() for o in outputs if o.error]
    assert len(refused) == 2
    assert all(output.error.code is ErrorCode.OVERLOADED for output in refused)


def test_a_snapshot_is_taken_between_two_steps() -> None:
    engine = Engine(PagedExecutor(CAPACITY))
    seen: list[tuple[int, set[BlockStored]]] = []
    engine.add("a", [1] * 20)
    engine.core.send(GetSnapshot(lambda load, stored: seen.append((load.waiting, set(stored)))))
    engine.run()
    engine.core._handle_command(GetSnapshot(lambda load, stored: seen.append((load.running, set(stored)))))
    assert seen[0] == (1, set())
    assert seen[1] == (0, set(engine.memory.stored_blocks()))
    assert len(seen[1][1]) == 6


def test_only_a_loop_with_pending_work_counts_as_hanging() -> None:
    entered, released = Event(), Event()

    class HangingExecutor(PagedExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
            entered.set()
            assert released.wait(30)
            return super().execute_model(scheduler_output)

    engine = Engine(HangingExecutor(CAPACITY))
    thread = Thread(target=engine.core.run)
    thread.start()
    idle = 1.0
    sleep(idle)
    assert engine.core.seconds_since_progress == 0.0, "idle time counts as a hang"
    engine.add("a", [1, 2, 3])
    assert entered.wait(30)
    assert engine.core.seconds_since_progress < idle, "idle time counts as a hang once work comes"
    sleep(0.3)
    assert engine.core.seconds_since_progress >= 0.3
    released.set()
    engine.core.send(Shutdown())
    thread.join(30)


def test_an_engine_that_moves_its_memory_for_long_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(engine_core, "perf_counter", lambda: now)
    seen: list[float] = []

    class SlowSleeper:
        def sleep(self) -> None:
            nonlocal now
            engine.core.send(AbortRequest("of a client that waits"))
            for seconds in (engine_core.MOVE_SECONDS, 7.0):
                now += seconds
                seen.append(engine.core.seconds_since_progress)

        wake_up = sleep

    engine = Engine(PagedExecutor(CAPACITY))
    engine.core._sleeper = SlowSleeper()
    answers: list[QuireError | None] = []
    for command in (Sleep(answers.append), WakeUp(answers.append)):
        engine.core.send(command)
        engine.core._process_commands()
        assert engine.core.seconds_since_progress == 0.0
    assert answers == [None, None]
    assert seen == [0.0, 7.0, 0.0, 7.0], "a disk that is stuck is no hang"


def test_a_step_reports_what_it_did() -> None:
    engine = Engine(PagedExecutor(CAPACITY))
    engine.add("a", [1] * 20, max_tokens=2)
    engine.add("b", [2] * 10, max_tokens=2)
    engine.run()
    first, second = engine.steps[0].trace, engine.steps[1].trace
    assert (first.num_prefill, first.num_decode, first.num_tokens, first.request_ids) == (2, 0, 30, ["a", "b"])
    assert (second.num_prefill, second.num_decode, second.num_tokens) == (0, 2, 2)
    assert first.started <= second.started


class SlowExecutor(PagedExecutor):
    """Takes 10 ms for each step, and says that 40 ms of 50 went into copies where there is a prompt."""

    now = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        model_output = super().execute_model(scheduler_output)
        model_output.timings.swap = 0.04 if scheduler_output.num_tokens > 1 else 0.0
        self.now += 0.01 + model_output.timings.swap
        return model_output


def test_step_times_are_learned_from_each_step_without_its_copies() -> None:
    executor, published = SlowExecutor(CAPACITY), []
    config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE)
    scheduler = Scheduler(config, KVCacheManager(CAPACITY))
    core = EngineCore(scheduler, executor, published.append, lambda: executor.now)
    for number in range(20):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        scheduler.add_request(Request(str(number), [number, 2, 3], params))
        executor.now += 1.0  # a pause is no part of a step
        while scheduler.has_work:
            core.step()
    model = scheduler.step_times.model
    assert model is not None
    assert model.predict(StepWork(0, 1, 0, 5)) == pytest.approx(0.01, rel=0.1)
    assert model.predict(StepWork(3, 1, 6, 0)) == pytest.approx(0.01, rel=0.1)
    assert published[-1].load.pace == scheduler.step_times.pace


class OverlappedSteps(SimulatedExecutor):
    """Two steps in flight, each of 10 ms on a device that computes one at a time."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(CAPACITY, FLAT, depth=2, sleep=self.advance)

    def advance(self, seconds: float) -> None:
        self.now += seconds


FLAT = LatencyModel(1e9, 0.01, 0.0, 0.0, 0.0, overhead_seconds=0.0, bytes_per_second=1e9)


def test_steps_that_overlap_are_learned_to_last_from_the_end_of_the_one_before() -> None:
    executor = OverlappedSteps()
    scheduler = Scheduler(SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE), KVCacheManager(CAPACITY))
    core = EngineCore(scheduler, executor, lambda _: None, lambda: executor.now)
    for number in range(10):
        scheduler.add_request(Request(str(number), [number, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)))
        while scheduler.has_work:
            core.step()
    assert scheduler.step_times.model is not None
    assert scheduler.step_times.model.predict(StepWork(0, 1, 0, 10)) == pytest.approx(0.01, rel=0.05)


def test_failed_steps_are_not_learned_from() -> None:
    engine = Engine(PoisonedExecutor(CAPACITY))
    for number in range(20):
        engine.add(str(number), [PoisonedExecutor.poison])
    engine.run()
    assert engine.core.scheduler.step_times.model is None
