"""KV memory by reservation: its ranges, the textbook cases of what it wastes, and what static batches cost."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.block_table import BlockTable
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request, Sequence
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.report import SimulationReport, make_report
from quire_engine.simulation.reservation import (
    RESERVATIONS,
    FirstFit,
    KVSlots,
    Memory,
    ReservingKVCacheManager,
    count_slots,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from quire_engine.simulation.simulated_executor import LatencyModel
from quire_engine.simulation.simulator import Simulation
from quire_engine.simulation.step_policies import STEP_POLICIES, Batching
from quire_engine.simulation.trace import Arrival
from quire_proto.sampling import SamplingParams

from tests.support.steps import all_drawn

# Prompts and outputs of the vLLM paper's figure 3, in words: "Four score and seven years ago our" with four tokens of
# output, and "You only live" with three. An output's last token ends it, and is never in the cache.
FIGURE = {"a": (7, 4, 2048), "b": (3, 3, 512)}


def slots_of(table: BlockTable) -> list[int]:
    (group,) = table.groups
    return list(group.block_ids)


def run(
    memory: KVCacheManager, requests: dict[str, tuple[int, int]], batching: Batching = "continuous", longest: int = 2048
) -> Iterator[tuple[dict[str, Sequence], KVSlots]]:
    """Steps a scheduler until everything has ended. Yields, for each step as it is computed, the sequences that run and
    the slots by their class. Requests are prompt and output lengths in tokens.
    """
    limits = SchedulerConfig(max_model_len=longest, max_num_seqs=8)
    scheduler = Scheduler(limits, memory, step_policy=STEP_POLICIES[batching])
    for name, (prompt, output) in requests.items():
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        scheduler.add_request(Request(name, [1] * prompt, params))
    ended = memory.ended if isinstance(memory, ReservingKVCacheManager) else []
    while scheduler.has_work:
        plan = scheduler.schedule()
        running = {each.group.request.request_id: each for each in scheduler.running}
        yield running, count_slots(memory, scheduler.running, ended)
        scheduler.update_from_output(plan, all_drawn(plan, 9))
    assert memory.device_pool.num_free == memory.device_pool.num_blocks
    memory.check_integrity()


@given(st.integers(0, 60), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60), st.data())
def test_ranges_are_first_holes_and_never_overlap(
    end: int, actions: list[tuple[bool, int]], data: st.DataObject
) -> None:
    holes, held = FirstFit(1, end), list[tuple[int, int]]()
    for takes, length in actions:
        if takes and holes.find(length) is not None:
            taken = {slot for start, size in held for slot in range(start, start + size)}
            starts = [at for at in range(1, end) if not taken & set(range(at, at + length)) and at + length <= end]
            start = holes.allocate(length)
            assert start == starts[0]
            held.append((start, length))
        elif held and not takes:
            holes.free(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        assert all(left[1] < right[0] for left, right in pairwise(holes.holes)), "holes that touch are one"
        assert sum(stop - start for start, stop in holes.holes) + sum(size for _, size in held) == max(0, end - 1)
    for each in held:
        holes.free(*each)
    assert holes.holes == ([(1, end)] if end > 1 else [])


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_an_oracle_reserves_least_and_a_power_of_two_no_more_than_all(prompt: int, output: int, more: int) -> None:
    lengths = (prompt, prompt + output, prompt + output + more)
    assert prompt <= reserve_oracle(*lengths) <= reserve_pow2(*lengths) <= reserve_max(*lengths)
    assert reserve_pow2(*lengths) < prompt + 2 * output


def test_the_papers_requests_never_use_2038_and_507_of_their_slots() -> None:
    sizes = {prompt: reserved for prompt, _, reserved in FIGURE.values()}
    memory = ReservingKVCacheManager(KVCacheConfig(16, 201, 0), lambda prompt, *_: sizes[prompt], 2048)
    unused = dict.fromkeys(FIGURE, 0)
    for running, slots in run(memory, {name: lengths[:2] for name, lengths in FIGURE.items()}):
        for name, sequence in running.items():
            unused[name] = sequence.block_table.num_blocks - (sequence.group.limit - 1)
        assert slots.internal == sum(unused[name] for name in running)
    assert unused == {"a": 2038, "b": 507}


def test_paged_the_same_requests_leave_a_slot_empty_each() -> None:
    steps = []
    for running, slots in run(KVCacheManager(KVCacheConfig(4, 10, 0)), {"a": (7, 4), "b": (3, 3)}):
        steps.append(({name: slots_of(each.block_table) for name, each in running.items()}, slots))
    tables, slots = steps[0]
    assert tables == {"a": [1, 2], "b": [3]}
    # After the prompts, the second block of one and the only block of the other have room for one token more.
    assert (slots.tokens, slots.reserved + slots.internal) == (7 + 3, 1 + 1)
    assert steps[2][0] == {"a": [1, 2, 4], "b": [3, 5]}, "a block is taken when the last one is full"


# Prompt and output of four sequences; each has at most seven slots filled, of eight.
FOUR = {"s1": (3, 5), "s2": (2, 2), "s3": (4, 3), "s4": (1, 4)}


@pytest.mark.parametrize(
    ("batching", "held"),
    [("static", [32] * 5), ("continuous", [32, 32, 24, 16, 8])],
)
def test_a_static_batch_holds_all_its_slots_until_its_last_sequence_has_ended(
    batching: Batching, held: list[int]
) -> None:
    memory = ReservingKVCacheManager(
        KVCacheConfig(8, 5, 0), RESERVATIONS["max"], 8, until_batch_ends=batching == "static"
    )
    seen = [(sorted(running), slots) for running, slots in run(memory, FOUR, batching, 8)]
    assert [slots.total - slots.external for _, slots in seen] == held
    # s2 draws its last token in the second step, s3 in the third, s4 in the fourth.
    every = [["s1", "s2", "s3", "s4"]] * 2 + [["s1", "s3", "s4"], ["s1", "s4"], ["s1"]]
    assert [names for names, _ in seen] == every


def test_a_sequence_that_fits_into_no_hole_waits_though_enough_slots_are_free() -> None:
    memory = ReservingKVCacheManager(KVCacheConfig(4, 4, 0), reserve_oracle, 12)
    tables = [BlockTable(b"", num_prompt_tokens=4, max_tokens=5) for _ in range(3)]
    for table in tables:
        memory.attach_cached_blocks(table, [])
    assert [slots_of(table) for table in tables] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    memory.free(tables[0])
    memory.free(tables[2])
    large, small = BlockTable(b"", max_tokens=6), BlockTable(b"", max_tokens=5)
    assert memory.device_pool.num_free == 8
    assert memory.num_free_blocks_after(large, [], 5) < 0 <= memory.num_free_blocks_after(small, [], 4)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 8), st.integers(128, 1000))
def test_as_many_equal_sequences_run_as_their_reservations_fit(prompt: int, output: int, count: int, pool: int) -> None:
    for reserve in RESERVATIONS.values():
        memory = ReservingKVCacheManager(KVCacheConfig(1, 1 + pool, 0), reserve, 128)
        running, _ = next(run(memory, {str(index): (prompt, output) for index in range(count)}, longest=128))
        assert len(running) == min(count, pool // reserve(prompt, prompt + output, 128))


requests = st.dictionaries(
    st.integers(0, 99).map(str), st.tuples(st.integers(1, 40), st.integers(1, 23)), min_size=1, max_size=12
)


def counted(memory: KVCacheManager, running: dict[str, Sequence]) -> KVSlots:
    """Slot by slot, from the tables; no slot has two owners."""
    size, classes = memory.block_size, dict[tuple[int, int], str]()
    for sequence in running.values():
        for position in range(sequence.block_table.num_blocks * size):
            slot = (slots_of(sequence.block_table)[position // size], position % size)
            assert slot not in classes
            later = "reserved" if position < sequence.group.limit - 1 else "internal"
            classes[slot] = "tokens" if position < sequence.num_scheduled_tokens else later
    for table in memory.ended if isinstance(memory, ReservingKVCacheManager) else []:
        abandoned = dict.fromkeys(((slot, 0) for slot in slots_of(table)), "internal")
        assert not classes.keys() & abandoned
        classes |= abandoned
    names, total = list(classes.values()), memory.device_pool.num_blocks * size
    return KVSlots(*map(names.count, ("tokens", "reserved", "internal")), total - len(names))


@given(
    requests, st.sampled_from(get_args(Memory)), st.sampled_from(["continuous", "static", "phased"]), st.integers(4, 20)
)
def test_every_slot_is_in_one_class_and_free_in_the_end(
    lengths: dict[str, tuple[int, int]], memory: Memory, batching: Batching, blocks: int
) -> None:
    capacity, longest = KVCacheConfig(16, 1 + blocks, 0), 64
    manager = (
        KVCacheManager(capacity, prefix_caching=False)
        if memory == "paged"
        else ReservingKVCacheManager(capacity, RESERVATIONS[memory], longest, until_batch_ends=batching == "static")
    )
    served = set()
    for running, slots in run(manager, lengths, batching, longest):
        served |= set(running)
        assert slots == counted(manager, running)
        assert slots.total == blocks * 16
        assert min(slots.tokens, slots.reserved, slots.internal, slots.external) >= 0
        if memory == "paged":
            assert slots.reserved + slots.internal < 16 * max(1, len(running))
        if memory == "oracle" and batching != "static":
            assert slots.internal == 0
    assert served == set(lengths)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20),
    st.sampled_from([1, 4, 16]),
)
@settings(deadline=None, max_examples=25)
def test_where_all_fit_at_once_waste_grows_from_paging_to_the_oracle_to_pow2_to_max(
    rows: list[tuple[float, int, int]], size: int
) -> None:
    """Every memory runs the same steps then, so that waste can be compared: paging has at most a block less one slot of
    each sequence more than the oracle. Where memory is short, steps differ, and no order is certain.
    """
    arrivals = [Arrival(time, prompt, output, (row,), 60) for row, (time, prompt, output) in enumerate(sorted(rows))]
    second = LatencyModel(10_000.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1e9)  # steps of a second
    limits, capacity = SchedulerConfig(max_model_len=128, max_num_seqs=32), KVCacheConfig(size, 1 + 2560 // size, 0)
    runs = {memory: Simulation(limits, capacity, second, memory=memory).run(arrivals) for memory in get_args(Memory)}
    assert len({tuple(each.samples.time) for each in runs.values()}) == 1
    waste = {memory: each.slot_seconds.reserved + each.slot_seconds.internal for memory, each in runs.items()}
    assert waste["oracle"] <= waste["pow2"] <= waste["max"]
    sequence_seconds = sum(output for _, _, output in rows)
    assert waste["paged"] <= waste["oracle"] + (size - 1) * sequence_seconds


def simulate(
    batching: Batching, output: Callable[[int], int], memory: Memory = "paged", requests: int = 96
) -> SimulationReport:
    """All requests are there at the start, with prompts of 64 tokens."""
    preset = PRESETS["a100-8b"]
    limits = SchedulerConfig(max_model_len=2048, max_num_seqs=32)
    capacity = KVCacheConfig(16, 2001, 0, preset.token_bytes * 16)
    arrivals = [Arrival(0.0, 64, output(index), (index,), 64) for index in range(requests)]
    return make_report(Simulation(limits, capacity, preset.latency, memory=memory, batching=batching).run(arrivals))


def test_continuous_batches_win_where_lengths_are_spread_and_only_there() -> None:
    spread, equal = (lambda index: 16 + index * 37 % 497), (lambda _: 256)
    speeds = {
        (batching, name): simulate(batching, output).output_tokens_per_second
        for batching in ("continuous", "static")
        for name, output in (("spread", spread), ("equal", equal))
    }
    assert speeds["continuous", "spread"] > 1.3 * speeds["static", "spread"]
    assert speeds["continuous", "equal"] == pytest.approx(speeds["static", "equal"], rel=0.05)


def test_the_less_is_reserved_the_more_run_at_once() -> None:
    reports = [simulate("continuous", lambda index: 16 + index * 37 % 497, each) for each in ("max", "pow2", "oracle")]
    reports.append(simulate("continuous", lambda index: 16 + index * 37 % 497))
    running = [report.running.mean for report in reports]
    assert running == sorted(running)
    assert [report.slots.internal for report in reports[:3]] == sorted(
        (report.slots.internal for report in reports[:3]), reverse=True
    )
    assert reports[3].waste < 0.1 < reports[2].waste < reports[0].waste
