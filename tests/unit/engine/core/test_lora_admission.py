"""A step has at most so many adapters; requests for others wait, but not for ever, and keep nobody else waiting."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest, LoRAStats
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import SchedulerOutput
from quire_proto.sampling import SamplingParams

from tests.support.steps import PlainRows, all_drawn

LORAS = {name: LoRARequest(name, number, name, name.encode()) for number, name in enumerate("xyz", 1)}


class Bench:
    """A scheduler that is stepped by hand; every token drawn is 9. Requests are named after their adapters: ``x3``."""

    def __init__(self, **limits: Any) -> None:
        self.memory = KVCacheManager(KVCacheConfig(4, 200, 0), prefix_caching=True)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=100, **limits), self.memory)
        self.cached: dict[str, int] = {}
        self.rows = PlainRows()

    def add(self, *names: str, prompt: int = 3, max_tokens: int = 3) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for name in names:
            self.scheduler.add_request(Request(name, [1] * prompt, params, lora=LORAS.get(name[0])))

    def step(self) -> list[str]:
        """The requests of the step."""
        scheduler_output = self.scheduler.schedule()
        names = self.scheduler.request_ids()
        self.rows.update(scheduler_output)
        assert [self._name(self.rows.requests[row].lora) for row in scheduler_output.rows] == [
            name[0] if name[0] in LORAS else None for name in names
        ]
        self._update(scheduler_output)
        return names

    def count(self) -> LoRAStats:
        """The metrics, counted from all sequences."""
        queues = self.scheduler.running, self.scheduler.swapped, self.scheduler.preempted, self.scheduler.waiting
        running, swapped, preempted, waiting = (
            [lora for sequence in queue if (lora := sequence.request.lora) is not None] for queue in queues
        )
        used = {*running, *swapped, *preempted}
        is_full = len(used) >= self.scheduler.config.max_loras
        return LoRAStats(
            tuple(sorted({lora.lora_name for lora in running})),
            tuple(sorted({lora.lora_name for lora in (*swapped, *preempted, *waiting)})),
            len(used),
            sum(lora not in used for lora in waiting) if is_full else 0,
        )

    def _update(self, scheduler_output: SchedulerOutput) -> None:
        outputs, _ = self.scheduler.update_from_output(scheduler_output, all_drawn(scheduler_output, 9))
        for output in outputs:
            self.cached[output.request_id] = output.cached_tokens

    def _name(self, lora: LoRARequest | None) -> str | None:
        return None if lora is None else lora.lora_name


def test_others_wait_and_those_behind_them_go_first() -> None:
    bench = Bench(max_loras=2)
    bench.add("x1", "y1", "z1", "base", "x2", "z2")
    assert bench.step() == ["x1", "y1", "base", "x2"]
    assert bench.step() == ["x1", "y1", "base", "x2"]
    assert bench.step() == ["x1", "y1", "base", "x2"]
    assert bench.step() == ["z1", "z2"]


def test_a_place_is_taken_as_soon_as_an_adapters_last_request_ends() -> None:
    bench = Bench(max_loras=1)
    bench.add("x1", max_tokens=2)
    bench.add("y1", max_tokens=1)
    bench.add("x2", max_tokens=1)
    assert [bench.step() for _ in range(3)] == [["x1", "x2"], ["x1"], ["y1"]]


def test_an_abort_of_the_last_request_frees_the_place() -> None:
    bench = Bench(max_loras=1)
    bench.add("x1", "y1")
    assert bench.step() == ["x1"]
    bench.scheduler.abort_request("x1")
    assert bench.step() == ["y1"]


def test_an_abort_of_who_was_passed_over_lets_the_others_go_on() -> None:
    bench = Bench(max_loras=1, max_overtakes=1)
    bench.add("x1", "y1", "x2", "x3")
    assert bench.step() == ["x1", "x2"], "another one would overtake y1 once more"
    assert bench.step() == ["x1", "x2"]
    bench.scheduler.abort_request("y1")
    assert bench.step() == ["x1", "x2", "x3"]


def test_who_waits_for_something_else_is_not_overtaken_for_its_adapter() -> None:
    bench = Bench(max_loras=2, max_overtakes=1)
    bench.add("base", "x1")
    waiting = bench.scheduler.waiting
    waiting.hold(next(iter(waiting)))  # as for blocks from the disk
    bench.add("x2", "x3")
    assert bench.step() == ["x1", "x2", "x3"]


def test_metrics_say_which_adapters_run_and_how_many_sequences_wait_for_a_slot() -> None:
    bench = Bench(max_loras=1, max_num_seqs=2)
    bench.add("x1", "x2", "x3", "y1", "z1", "base")
    assert bench.scheduler.get_load().loras == LoRAStats((), ("x", "y", "z"), 0, 0)
    assert bench.step() == ["x1", "x2"]
    assert bench.scheduler.get_load().loras == LoRAStats(("x",), ("x", "y", "z"), 1, 2)
    for name in ("x3", "z1"):
        bench.scheduler.abort_request(name)
    assert bench.scheduler.get_load().loras == LoRAStats(("x",), ("y",), 1, 1)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_stream_of_requests_for_one_adapter_does_not_keep_another_waiting(policy: str) -> None:
    """Every step brings one more for ``x``, of which some always run."""
    bench = Bench(max_loras=1, max_overtakes=5, scheduling_policy=policy)
    bench.add("x0", "y0")
    for number in range(1, 40):
        names = bench.step()
        if "y0" in names:
            break
        assert names
        bench.add(f"x{number}", "base" if number == 5 else f"x-{number}")
    else:
        raise AssertionError("it waited for ever")
    assert 5 < number < 12
    assert "base" in bench.cached, "a request without an adapter does not wait for those with one"


def test_blocks_of_one_adapter_are_no_others() -> None:
    bench = Bench(max_loras=3)
    for name in ("x1", "x2", "y1", "base1", "base2"):
        bench.add(name, prompt=9, max_tokens=1)
        bench.step()
    assert bench.cached == {"x1": 0, "x2": 8, "y1": 0, "base1": 0, "base2": 8}


@given(
    st.lists(st.lists(st.sampled_from(["x", "y", "z", "b"]), max_size=4), max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["fcfs", "sjf", "priority"]),
    st.sampled_from([1, 2, 64]),
)
def test_every_request_ends_and_no_step_has_too_many_adapters(
    arrivals: list[list[str]], max_loras: int, max_num_seqs: int, policy: str, max_overtakes: int
) -> None:
    bench = Bench(max_loras=max_loras, max_num_seqs=max_num_seqs, scheduling_policy=policy, max_overtakes=max_overtakes)
    for step, names in enumerate(arrivals):
        bench.add(*[f"{name}{step}-{index}" for index, name in enumerate(names)])
        assert len({name[0] for name in bench.step() if name[0] in LORAS}) <= max_loras
        assert bench.scheduler.get_load().loras == bench.count()
    for _ in range(4 * sum(map(len, arrivals))):
        assert len({name[0] for name in bench.step() if name[0] in LORAS}) <= max_loras
        assert bench.scheduler.get_load().loras == bench.count()
    assert not bench.scheduler.has_work
    assert bench.scheduler.get_load().loras == LoRAStats()


def test_a_gate_forgets_who_was_aborted_while_it_was_held() -> None:
    """Else those who come and go while one adapter runs on would fill the memory."""
    bench = Bench(max_loras=1)
    bench.add("x1", max_tokens=50)
    bench.step()
    for number in range(5):
        bench.add(f"y{number}")
        bench.step()
        bench.scheduler.abort_request(f"y{number}")
    gate = bench.scheduler._batch_scheduler.admission.loras
    assert not gate._held
    assert bench.step() == ["x1"]
