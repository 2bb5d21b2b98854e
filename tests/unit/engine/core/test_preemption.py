"""The way in which a victim is preempted, and how long it is away."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from quire_engine.config import PreemptionPolicy
from quire_engine.core.absence import PreemptionMode, PreemptionReason, SwapCost, TimeAway
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.preemption import choose_preemption_mode
from quire_engine.core.request import Request, Sequence, SequenceStatus
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import SchedulerOutput
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_proto.sampling import SamplingParams

from tests.support.steps import all_drawn

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
RATES = Rates(tokens_per_second=10, bytes_per_second=10_000)
SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("policy", "has_room", "may_swap", "moved", "uncached", "expected"),
    [
        ("auto", False, True, 1, 1000, (RECOMPUTE, PreemptionReason.HOST_FULL)),
        ("auto", True, False, 1, 1000, (RECOMPUTE, PreemptionReason.TOO_MANY_SWAPPED)),
        ("auto", True, True, 4000, 5, (SWAP, PreemptionReason.CHEAPER)),
        ("auto", True, True, 6000, 5, (RECOMPUTE, PreemptionReason.CHEAPER)),
        ("auto", True, True, 0, 0, (RECOMPUTE, PreemptionReason.CHEAPER)),
        ("swap", True, True, 6000, 5, (SWAP, PreemptionReason.CONFIGURED)),
        ("swap", True, True, 0, 0, (SWAP, PreemptionReason.CONFIGURED)),
        ("swap", False, True, 4000, 5, (RECOMPUTE, PreemptionReason.HOST_FULL)),
        ("swap", True, False, 4000, 5, (RECOMPUTE, PreemptionReason.TOO_MANY_SWAPPED)),
        ("recompute", True, True, 4000, 5, (RECOMPUTE, PreemptionReason.CONFIGURED)),
    ],
)
def test_a_victim_is_preempted_as_configured_or_else_the_cheaper_way_in_seconds(
    policy: PreemptionPolicy,
    has_room: bool,
    may_swap: bool,
    moved: int,
    uncached: int,
    expected: tuple[PreemptionMode, PreemptionReason],
) -> None:
    cost = SwapCost(moved, uncached)
    assert choose_preemption_mode(policy, cost, RATES, host_has_room=has_room, may_swap=may_swap) == expected


def test_a_mode_that_settings_rule_out_is_refused() -> None:
    SimulatedEngineConfig(preemption_mode="swap")
    for wrong in (
        {"preemption_mode": "swap", "swap_space": 0},
        {"preemption_mode": "swap", "max_swapped": 0},
        {"preemption_mode": "recompute", "swap_ahead": 0.9},
        {"preemption_mode": "both"},
    ):
        with pytest.raises(ValidationError):
            SimulatedEngineConfig(**wrong)


class Bench:
    """A scheduler that is stepped by hand, whose clock advances by a second from step to step."""

    def __init__(self, device: int = 10, host: int = 40, **limits: Any) -> None:
        self.seconds = 0
        memory = KVCacheManager(KVCacheConfig(4, device, host), prefix_caching=False)
        config = SchedulerConfig(max_model_len=400, **limits)
        self.scheduler = Scheduler(config, memory, rates=RATES, clock=lambda: self.seconds * SECOND + 1)
        self.times_away: list[TimeAway] = []

    def add(self, request_id: str, prompt: int, max_tokens: int = 16) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(request_id, [1] * prompt, params))
        (sequence,) = self.scheduler._registry.groups[request_id].sequences.values()
        return sequence

    def step(self) -> SchedulerOutput:
        self.seconds += 1
        scheduler_output = self.scheduler.schedule()
        self.scheduler.update_from_output(
            scheduler_output,
            all_drawn(scheduler_output, 9),
        )
        self.times_away += self.scheduler.take_times_away()
        return scheduler_output

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("it never ended")


def when(sequence: Sequence, *names: str) -> list[int]:
    """The steps of its events of these names."""
    return [event.time // SECOND for event in sequence.timings.events if event.name in names]


def test_a_swapped_sequence_is_away_until_it_is_swapped_in() -> None:
    bench = Bench(preemption_mode="swap")
    bench.add("one", 15)
    two = bench.add("two", 13)
    bench.drain()
    (out,), (back,) = when(two, "swap_out"), when(two, "swap_in")
    assert back > out
    assert bench.times_away == [TimeAway(SWAP, back - out)]
    assert (two.timings.away_seconds, two.timings.num_preemptions) == (back - out, 1)
    assert [event.away_seconds for event in two.timings.events] == [0.0, back - out]


@pytest.mark.parametrize("budget", [2048, 3])
def test_a_recomputed_sequence_is_away_until_a_step_computes_what_was_not_computed_before(budget: int) -> None:
    """With three tokens a step it is on the device again long before that."""
    bench = Bench(preemption_mode="recompute", max_num_batched_tokens=budget)
    one, two = bench.add("one", 15), bench.add("two", 13)
    while not bench.scheduler.preempted:
        bench.step()
    out, known = bench.seconds, two.num_tokens
    while two.num_tokens == known:
        bench.step()
    assert one.status is SequenceStatus.FINISHED
    assert when(two, "recompute", "recomputed") == [out, bench.seconds]
    assert bench.times_away == [TimeAway(RECOMPUTE, bench.seconds - out)]
    bench.drain()
    assert two.timings.away_seconds == bench.times_away[0].seconds
    assert len(bench.times_away) == 1


def test_one_that_is_preempted_again_on_its_way_back_is_away_all_the_time() -> None:
    bench = Bench(device=17, preemption_mode="recompute", max_num_batched_tokens=4)
    lengths = ((3, 31), (13, 51), (18, 24), (21, 34))
    sequences = [bench.add(str(index), *each) for index, each in enumerate(lengths)]
    bench.drain()
    again = sequences[2]
    outs, backs = when(again, "recompute"), when(again, "recomputed")
    assert len(outs) > len(backs), "it was not preempted on its way back"
    assert again.timings.num_preemptions == len(outs)
    until_back = [min(out for out in outs if out > since) for since in (0, *backs[:-1])]
    assert [event.away_seconds for event in again.timings.events if event.name == "recomputed"] == [
        back - out for out, back in zip(until_back, backs, strict=True)
    ]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_one_that_is_aborted_while_it_is_away_was_away_until_then(mode: PreemptionPolicy) -> None:
    bench = Bench(preemption_mode=mode)
    bench.add("one", 15)
    two = bench.add("two", 13)
    while not two.timings.events:
        bench.step()
    bench.step()
    bench.step()
    bench.scheduler.abort_request("two")
    bench.step()
    assert bench.times_away == [TimeAway(PreemptionMode(mode), 2.0)]
    assert two.timings.away_seconds == 2.0
    bench.drain()
    assert len(bench.times_away) == 1


def test_a_swapped_sequence_whose_blocks_cannot_be_used_goes_on_being_away() -> None:
    bench = Bench(preemption_mode="swap")
    bench.add("one", 15)
    two = bench.add("two", 13)
    while two.status is not SequenceStatus.SWAPPED:
        bench.step()
    out = bench.seconds
    bench.step()
    bench.scheduler._batch_scheduler.preemptor.invalidate_kv(two)
    assert bench.times_away == []
    bench.drain()
    (back,) = when(two, "recomputed")
    assert bench.times_away == [TimeAway(RECOMPUTE, back - out)]
    assert two.timings.num_preemptions == 1


@given(
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    prompts=st.lists(st.integers(1, 24), min_size=2, max_size=6),
    device=st.integers(12, 20),
    host=st.sampled_from([0, 3, 60]),
    budget=st.sampled_from([4, 9, 2048]),
)
def test_whoever_is_not_preempted_is_never_away_and_every_absence_ends_once(
    mode: PreemptionPolicy, prompts: list[int], device: int, host: int, budget: int
) -> None:
    bench = Bench(device=device, host=host, preemption_mode=mode, max_num_batched_tokens=budget)
    sequences = [bench.add(str(index), prompt, max_tokens=20) for index, prompt in enumerate(prompts)]
    bench.drain()
    for sequence in sequences:
        timings = sequence.timings
        assert sequence.absence is None
        assert (timings.num_preemptions > 0) == (timings.away_seconds > 0)
        assert timings.num_preemptions == len(when(sequence, "swap_out", "recompute"))
        assert timings.away_seconds == sum(event.away_seconds for event in timings.events)
        assert 0 <= timings.away_seconds <= (timings.finished - timings.admitted) / SECOND
    assert sum(each.seconds for each in bench.times_away) == sum(each.timings.away_seconds for each in sequences)
    if mode == "recompute":
        assert {each.mode for each in bench.times_away} <= {RECOMPUTE}
