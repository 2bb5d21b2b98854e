"""What a plan holds: order, budget, admission and preemption."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from quire_engine.config import EngineArgs
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request, Sequence, SequenceStatus
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs

from tests.support.steps import all_drawn

SIZE = 4


class Bench:
    """A scheduler that is stepped by hand; every token drawn is 9."""

    def __init__(self, device: int = 100, host: int = 0, *, prefix_caching: bool = False, **limits: Any) -> None:
        self.memory = KVCacheManager(KVCacheConfig(SIZE, device, host), prefix_caching=prefix_caching)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=400, **limits), self.memory)

    def add(self, request_id: str, prompt: int, max_tokens: int = 16) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(request_id, [1] * prompt, params))
        return self.sequences(request_id)[0]

    def sequences(self, request_id: str) -> list[Sequence]:
        group = self.scheduler._registry.groups.get(request_id)
        return list(group.sequences.values()) if group else []

    def step(self) -> SchedulerOutput:
        scheduler_output = self.scheduler.schedule()
        self.scheduler.update_from_output(
            scheduler_output,
            all_drawn(scheduler_output, 9),
        )
        return scheduler_output

    def step_until(self, condition: Callable[[SchedulerOutput], object]) -> SchedulerOutput:
        for _ in range(200):
            if condition(scheduler_output := self.step()):
                return scheduler_output
        raise AssertionError("it never happened")


def preempted(scheduler_output: SchedulerOutput) -> bool:
    return scheduler_output.num_preempted > 0


def lengths(scheduler_output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(chunk.sequence_id, chunk.length) for chunk in scheduler_output.chunks]


def test_decodes_are_scheduled_before_a_long_prompt_which_takes_the_rest_of_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add("a", 3)
    bench.add("b", 4)
    assert lengths(bench.step()) == [(0, 3), (1, 4)]
    bench.add("long", 25)
    assert lengths(bench.step()) == [(0, 1), (1, 1), (2, 8)]
    assert lengths(bench.step()) == [(0, 1), (1, 1), (2, 8)]
    assert lengths(bench.step()) == [(0, 1), (1, 1), (2, 8)]
    last = bench.step()
    assert lengths(last) == [(0, 1), (1, 1), (2, 1)]
    assert last.num_draws[2], "the last token of the prompt draws the first of the output"


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add("a", 25)
    assert [bool(bench.step().num_draws[0]) for _ in range(3)] == [False, False, True]


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    bench = Bench(device=11, max_num_batched_tokens=8)
    bench.add("a", 16, max_tokens=2)
    bench.step()
    late = bench.add("b", 24, max_tokens=2)
    bench.step()
    assert late.status is SequenceStatus.WAITING
    bench.step()
    bench.step()
    assert late.status is SequenceStatus.RUNNING


def test_the_newest_is_preempted_and_nothing_is_admitted_in_that_step() -> None:
    bench = Bench(device=10, host=20)
    one, two = bench.add("one", 15), bench.add("two", 13)
    bench.step()
    waiting = bench.add("three", 1)
    scheduler_output = bench.step_until(preempted)
    assert (one.status, two.status, waiting.status) == (
        SequenceStatus.RUNNING,
        SequenceStatus.SWAPPED,
        SequenceStatus.WAITING,
    )
    assert [chunk.sequence_id for chunk in scheduler_output.chunks] == [one.id]
    bench.step()
    assert waiting.status is SequenceStatus.WAITING, "admitted although a sequence is swapped out"


def test_swap_is_preferred_while_the_host_has_free_blocks() -> None:
    for host, expected in ((20, SequenceStatus.SWAPPED), (2, SequenceStatus.PREEMPTED), (0, SequenceStatus.PREEMPTED)):
        bench = Bench(device=10, host=host)
        bench.add("one", 15)
        two = bench.add("two", 13)
        bench.step_until(preempted)
        assert two.status is expected


def test_a_preempted_sequence_is_the_next_to_run() -> None:
    bench = Bench(device=10, max_num_seqs=2)
    bench.add("one", 15, max_tokens=12)
    two = bench.add("two", 13)
    bench.add("three", 1)
    bench.step_until(preempted)
    assert bench.scheduler.preempted.first() is two


def test_of_two_preempted_sequences_the_older_resumes_first() -> None:
    bench = Bench(device=14, host=40)
    sequences = [bench.add(str(index), 15, max_tokens=30) for index in range(3)]
    bench.step_until(lambda _: len(bench.scheduler.swapped) == 2)
    assert list(bench.scheduler.swapped) == sequences[1:]


def test_a_prompt_that_takes_the_whole_pool_runs_when_it_is_alone() -> None:
    bench = Bench(device=9)
    sequence = bench.add("a", 31, max_tokens=1)
    bench.step()
    assert sequence.status is SequenceStatus.FINISHED


def test_a_step_that_swaps_out_swaps_nothing_in() -> None:
    bench = Bench(device=12, host=40, max_num_batched_tokens=16)
    for index in range(6):
        bench.add(str(index), 7, max_tokens=30)
    seen_in = seen_out = 0
    for _ in range(500):
        scheduler_output = bench.step()
        assert not (scheduler_output.copies.blocks_to_swap_in and scheduler_output.copies.blocks_to_swap_out)
        seen_in, seen_out = (
            seen_in + len(scheduler_output.copies.blocks_to_swap_in),
            seen_out + len(scheduler_output.copies.blocks_to_swap_out),
        )
    assert not bench.scheduler.has_work
    assert seen_in
    assert seen_out


@pytest.mark.parametrize("swap_ahead", [0.0, 0.5, 0.8])
def test_a_preemption_copies_one_block_at_most_where_the_others_were_swapped_ahead(swap_ahead: float) -> None:
    bench = Bench(device=40, host=100, prefix_caching=True, swap_ahead=swap_ahead)
    for index in range(4):
        bench.scheduler.add_request(
            Request(f"r{index}", [index] * 21, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        )
    copied, ahead = [], 0
    for _ in range(400):
        scheduler_output = bench.step()
        ahead += len(scheduler_output.copies.blocks_to_swap_ahead)
        if scheduler_output.num_preempted:
            copied.append(len(scheduler_output.copies.blocks_to_swap_out))
    assert not bench.scheduler.has_work
    assert len(copied) > 2
    assert max(copied) > 8 if swap_ahead == 0 else max(copied) <= 1
    stats = bench.scheduler.stats
    assert stats.blocks_copied_ahead == ahead
    assert stats.blocks_used_ahead <= ahead
    assert (stats.blocks_used_ahead > 8) == bool(swap_ahead)


@pytest.mark.parametrize("config", [partial(EngineArgs, model="folder"), SimulatedEngineConfig])
def test_swapping_ahead_without_the_prefix_cache_is_refused(config: Callable[..., object]) -> None:
    config(swap_ahead=0.9)
    with pytest.raises(ValidationError, match="--swap-ahead needs --enable-prefix-caching"):
        config(swap_ahead=0.9, enable_prefix_caching=False)


def test_nothing_is_swapped_ahead_while_there_are_free_blocks_or_no_room_on_the_host() -> None:
    for device, host in ((100, 100), (20, 4)):
        bench = Bench(device=device, host=host, prefix_caching=True, swap_ahead=0.8)
        bench.add("a", 41, max_tokens=34)
        bench.step_until(lambda _, bench=bench: not bench.scheduler.has_work)
        assert bench.scheduler.stats.blocks_copied_ahead == 0


def test_what_a_step_swaps_ahead_is_copied_in_the_time_that_its_tokens_take_and_no_earlier_than_needed() -> None:
    rates = Rates(tokens_per_second=100.0, bytes_per_second=300.0)  # three blocks of a byte a token
    memory = KVCacheManager(KVCacheConfig(SIZE, 29, 100))
    scheduler = Scheduler(SchedulerConfig(max_model_len=400, swap_ahead=0.1), memory, rates=rates)
    scheduler.add_request(Request("a", [1] * 100, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    copied = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        copied.append(len(plan.copies.blocks_to_swap_ahead))
        scheduler.update_from_output(plan, all_drawn(plan, 9))
    # Nine steps copy its 26 blocks: they begin when what is free may not suffice for ten more tokens.
    assert copied == [0, 0, 0, *[3] * 9]


def test_a_sequence_ends_at_the_maximum_model_length() -> None:
    bench = Bench(device=200)
    sequence = bench.add("a", 390, max_tokens=10)
    bench.step_until(lambda _: not bench.scheduler.has_work)
    assert sequence.num_tokens == 400


# The token that ends an output


def test_a_choice_that_stops_at_once_says_how_probable_its_stop_token_was() -> None:
    bench, scored = Bench(), TokenLogprobs(-0.5, ((9, -0.5),))
    params = SamplingParams(temperature=0, max_tokens=4, n=2, logprobs=1, stop_token_ids=(9,))
    bench.scheduler.add_request(Request("a", [1] * 3, params))
    plan = bench.scheduler.schedule()
    ended, _ = bench.scheduler.update_from_output(plan, ModelOutput([9, 9], {0: scored, 1: scored}))

    assert [each.index for each in ended] == [0, 1]
    for each in ended:
        assert (each.token_ids, list(each.logprobs), each.finish_reason) == ([], [], FinishReason.STOP)
        assert each.stop_token == StopToken(9, scored)


def test_without_log_probabilities_only_a_stop_token_of_the_request_is_told() -> None:
    bench = Bench(eos_token_ids=frozenset({9}))
    for request_id, rules in (("stops", {"stop_token_ids": (9,)}), ("ends", {}), ("full", {"ignore_eos": True})):
        params = SamplingParams(temperature=0, max_tokens=1, **rules)
        bench.scheduler.add_request(Request(request_id, [1] * 3, params))
    plan = bench.scheduler.schedule()
    outputs, _ = bench.scheduler.update_from_output(plan, all_drawn(plan, 9))
    ended = {each.request_id: each for each in outputs}

    reasons = [ended[each].finish_reason for each in ("stops", "ends", "full")]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [ended[each].stop_token for each in ("stops", "ends", "full")] == [StopToken(9), None, None]


def test_tokens_between_a_choices_first_and_last_come_in_columns() -> None:
    bench = Bench(prefix_caching=True)
    for request_id, length in (("a", 3), ("b", 5)):
        bench.add(request_id, length, max_tokens=2 * SIZE + 2)
    alone, columns = list[tuple[str, int]](), list[tuple[str, int]]()
    while bench.scheduler.has_work:
        plan = bench.scheduler.schedule()
        outputs, tokens = bench.scheduler.update_from_output(plan, all_drawn(plan, 9))
        assert all(output.timings is not None for output in outputs)
        alone += [(output.request_id, output.position) for output in outputs]
        columns += zip(tokens.request_ids, tokens.positions, strict=True)
        assert set(tokens.token_ids) <= {9}
    assert not set(alone) & set(columns)
    assert sorted(alone + columns) == [(name, position) for name in "ab" for position in range(2 * SIZE + 2)]
    for name in "ab":  # those that fill a block are not in columns either
        assert {(name, 0), (name, 2 * SIZE + 1)} <= set(alone)
        assert len([each for each in columns if each[0] == name]) == 2 * SIZE - 2
