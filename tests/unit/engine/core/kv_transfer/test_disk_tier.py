"""The disk tier of the prefix cache: what is stored and loaded when, who waits for it, and what fails without harm."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from quire_engine.core.block_pool import BlockRemoved, KVCacheConfig, Tier
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.gates import TransferGate
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.connector import TransferFailure
from quire_engine.core.kv_transfer.disk_tier import STALL_SECONDS
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferOutcome, TransferResult
from quire_engine.core.request import Request, Sequence
from quire_engine.core.scheduler import Scheduler
from quire_proto.sampling import SamplingParams

from tests.support.paged_executor import VOCAB_SIZE, PagedDisk, PagedExecutor, expected_output

SIZE, PROMPT = 4, list(range(33))
WHOLE_BLOCKS = len(PROMPT) // SIZE


class Engine:
    """An engine on paged memory of tokens, which may be restarted with the disk of an earlier one."""

    def __init__(
        self,
        before: "Engine | None" = None,
        *,
        slots: int = 40,
        host: int = 40,
        limits: Mapping[str, object] = MappingProxyType({}),
        **disk: float,
    ) -> None:
        capacity = KVCacheConfig(SIZE, 41, host, block_bytes=100)
        self.executor = PagedExecutor(capacity)
        if before is not None:
            self.executor.disk.slots, self.executor.parents = before.executor.disk.slots, before.executor.parents
        found = self.executor.disk.contents(slots)
        self.memory = KVCacheManager(capacity, disk=DiskContents(slots, found.stored, **disk))
        (self.disk,) = self.memory.tiers.asynchronous
        config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE, max_num_batched_tokens=64, **limits)
        self.scheduler = Scheduler(config, self.memory, rates=Rates(1e3, 1e9))
        self.core = EngineCore(self.scheduler, self.executor, self.receive)
        self.outputs: dict[str, list[int]] = {}
        self.errors: list[object] = []

    def receive(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            self.outputs[output.request_id] = self.outputs.get(output.request_id, []) + output.token_ids
            self.errors += [output.error] if output.error else []

    def add(self, prompt: list[int], max_tokens: int = 6) -> str:
        request_id = f"r{len(self.outputs)}"
        self.outputs[request_id] = []
        self.scheduler.add_request(Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=1)))
        return request_id

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.core.step()
        assert not self.scheduler.has_work, "the engine made no progress"
        assert not self.errors
        assert self.memory.host_pool.num_free == self.memory.host_pool.num_blocks

    def run(self, prompt: list[int] = PROMPT) -> list[int]:
        request_id = self.add(prompt)
        self.finish()
        return self.outputs[request_id]

    def forget(self) -> None:
        """Device and host give up all that they have."""
        for pool in (self.memory.device_pool, self.memory.host_pool):
            for block_id in [pool.allocate() for _ in range(pool.num_free)]:
                pool.decref(block_id)
        self.finish()


EXPECTED = expected_output(PROMPT, 1, 6)


def disk_gate(engine: Engine) -> TransferGate:
    (gate,) = [each for each in engine.scheduler._batch_scheduler.admission._gates if isinstance(each, TransferGate)]
    return gate


def count_looks(engine: Engine) -> tuple[Counter[str], Counter[str]]:
    """By request: how often its gate is asked for it, and how often its blocks are looked for."""
    asked, looked_for = Counter[str](), Counter[str]()
    gate = disk_gate(engine)
    admits, load = gate.admits, engine.memory.begin_load

    def counted_admits(sequence: Sequence) -> bool:
        asked[sequence.request.request_id] += 1
        before = len(loads)
        admitted = admits(sequence)
        looked_for[sequence.request.request_id] += len(loads) - before
        return admitted

    def counted_load(*args: Any, **more: Any) -> tuple[list[bytes], int]:
        loads.append(None)
        return load(*args, **more)

    loads: list[None] = []
    gate.admits, engine.memory.begin_load = counted_admits, counted_load
    return asked, looked_for


def test_what_is_used_once_stays_off_the_disk_and_what_is_used_twice_survives_a_restart() -> None:
    engine = Engine()
    assert engine.run() == EXPECTED
    assert engine.disk.stats.num_stored == 0
    assert engine.run() == EXPECTED
    assert engine.disk.stats.num_stored == WHOLE_BLOCKS
    later = Engine(engine)
    assert later.run() == EXPECTED
    assert later.scheduler.stats.prefix_disk_tokens == WHOLE_BLOCKS * SIZE
    assert later.scheduler.stats.prefix_host_tokens == 0


def test_others_run_while_a_request_waits_for_its_blocks() -> None:
    engine = Engine()
    engine.run()
    engine.run()
    later = Engine(engine)
    later.executor.disk.num_ending = lambda count: 0
    waiting, other = later.add(PROMPT), later.add([7, 7, 7], max_tokens=20)
    for _ in range(10):
        later.core.step()
    assert not later.outputs[waiting]
    assert len(later.outputs[other]) == 10
    later.executor.disk.num_ending = lambda count: count
    later.finish()
    assert later.outputs[waiting] == EXPECTED
    assert later.scheduler.stats.prefix_disk_tokens == WHOLE_BLOCKS * SIZE


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_held() -> None:
    engine = Engine()
    engine.run()
    engine.run()
    later = Engine(engine)
    later.executor.disk.num_ending = lambda count: 0
    later.core.step()
    request_id = later.add(PROMPT)
    later.core.step()
    later.scheduler.abort_request(request_id)
    later.finish()
    assert later.run() == EXPECTED


@pytest.mark.parametrize("outcome", [TransferOutcome.DAMAGED, TransferOutcome.FAILED])
def test_a_load_that_fails_means_computing(outcome: TransferOutcome) -> None:
    engine = Engine()
    engine.run()
    engine.run()
    later = Engine(engine)
    later.executor.disk.outcome = lambda is_load: outcome
    assert later.run() == EXPECTED
    assert later.scheduler.stats.prefix_disk_tokens == 0
    assert later.scheduler.stats.disk_failures.total() == WHOLE_BLOCKS
    assert later.disk.is_on == (outcome is TransferOutcome.DAMAGED)
    assert later.scheduler.get_load().disk_blocks_total == (40 if later.disk.is_on else 0)
    assert not later.disk.pool.stored_blocks()


def test_a_store_that_fails_turns_the_disk_off_and_the_engine_goes_on() -> None:
    engine = Engine()
    engine.executor.disk.outcome = lambda is_load: TransferOutcome.FAILED
    assert [engine.run() for _ in range(3)] == [EXPECTED] * 3
    assert not engine.disk.is_on
    assert engine.disk.stats.num_stored == 0


def test_a_disk_that_answers_no_more_is_not_waited_for() -> None:
    engine = Engine()
    engine.run()
    engine.run()
    later = Engine(engine)
    now = 0
    later.disk._in_flight._clock = lambda: now
    later.executor.disk.take = lambda timeout: []
    request_id = later.add(PROMPT)
    for _ in range(20):
        later.core.step()
    assert not later.outputs[request_id]
    now = int(STALL_SECONDS * 1e9) + 1
    for _ in range(20):
        later.core.step()
    assert later.outputs[request_id] == EXPECTED
    assert later.scheduler.stats.disk_failures == {TransferFailure.STALLED: 1}
    assert not later.scheduler.has_work, "an engine that is idle goes on asking"
    assert later.disk.held_host_blocks
    assert later.scheduler.get_fragmentation().leaked_blocks == 0, "what the disk still holds is not lost"


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    """32 tokens at 1,000 a second."""
    engine = Engine()
    engine.run()
    engine.run()
    for block_seconds, loads in ((0.0039, True), (0.0041, False)):
        later = Engine(engine, block_seconds=block_seconds)
        assert later.run() == EXPECTED
        assert bool(later.disk.stats.num_loaded) == loads


def test_the_disk_is_bounded_and_gives_up_what_was_not_used_for_longest() -> None:
    engine = Engine(slots=2 * WHOLE_BLOCKS)
    prompts = [[number, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts:
        engine.run(prompt)
        engine.run(prompt)
    later = Engine(engine, slots=2 * WHOLE_BLOCKS)
    for prompt, is_there in zip(prompts, (False, True, True), strict=True):
        before = later.disk.stats.num_loaded
        later.run(prompt)
        assert (later.disk.stats.num_loaded > before) == is_there


def test_two_prompts_that_the_host_pool_has_no_room_for_at_once_are_loaded_one_after_the_other() -> None:
    engine = Engine()
    prompts = [[number, *PROMPT[1:]] for number in range(2)]
    for prompt in prompts * 2:
        engine.run(prompt)
    later = Engine(engine, host=2 * WHOLE_BLOCKS)
    ids = [later.add(prompt) for prompt in prompts]
    later.finish()
    assert [later.outputs[each] for each in ids] == [expected_output(prompt, 1, 6) for prompt in prompts]
    assert later.scheduler.stats.prefix_disk_tokens == 2 * WHOLE_BLOCKS * SIZE


def test_a_request_that_waits_is_looked_at_only_when_a_block_of_its_own_has_come() -> None:
    engine = Engine()
    prompts = [[number, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts * 2:
        engine.run(prompt)
    later = Engine(engine, host=100)
    later.executor.disk.num_ending = lambda count: 1
    asked, _ = count_looks(later)
    ids = [later.add(prompt) for prompt in prompts]
    later.finish()
    assert later.disk.stats.num_loaded == 3 * WHOLE_BLOCKS
    assert all(asked[each] <= 1 + WHOLE_BLOCKS for each in ids), "each waits for the last of its blocks first"


def test_a_request_that_waits_for_room_is_looked_at_when_there_is_some() -> None:
    engine = Engine()
    prompts = [[number, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts * 2:
        engine.run(prompt)
    later = Engine(engine, host=2 * WHOLE_BLOCKS)
    later.executor.disk.num_ending = lambda count: 1
    _, looked_for = count_looks(later)
    ids = [later.add(prompt) for prompt in prompts]
    later.finish()
    assert later.disk.stats.num_loaded == 3 * WHOLE_BLOCKS
    assert [looked_for[each] for each in ids] == [1, 2, 3]


MAX_OVERTAKES = 4


def oldest_ends(disk: PagedDisk, count: int = 1) -> list[TransferResult]:
    ending, disk.under_way = disk.under_way[:count], disk.under_way[count:]
    return [TransferResult(transfer.transfer_id, disk._end(transfer)) for transfer in ending]


def with_small_ones(policy: str) -> tuple[Engine, str, list[list[int]]]:
    """An engine that is restarted with a large prompt and many small ones on its disk, of which one block comes in a
    step. The large one waits, and takes all the room that there is for loads. The small ones that are left.
    """
    engine = Engine(slots=200)
    small = [[number % 50, number // 50, 7, 7, *PROMPT[:5]] for number in range(60)]
    for prompt in [PROMPT, *small]:
        engine.run(prompt)
        engine.run(prompt)
    limits = {"max_overtakes": MAX_OVERTAKES, "scheduling_policy": policy}
    later = Engine(engine, slots=200, host=2 * WHOLE_BLOCKS, limits=limits)
    later.executor.disk.take = lambda timeout: oldest_ends(later.executor.disk)
    later.add(small[0], max_tokens=1)
    later.core.step()
    large = later.add(PROMPT)
    later.core.step()
    assert disk_gate(later)._lacking_room
    return later, large, small[1:]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_what_needs_much_room_is_loaded_before_ever_more_that_needs_little(policy: str) -> None:
    later, large, small = with_small_ones(policy)
    ids, steps = [], 0
    while not later.outputs[large]:
        ids.append(later.add(small[steps], max_tokens=1))
        later.core.step()
        steps += 1
        assert steps < 40, "it is overtaken for ever"
    assert 1 <= sum(bool(later.outputs[each]) for each in ids) <= MAX_OVERTAKES + 1, "small ones go first, but not all"
    later.finish()
    assert later.outputs[large] == EXPECTED
    assert all(later.outputs[each] == expected_output(prompt, 1, 1) for each, prompt in zip(ids, small, strict=False))
    assert later.disk.stats.num_loaded >= WHOLE_BLOCKS + 2 * len(ids)


@pytest.mark.parametrize("end", ["aborted", "computed"])
def test_room_that_is_kept_for_one_that_does_not_load_is_everybodys_again(end: str) -> None:
    later, large, small = with_small_ones("fcfs")
    ids = [later.add(prompt, max_tokens=1) for prompt in small[:MAX_OVERTAKES]]
    gate = disk_gate(later)
    while not gate._is_reserved:
        later.core.step()
    ids += [later.add(prompt, max_tokens=1) for prompt in small[MAX_OVERTAKES:9]]
    later.core.step()
    while later.disk._in_flight.loading:  # nothing else will end that the others could wait for
        later.core.step()
    assert not any(later.outputs[each] for each in ids[MAX_OVERTAKES:])
    if end == "aborted":
        later.scheduler.abort_request(large)
    else:
        later.disk._load_time.first = later.disk._load_time.seconds = 1e9
    later.finish()
    assert all(later.outputs[each] for each in ids)
    assert later.outputs[large] == ([] if end == "aborted" else EXPECTED)


def test_a_gate_forgets_who_was_aborted() -> None:
    engine = Engine()
    prompts = [[number, *PROMPT[1:]] for number in range(2)]
    for prompt in prompts * 2:
        engine.run(prompt)
    later = Engine(engine, host=2 * WHOLE_BLOCKS)
    later.executor.disk.num_ending = lambda count: 0
    ids = [later.add(prompt) for prompt in prompts]
    later.core.step()
    gate = disk_gate(later)
    assert gate._waiting_for
    assert gate._lacking_room
    for request_id in ids:
        later.scheduler.abort_request(request_id)
    assert not gate._waiting_for
    assert not gate._lacking_room
    assert not gate._awaited
    later.finish()


@pytest.mark.parametrize("holds", [True, False])
def test_host_blocks_are_held_until_they_are_written(holds: bool) -> None:
    """The control: a block that is given to others before its write took it reaches the disk as something else."""
    engine = Engine(host=12)
    engine.executor.disk.num_ending = lambda count: 0
    engine.run()
    engine.add(PROMPT)
    engine.core.step()
    stores = [*engine.executor.disk.under_way]
    assert stores
    pool = engine.memory.host_pool
    if not holds:
        for transfer in stores:
            pool.decref(transfer.host_block)
    for host_block in [pool.allocate() for _ in range(pool.num_free)]:  # what other sequences do with free blocks
        engine.executor.host[host_block][:] = [b"other"] * SIZE
        pool.decref(host_block)
    if not holds:
        for transfer in stores:
            pool.incref(transfer.host_block)
    engine.executor.disk.num_ending = lambda count: count
    engine.finish()
    later = Engine(engine)
    if holds:
        assert later.run() == EXPECTED
        assert later.disk.stats.num_loaded
    else:
        with pytest.raises(AssertionError):
            later.run()


def test_a_slot_is_found_only_once_it_is_written() -> None:
    engine = Engine()
    engine.run()
    engine.executor.disk.num_ending = lambda count: 0
    engine.add(PROMPT)
    engine.core.step()
    assert not engine.disk.pool.stored_blocks()
    engine.finish()
    assert len(engine.disk.pool.stored_blocks()) == WHOLE_BLOCKS


def test_routers_hear_of_loaded_blocks_as_of_the_hosts() -> None:
    """Nothing is said of the disk itself."""
    engine = Engine()
    engine.run()
    engine.run()
    later = Engine(engine)
    later.core._publish = lambda step: events.extend(step.kv_events)
    events: list[object] = []
    later.add(PROMPT)
    while later.scheduler.has_work:
        later.core.step()
    assert {event.tier for event in events} == {Tier.DEVICE, Tier.HOST}
    assert not any(isinstance(event, BlockRemoved) for event in events)
