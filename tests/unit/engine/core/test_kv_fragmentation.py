"""Waste is what a count of every slot would say, and a lost block is noticed."""

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.block_table import BlockTable
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import KVCacheFragmentation, count_leaked_blocks, measure_fragmentation
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_proto.sampling import SamplingParams

SIZE = 4


def tables(scheduler: Scheduler) -> list[tuple[BlockTable, int]]:
    return [(s.block_table, s.num_computed_tokens) for queue in (scheduler.running, scheduler.swapped) for s in queue]


def counted(scheduler: Scheduler) -> KVCacheFragmentation:
    """Slot by slot: every slot of a in_use block, and the ones that some sequence computed a token into."""
    groups = [(group, computed) for table, computed in tables(scheduler) for group in table.groups]
    in_use = {block_id for group, _ in groups for block_id in group.block_ids}
    filled = {
        (group.block_ids[position // SIZE], position % SIZE)
        for group, computed in groups
        for position in range(computed)
        if group.block_ids
    }
    return KVCacheFragmentation(len(in_use) * SIZE - len(filled), len(in_use) * SIZE)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=8),
    budget=st.sampled_from([3, 10, 64]),
    blocks=st.integers(14, 40),
    prefix_caching=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_waste_equals_a_count_of_all_slots_and_no_block_is_unreachable(
    lengths: list[tuple[int, int, int]], budget: int, blocks: int, prefix_caching: bool
) -> None:
    capacity = KVCacheConfig(SIZE, 1 + blocks, 20, block_bytes=1)
    memory = KVCacheManager(capacity, prefix_caching=prefix_caching)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget, max_model_len=56), memory)
    executor = SimulatedExecutor(capacity, PRESETS["cpu"].latency, sleep=lambda _: None)
    core = EngineCore(scheduler, executor, lambda _: None)
    for index, (num_prompt, max_tokens, n) in enumerate(lengths):
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
        scheduler.add_request(Request(str(index), list(range(num_prompt)), params))
    for _ in range(3000):
        if not scheduler.has_work:
            break
        core.step()
        assert measure_fragmentation(memory, tables(scheduler)) == counted(scheduler)
        assert count_leaked_blocks(memory, (table for table, _ in tables(scheduler))) == 0
    assert not scheduler.has_work


def test_a_block_in_use_that_no_table_references_is_unreachable_in_either_pool() -> None:
    memory = KVCacheManager(KVCacheConfig(SIZE, 10, 10))
    table = BlockTable(b"")
    memory.allocate_slots(table, 0, 2 * SIZE)
    assert count_leaked_blocks(memory, [table]) == 0
    memory.device_pool.allocate()
    memory.host_pool.allocate()
    assert count_leaked_blocks(memory, [table]) == 2


def test_a_shared_block_is_as_full_as_in_the_table_that_fills_it_most() -> None:
    memory = KVCacheManager(KVCacheConfig(SIZE, 10, 0))
    one, two = BlockTable(b""), BlockTable(b"")
    block_id = memory.device_pool.allocate()
    memory.device_pool.incref(block_id)
    one.append_blocks([block_id])
    two.append_blocks([block_id])
    assert measure_fragmentation(memory, [(one, 1), (two, 3)]) == KVCacheFragmentation(1, SIZE)
    assert KVCacheFragmentation(0, 0).ratio == 0
