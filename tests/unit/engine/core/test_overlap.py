"""The loop with a step planned ahead: what runs ahead and what waits, what is thrown away, and what failures cost."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCore, EngineCoreOutputs, GetSnapshot, Shutdown
from quire_engine.core.executor import CopyError, Executor
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request, SequenceStatus
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ScheduledChunk, SchedulerOutput
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams, choice_seed

from tests.support.overlapping_executor import OverlappingPagedExecutor, PagedStep
from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor, expected_beams, expected_output

CAPACITY = KVCacheConfig(block_size=4, device_blocks=30, host_blocks=30)
PROMPT = [1, 2, 3]


class Engine:
    """A core that is stepped by hand, all that it planned, and what it published."""

    def __init__(self, executor: Executor | None = None, capacity: KVCacheConfig = CAPACITY, **limits: int) -> None:
        settings = {"max_num_batched_tokens": 64, "max_model_len": 100, "vocab_size": VOCAB_SIZE, **limits}
        self.executor = executor or OverlappingPagedExecutor(capacity)
        self.memory = KVCacheManager(capacity)
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.memory)
        self.steps: list[EngineCoreOutputs] = []
        self.core = EngineCore(self.scheduler, self.executor, self.steps.append)
        self.scheduler_outputs: list[SchedulerOutput] = []
        make, self.scheduler.schedule = self.scheduler.schedule, self.schedule
        self._make: Callable[[], SchedulerOutput] = make

    def schedule(self) -> SchedulerOutput:
        self.scheduler_outputs.append(self._make())
        return self.scheduler_outputs[-1]

    def add(self, request_id: str, prompt: list[int] = PROMPT, **params: object) -> Request:
        sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})
        request = Request(request_id, prompt, sampling)
        self.core._handle_command(AddRequest(request))
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()

    def run(self) -> dict[str, list[EngineCoreOutput]]:
        """Steps until nothing is left; the outputs of each request."""
        for _ in range(1000):
            if not self.core.scheduler.has_work:
                break
            self.core.step()
        assert not self.core.scheduler.has_work
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks
        outputs: dict[str, list[EngineCoreOutput]] = {}
        for step in self.steps:
            for output in step.all_outputs():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs

    @property
    def chunks(self) -> list[list[ScheduledChunk]]:
        return [scheduler_output.chunks for scheduler_output in self.scheduler_outputs]


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def stop_after(count: int) -> tuple[int, list[int]]:
    """A token that ends the output of ``PROMPT`` after so many, and the output."""
    for candidate in range(VOCAB_SIZE):
        output = expected_output(PROMPT, choice_seed(0, 0), 20, frozenset({candidate}))
        if len(output) == count:
            return candidate, output
    raise AssertionError("no such token")


def test_the_next_step_is_launched_before_the_result_of_the_last_one_and_drawn_after_it() -> None:
    engine = Engine()
    engine.add("a", max_tokens=3)
    engine.run()
    events = [event for event in engine.executor.events if event[0] != "run"]
    assert events == [
        ("launch", 1), ("draw", 1),
        ("launch", 2), ("result", 1), ("draw", 2),
        ("launch", 3), ("result", 2), ("draw", 3),
        ("result", 3),
    ]  # fmt: skip
    assert [[(chunk.start, chunk.length, chunk.awaits_token) for chunk in chunks] for chunks in engine.chunks] == [
        [(0, 3, False)],
        [(3, 1, True)],
        [(4, 1, True)],
        [],
    ]


def test_an_output_that_ends_by_its_length_has_nothing_computed_in_vain() -> None:
    for limits in ({"max_model_len": 8}, {}):
        engine = Engine(**limits)
        engine.add("a", max_tokens=5)
        (outputs,) = engine.run().values()
        assert len(tokens(outputs)) == 5
        assert engine.executor.wasted == 0
        assert sum(scheduler_output.num_tokens for scheduler_output in engine.scheduler_outputs) == len(PROMPT) + 4


def test_an_output_that_ends_at_a_stop_token_costs_one_discarded_chunk() -> None:
    stop, expected = stop_after(3)
    counts: list[tuple[int, int]] = []
    for executor in (OverlappingPagedExecutor(CAPACITY), PagedExecutor(CAPACITY)):
        engine = Engine(executor)
        engine.add("a", max_tokens=20, stop_token_ids=(stop,))
        (outputs,) = engine.run().values()
        assert tokens(outputs) == expected
        assert outputs[-1].finish_reason is FinishReason.STOP
        counts.append((engine.scheduler.stats.computed_tokens, engine.scheduler.stats.generated_tokens))
        computed = sum(scheduler_output.num_tokens for scheduler_output in engine.scheduler_outputs)
        assert computed - engine.scheduler.stats.computed_tokens == executor.depth - 1
    assert counts[0] == counts[1], "what was computed in vain is counted as used"


def test_a_row_is_reported_free_once_no_step_in_flight_computes_it() -> None:
    stop, _ = stop_after(3)
    engine = Engine()
    engine.add("a", max_tokens=20, stop_token_ids=(stop,))
    engine.add("b", [5, 6], max_tokens=12)
    engine.run()
    (reported,) = [
        scheduler_output.step for scheduler_output in engine.scheduler_outputs if 0 in scheduler_output.freed_rows
    ]
    last = max(
        scheduler_output.step
        for scheduler_output in engine.scheduler_outputs
        if any(chunk.sequence_id == 0 for chunk in scheduler_output.chunks)
    )
    order = [event for event in engine.executor.events if event in (("result", last), ("launch", reported))]
    assert order == [("result", last), ("launch", reported)]
    engine.add("c", [7], max_tokens=1)
    engine.run()
    assert len(engine.executor.rows.requests) <= 1, "the executor keeps what belongs to sequences that have ended"


@pytest.mark.parametrize("make_executor", [OverlappingPagedExecutor, PagedExecutor])
@pytest.mark.parametrize("aborted", [(1, 2), (0, 2), (0, 1, 2), (0, 1, 2, 3)])
def test_rows_of_choices_aborted_before_they_fork_are_reported_free_too(
    make_executor: Callable[[KVCacheConfig], PagedExecutor], aborted: tuple[int, ...]
) -> None:
    engine = Engine(make_executor(CAPACITY), max_num_batched_tokens=2)
    engine.add("many", n=4, max_tokens=3)
    engine.step(2 if engine.executor.depth > 1 else 1)
    engine.core._handle_command(AbortRequest("many", aborted))
    engine.run()
    engine.schedule()
    outputs = engine.scheduler_outputs
    freed = [row for scheduler_output in outputs for row in scheduler_output.freed_rows]
    assert sorted(freed) == sorted(new.row for scheduler_output in outputs for new in scheduler_output.new)


def test_an_abort_frees_all_blocks_at_once_and_discards_its_step() -> None:
    engine = Engine()
    engine.add("a", [1] * 20, max_tokens=50)
    engine.step(5)
    engine.core._handle_command(AbortRequest("a"))
    assert engine.memory.device_pool.num_free == engine.memory.device_pool.num_blocks
    assert engine.scheduler.has_work, "a step in flight is to be taken"
    engine.add("b", [2] * 20, max_tokens=6)
    outputs = engine.run()
    assert len(tokens(outputs["a"])) == 4
    assert outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert tokens(outputs["b"]) == expected_output([2] * 20, choice_seed(0, 0), 6)


def test_a_prompt_is_read_in_chunks_one_after_the_other_without_waiting() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add("a", list(range(10)), max_tokens=2)
    engine.step(4)
    assert [[(chunk.start, chunk.length) for chunk in chunks] for chunks in engine.chunks] == [
        [(0, 4)], [(4, 4)], [(8, 2)], [(10, 1)]
    ]  # fmt: skip
    assert (
        engine.memory.device_pool.get_cached_block(engine.scheduler.running.first().block_table.block_hashes[1])
        is not None
    )
    engine.run()


def test_slots_that_are_being_written_are_not_wasted() -> None:
    engine = Engine()
    engine.add("a", [1] * 18, max_tokens=3)
    engine.step()
    assert engine.executor.in_flight
    assert engine.scheduler.get_fragmentation().empty_slots == 2
    engine.run()


def test_a_block_is_found_only_when_its_step_is_done() -> None:
    engine = Engine()
    engine.add("a", list(range(9)), max_tokens=3)
    engine.step()
    assert engine.memory.stored_blocks() == []
    engine.add("b", list(range(9)), max_tokens=3)
    engine.step()
    assert len(engine.memory.stored_blocks()) == 2
    assert engine.scheduler_outputs[-1].chunks[-1].start == 0, "what is only being computed was taken for cached"
    engine.add("c", list(range(9)), max_tokens=3)
    engine.step()
    assert engine.scheduler_outputs[-1].chunks[-1].start == 8
    engine.run()


def test_forking_outputs_wait_for_their_first_tokens_and_overlap_afterwards() -> None:
    engine = Engine()
    engine.add("a", n=3, max_tokens=4)
    (outputs,) = engine.run().values()
    assert [len(chunks) for chunks in engine.chunks[:4]] == [1, 0, 3, 3]
    assert not any(chunk.awaits_token for chunk in engine.chunks[2])
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        assert tokens(own) == expected_output(PROMPT, choice_seed(0, index), 4)


def test_beams_wait_for_each_other_while_other_requests_overlap() -> None:
    engine = Engine()
    search = engine.add("search", beam_width=2, n=2, max_tokens=5)
    engine.add("a", [4, 5], max_tokens=12)
    outputs = engine.run()
    beams = expected_beams(PROMPT, search.sampling, frozenset())
    assert [output.token_ids for output in outputs["search"]] == [beam.token_ids for beam in beams]
    assert tokens(outputs["a"]) == expected_output([4, 5], choice_seed(0, 0), 12)
    pending = [chunk.sequence_id for chunks in engine.chunks for chunk in chunks if chunk.awaits_token]
    assert set(pending) == {1}
    assert len(pending) == 11


def test_no_request_runs_out_of_blocks_before_a_pending_token_that_may_end_it() -> None:
    engine = Engine(capacity=KVCacheConfig(4, 4, 0))
    request = engine.add("a", list(range(8)), max_tokens=4)
    sequence = engine.scheduler.waiting.first()
    sequence.group.limit = 100  # as if it had been admitted by mistake: it cannot grow beyond its 12 tokens
    (outputs,) = engine.run().values()
    assert tokens(outputs) == expected_output(list(request.prompt_token_ids), choice_seed(0, 0), 5)
    assert outputs[-1].error is not None
    assert outputs[-1].error.code is ErrorCode.OVERLOADED


@pytest.mark.parametrize(("host_blocks", "way"), [(0, SequenceStatus.PREEMPTED), (40, SequenceStatus.SWAPPED)])
def test_a_prompt_that_is_preempted_while_its_first_tokens_are_sampled_samples_them_again(
    host_blocks: int, way: SequenceStatus
) -> None:
    ways: list[SequenceStatus] = []
    for device_blocks in range(12, 24):
        engine = Engine(capacity=KVCacheConfig(2, device_blocks, host_blocks))
        preemptor = engine.scheduler._batch_scheduler.preemptor
        lose = preemptor.invalidate_kv
        preemptor.invalidate_kv = lambda sequence, lose=lose: (ways.append(sequence.status), lose(sequence))
        old = {f"old{number}": [number] * 7 for number in range(2)}
        for request_id, prompt in old.items():
            engine.add(request_id, prompt, max_tokens=4)
        engine.step()
        engine.add("many", [2] * 8, n=2, max_tokens=3)
        outputs = engine.run()
        for request_id, prompt in old.items():
            assert tokens(outputs[request_id]) == expected_output(prompt, choice_seed(0, 0), 4)
        for index in range(2):
            own = [output for output in outputs["many"] if output.index == index]
            assert tokens(own) == expected_output([2] * 8, choice_seed(0, index), 3)
    assert set(ways) == {way}


def test_what_a_step_in_flight_computes_is_swapped_out_with_the_rest() -> None:
    engine = Engine(capacity=KVCacheConfig(2, 12, 40))
    for number in range(2):
        engine.add(str(number), [number] * 6, max_tokens=12)
    outputs = engine.run()
    assert engine.scheduler.stats.preemptions_by_swap > 0
    assert engine.scheduler.stats.computed_tokens == 2 * (6 + 11), "something was computed twice"
    for number in range(2):
        assert tokens(outputs[str(number)]) == expected_output([number] * 6, choice_seed(0, 0), 12)


def test_a_snapshot_agrees_with_the_published_events_while_a_step_is_in_flight() -> None:
    engine = Engine()
    engine.add("a", list(range(9)), max_tokens=5)
    engine.step()
    seen: list[set[object]] = []
    engine.core._handle_command(GetSnapshot(lambda load, stored: seen.append(set(stored))))
    assert not engine.executor.in_flight
    assert seen == [{event for step in engine.steps for event in step.kv_events}]
    outputs = engine.run()
    assert tokens(outputs["a"]) == expected_output(list(range(9)), choice_seed(0, 0), 5)


def test_stopping_the_loop_takes_the_steps_in_flight() -> None:
    engine = Engine()
    engine.add("a", max_tokens=50)
    engine.step(3)
    assert engine.executor.in_flight
    engine.core.send(Shutdown())
    engine.core.run()
    assert not engine.executor.in_flight
    assert len(tokens([output for step in engine.steps for output in step.all_outputs()])) == len(
        engine.scheduler_outputs
    )


@pytest.mark.parametrize("make_executor", [OverlappingPagedExecutor, PagedExecutor])
def test_an_output_carries_the_step_of_its_last_token(make_executor: Callable[[KVCacheConfig], PagedExecutor]) -> None:
    engine = Engine(make_executor(CAPACITY))
    stop, _ = stop_after(3)
    engine.add("stops", max_tokens=20, stop_token_ids=(stop,))
    engine.add("goes on", [4, 5], max_tokens=8)
    engine.run()
    ends = [(step.trace.step, each) for step in engine.steps for each in step.all_outputs() if each.finish_reason]
    assert len(ends) == 2
    for step, output in ends:
        assert output.timings is not None
        assert output.timings.last_step == step


def test_a_step_lasts_until_it_is_published_and_includes_the_scheduling_of_the_next() -> None:
    engine = Engine()
    engine.add("a", max_tokens=9)
    engine.run()
    traces = [step.trace for step in engine.steps]
    assert len(traces) == 9
    for trace, following in pairwise(traces):
        assert trace.elapsed >= trace.duration + following.schedule
        assert trace.pause >= following.schedule


def test_every_rejection_and_every_end_is_published_with_or_without_a_step_in_flight() -> None:
    engine = Engine(max_waiting=1)
    engine.add("a", max_tokens=4)
    engine.add("refused")
    engine.step()
    engine.core._handle_command(AbortRequest("a"))
    outputs = engine.run()
    assert [output.finish_reason for output in outputs["refused"]] == [FinishReason.ERROR]
    assert [output.finish_reason for output in outputs["a"]] == [FinishReason.ABORT]


# Failures


class PoisonedExecutor(OverlappingPagedExecutor):
    """Fails whenever the poison token is computed: at the launch if it is known then, or else on the device."""

    poison = 13

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.fails = self.is_poisoned

    def is_poisoned(self, where: str, scheduler_output: SchedulerOutput) -> bool:
        return where != "draw" and any(self.poison in chunk.token_ids for chunk in self.given)


def prompt_of(fits: Callable[[list[int], list[int]], bool]) -> list[int]:
    """A prompt that, with its expected output, fits."""
    for number in range(10_000):
        prompt = [number % VOCAB_SIZE, number // VOCAB_SIZE % VOCAB_SIZE, 3]
        if fits(prompt, expected_output(prompt, choice_seed(0, 0), 6)):
            return prompt
    raise AssertionError("no such prompt")


def clean(prompt: list[int], output: list[int]) -> bool:
    return PoisonedExecutor.poison not in prompt + output


def drawn(prompt: list[int], output: list[int]) -> bool:
    return PoisonedExecutor.poison not in prompt and PoisonedExecutor.poison in output[1:4]


@pytest.mark.parametrize("bad", [[1, 2, PoisonedExecutor.poison], prompt_of(drawn)])
@pytest.mark.parametrize("delay", range(3))
def test_a_request_that_makes_a_step_fail_ends_alone(bad: list[int], delay: int) -> None:
    engine = Engine(PoisonedExecutor())
    good = {f"good{i}": prompt_of(lambda p, o, i=i: clean(p, o) and p[0] % 3 == i) for i in range(3)}
    for request_id, prompt in good.items():
        engine.add(request_id, prompt)
    engine.step(delay)
    engine.add("bad", bad)
    outputs = engine.run()
    for request_id, prompt in good.items():
        assert tokens(outputs[request_id]) == expected_output(prompt, choice_seed(0, 0), 6)
    end = outputs["bad"][-1]
    assert end.error is not None
    assert end.error.code is ErrorCode.INTERNAL
    expected = expected_output(bad, choice_seed(0, 0), 6)
    assert tokens(outputs["bad"]) == expected[: len(tokens(outputs["bad"]))]


def test_blocks_that_a_failed_step_should_have_filled_are_never_hit() -> None:
    engine = Engine(PoisonedExecutor())
    shared = list(range(20, 28))
    engine.add("bad", [*shared, PoisonedExecutor.poison])
    engine.step()
    good = prompt_of(lambda prompt, _: clean([], expected_output([*shared, *prompt], choice_seed(0, 0), 6)))
    engine.add("good", [*shared, *good])
    outputs = engine.run()
    assert outputs["bad"][-1].error is not None
    assert outputs["good"][-1].cached_tokens == 0
    assert tokens(outputs["good"]) == expected_output([*shared, *good], choice_seed(0, 0), 6)


class FailingOnce(OverlappingPagedExecutor):
    """Fails at one place of one step."""

    def __init__(self, where: str, step: int, capacity: KVCacheConfig = CAPACITY) -> None:
        super().__init__(capacity)
        self.failed = False
        self.where, self.step = where, step
        self.fails = self.fails_now

    def fails_now(self, where: str, scheduler_output: SchedulerOutput) -> bool:
        fails = (where, scheduler_output.step) == (self.where, self.step)
        self.failed = self.failed or fails
        return fails


@pytest.mark.parametrize("where", ["launch", "forward", "draw"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_step_that_fails_once_ends_no_request(where: str, step: int) -> None:
    executor = FailingOnce(where, step)
    engine = Engine(executor)
    stop, expected = stop_after(3)
    engine.add("stops", max_tokens=20, stop_token_ids=(stop,))
    engine.add("goes on", [4, 5], max_tokens=8)
    outputs = engine.run()
    assert executor.failed
    assert tokens(outputs["stops"]) == expected
    assert tokens(outputs["goes on"]) == expected_output([4, 5], choice_seed(0, 0), 8)
    ran_alone = {number for name, number in executor.events if name == "run"}
    assert ran_alone == ({step} if where == "launch" else {step, step + 1})


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_sequence_preempted_while_its_step_failed_is_recomputed(host_blocks: int) -> None:
    capacity = KVCacheConfig(2, 12, host_blocks)
    for step in range(1, 12):
        executor = FailingOnce("forward", step, capacity)
        engine = Engine(executor, capacity)
        prompts = {"one": [1] * 7, "two": [2] * 6}
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, max_tokens=12)
        outputs = engine.run()
        assert sum(engine.scheduler.stats.preemptions.values()) > 0
        for request_id, prompt in prompts.items():
            assert tokens(outputs[request_id]) == expected_output(prompt, choice_seed(0, 0), 12)


class BrokenCopies(OverlappingPagedExecutor):
    """Its second step cannot copy, which is noticed when it is launched, drawn or taken."""

    def __init__(self, where: str) -> None:
        super().__init__(CAPACITY)
        self.where = where

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> PagedStep:
        step = super().execute_model_async(scheduler_output)
        step.copy_fails = scheduler_output.step == 2 and self.where == "result"
        return step

    def check(self, where: str, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.step == 2 and where == self.where:
            raise CopyError("no such memory")


@pytest.mark.parametrize("where", ["launch", "draw", "result"])
def test_a_failed_copy_ends_the_engine(where: str) -> None:
    engine = Engine(BrokenCopies(where))
    engine.add("a")
    with pytest.raises(CopyError):
        engine.step(3)
    published = [output for step in engine.steps for output in step.all_outputs()]
    assert tokens(published) == expected_output(PROMPT, choice_seed(0, 0), 1), (
        "tokens of the resumed output are sent again"
    )


def test_a_failed_copy_of_an_abandoned_step_ends_the_engine_too() -> None:
    class Both(FailingOnce):
        def execute_model_async(self, scheduler_output: SchedulerOutput) -> PagedStep:
            step = super().execute_model_async(scheduler_output)
            step.copy_fails = scheduler_output.step == 2
            return step

    engine = Engine(Both("forward", 1))
    engine.add("a")
    with pytest.raises(CopyError):
        engine.step(3)
    assert ("run", 1) not in engine.executor.events, "the engine went on"


def test_simulated_steps_that_overlap_answer_the_same_in_less_time() -> None:
    answers: list[dict[str, list[EngineCoreOutput]]] = []
    seconds: list[float] = []
    for depth in (1, 2):
        slept: list[float] = []
        latency = replace(PRESETS["cpu"].latency, overhead_seconds=0.001, jitter=0.0)
        executor = SimulatedExecutor(CAPACITY, latency, vocab_size=VOCAB_SIZE, depth=depth, sleep=slept.append)
        engine = Engine(executor)
        for number in range(3):
            engine.add(str(number), [number, 5], max_tokens=8, temperature=number, logprobs=1, min_tokens=2)
        answers.append(engine.run())
        seconds.append(sum(slept) / len(slept))
    for outputs in answers:
        assert {key: tokens(choice_outputs) for key, choice_outputs in outputs.items()} == {
            key: tokens(choice_outputs) for key, choice_outputs in answers[0].items()
        }
    assert seconds[0] - seconds[1] == pytest.approx(0.001)


def test_an_unsupported_overlap_depth_is_refused() -> None:
    with pytest.raises(AssertionError, match="depth"):
        Engine(OverlappingPagedExecutor(CAPACITY, num_stages=3))


def test_a_plan_may_be_one_ahead_and_no_more() -> None:
    engine = Engine()
    engine.add("a", max_tokens=9)
    engine.scheduler.schedule()
    engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="too many steps"):
        engine.scheduler.schedule()
