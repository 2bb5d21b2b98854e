"""What is best effort is computed with what others leave, and is in nobody's way."""

from typing import Any

import pytest
from quire_engine.core.admission import BEST_EFFORT_RESERVE, QUIET_SECONDS
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_time_model import BEST_EFFORT_PART, MIN_PROMPT_TOKENS, StepTimeModel, StepWork
from quire_proto.errors import QuireError
from quire_proto.priority import BEST_EFFORT, SHADOW
from quire_proto.sampling import SamplingParams

from tests.support.steps import all_drawn

SIZE = 4
POLICIES = ["fcfs", "sjf", "priority"]


class Bench:
    """A scheduler that is stepped by hand; every token drawn is 9. Its clock stands at ``seconds``."""

    def __init__(self, device: int = 100, host: int = 0, *, prefix_caching: bool = False, **limits: Any) -> None:
        self.seconds = 0.0
        self.memory = KVCacheManager(KVCacheConfig(SIZE, device, host), prefix_caching=prefix_caching)
        config = SchedulerConfig(max_model_len=400, **limits)
        self.scheduler = Scheduler(config, self.memory, clock=lambda: round(self.seconds * 1e9))

    def add(self, name: str, prompt: int, max_tokens: int = 10, priority: int = 0) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, [1] * prompt, params, priority=priority))

    def line(self, name: str, prompt: int = 4, max_tokens: int = 10) -> None:
        self.add(name, prompt, max_tokens, BEST_EFFORT)

    def step(self) -> dict[str, int]:
        """How many tokens of which requests a step computes."""
        output = self.scheduler.schedule()
        found = dict.fromkeys(self.scheduler.request_ids(), 0)
        for chunk in output.chunks:
            found[self.scheduler._registry.sequences[chunk.sequence_id].request.request_id] += chunk.length
        self.scheduler.update_from_output(output, _drawn(output))
        return found


def _drawn(output: SchedulerOutput) -> ModelOutput:
    return all_drawn(output, 9)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_compute_prompts_of_others_have_nothing_of_it(policy: str) -> None:
    bench = Bench(max_num_batched_tokens=10, scheduling_policy=policy)
    bench.line("line")
    assert bench.step() == {"line": 4}
    assert bench.step() == {"line": 1}
    bench.add("long", 24)
    assert [bench.step() for _ in range(3)] == [{"long": 10}, {"long": 10}, {"long": 4}]
    assert bench.step() == {"long": 1, "line": 1}
    bench.add("short", 1)
    assert bench.step() == {"long": 1, "short": 1}
    assert bench.step() == {"long": 1, "short": 1, "line": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_others_that_wait_go_first_however_long_it_waited(policy: str) -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=2, scheduling_policy=policy, max_overtakes=1)
    bench.add("running", 4)
    for number in range(3):
        bench.line(f"line {number}")
    for number in range(3):
        bench.add(f"new {number}", 4, max_tokens=2)
    order = [*dict.fromkeys(name for _ in range(20) for name in bench.step())]
    assert order[:5] == ["running", "new 0", "new 1", "new 2", "line 0"]


def test_it_gives_up_its_places_to_others_at_once() -> None:
    bench = Bench(max_num_seqs=2)
    bench.line("one")
    bench.line("two")
    bench.step()
    bench.add("new", 4, max_tokens=3)
    assert bench.step() == {"new": 4}
    assert bench.scheduler.get_load().best_effort == 2
    assert [bench.step() for _ in range(2)] == [{"new": 1, "one": 1}] * 2
    assert bench.step() == {"one": 1, "two": 5}


@pytest.mark.parametrize("host", [0, 40])
def test_it_gives_up_its_memory_to_others_at_once(host: int) -> None:
    bench = Bench(device=11, host=host, preemption_mode="swap" if host else "recompute", max_num_batched_tokens=64)
    bench.line("one", 16)
    bench.line("two", 8)
    bench.step()
    bench.add("new", 28, max_tokens=3)
    assert bench.step() == {"new": 28}
    assert sum(bench.scheduler.stats.preemptions.values()) == 2
    bench.step()
    bench.step()
    assert set(bench.step()) == {"one", "two"}


def test_what_it_is_swapped_out_to_is_not_what_the_other_found_there() -> None:
    bench = Bench(device=9, host=5, prefix_caching=True, preemption_mode="swap", max_num_batched_tokens=64)
    bench.line("line", 5 * SIZE)
    bench.step()
    prompt, host = [2] * (5 * SIZE), bench.memory.host_pool
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    bench.scheduler.add_request(Request("new", prompt, params))
    table = bench.scheduler.waiting.next().block_table
    table.extend_block_hashes(prompt, 2, SIZE)
    for block_hash in table.block_hashes:
        host.cache_block(block_id := host.allocate(), block_hash)
        host.decref(block_id)
    assert len(bench.memory.get_cached_blocks(table, prompt)) == 2
    output = bench.scheduler.schedule()
    assert bench.scheduler.request_ids() == ["new"]
    assert len(output.copies.blocks_to_swap_out) == 5
    assert [(chunk.start, chunk.length) for chunk in output.chunks] == [(0, len(prompt))]
    assert not output.copies.blocks_to_swap_in


def test_others_that_were_preempted_come_back_before_it_and_take_its_memory() -> None:
    bench = Bench(device=10, max_num_batched_tokens=64)
    bench.add("old", 8, 24)
    bench.add("young", 8, 24)
    preempted = False
    for _ in range(60):
        if not preempted and bench.scheduler.preempted:
            preempted = True
            bench.scheduler.abort_request("old")
            bench.line("line", 20)
        names = bench.step()
        if preempted:
            assert set(names) == {"young"}
            break
    assert preempted


def test_an_admission_of_it_leaves_memory_for_others_where_there_are_any() -> None:
    bench = Bench(device=101)
    bench.line("first", 4 * SIZE)
    bench.line("large", int((1 - BEST_EFFORT_RESERVE) * 100 * SIZE))
    assert set(bench.step()) == {"first"}
    bench.scheduler.abort_request("first")
    assert set(bench.step()) == {"large"}


def test_the_waiting_lines_of_batches_are_bounded_for_themselves() -> None:
    bench = Bench(max_waiting=2)
    for number in range(2):
        bench.line(str(number))
    with pytest.raises(QuireError, match="queue is full"):
        bench.line("one more")
    bench.add("another", 4)


def test_the_load_that_routers_see_has_it_apart() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.line("line", 40)
    bench.line("next", 40)
    bench.step()
    bench.add("other", 30)
    load = bench.scheduler.get_load()
    assert (load.best_effort, load.running, load.waiting) == (2, 1, 2)
    assert load.uncomputed_tokens == 30 + 1


MODEL = StepTimeModel(0.010, 0.0001, 0.001, 0.0, 0.0)


def timed(bench: Bench) -> None:
    """What is known of the engine's steps, without which they are not bounded in time."""
    bench.scheduler.step_times.model = MODEL


def test_it_makes_steps_only_a_little_longer_while_there_are_others() -> None:
    bench = Bench(device=1000, max_step_seconds=None, max_num_batched_tokens=1000)
    timed(bench)
    bench.add("other", 4, max_tokens=200)
    bench.step()
    for number in range(12):
        bench.line(f"line {number}", 150, max_tokens=50)
    most = BEST_EFFORT_PART * MODEL.predict(StepWork(sequences=1))
    computed: set[str] = set()
    for _ in range(100):
        step = bench.step()
        lines = {name: tokens for name, tokens in step.items() if name != "other"}
        work = StepWork(sum(each for each in lines.values() if each > 1), sum(each == 1 for each in lines.values()))
        least = StepWork(MIN_PROMPT_TOKENS, 1)
        assert step["other"] == 1
        assert MODEL.predict(work) <= max(most + MODEL.step_seconds, MODEL.predict(least)) + 1e-9
        computed |= lines.keys()
    assert len(computed) > 1, "what is left over is used"


def test_it_has_whole_steps_once_nobody_else_has_come_for_a_while() -> None:
    bench = Bench(device=1000, max_step_seconds=None, max_num_batched_tokens=300)
    timed(bench)
    bench.line("line", 390, max_tokens=2)
    bench.step()  # nobody has ever come
    bench.scheduler.abort_request("line")
    bench.add("other", 4, max_tokens=1)
    bench.step()
    bench.line("line", 390, max_tokens=2)
    assert bench.step()["line"] < 100
    bench.seconds += QUIET_SECONDS + 1
    assert bench.step()["line"] == 300


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shadow_waits_behind_the_lines_of_batches_and_gives_way_before_them(policy: str) -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy=policy)
    bench.add("shadow", 4, 1, SHADOW)
    bench.line("line", max_tokens=1)
    bench.add("other", 4, 1)
    assert [list(bench.step()) for _ in range(3)] == [["other"], ["line"], ["shadow"]]

    bench = Bench(device=4, scheduling_policy=policy)
    bench.add("shadow", 4, 8, SHADOW)
    bench.step()
    bench.line("line", 4, 8)
    kept = [list(bench.step()) for _ in range(12)]
    assert ["line"] in kept, "the memory is not enough for both"
    assert kept.index(["line"]) < len(kept) - 1
    first_alone = next(step for step in kept if len(step) == 1 and step != ["shadow"])
    assert first_alone == ["line"]
