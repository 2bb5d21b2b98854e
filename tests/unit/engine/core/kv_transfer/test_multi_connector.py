"""For any list of tiers: each continues the prefix that those before it have, a tier that fails costs only the tokens
that are computed then, and no block is in two places at once.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.block_pool import BlockCopies, BlockPool, KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.connector import TransferFailure
from quire_engine.core.kv_transfer.disk_tier import DiskTier
from quire_engine.core.kv_transfer.multi_connector import MultiConnector
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferOutcome, TransferResult
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_proto.hashing import extra_key
from quire_proto.sampling import SamplingParams

from tests.support.hashes import hash_blocks
from tests.support.paged_executor import VOCAB_SIZE, PagedDisk, PagedExecutor, expected_output, prefix_digests

SIZE, BLOCKS, MAX_TOKENS = 4, 6, 5
PROMPT = [7 * number % VOCAB_SIZE for number in range(BLOCKS * SIZE + 1)]
NAMES = hash_blocks(PROMPT, SIZE, extra_key("", b""))
DIGESTS = prefix_digests(PROMPT)
CONTENTS = [[digest + b"\0" for digest in DIGESTS[start : start + SIZE]] for start in range(0, BLOCKS * SIZE, SIZE)]
CAPACITY = KVCacheConfig(SIZE, 41, 40, block_bytes=100)
Health = Literal["well", "damaged", "failing", "off"]
Blocks = set[int]
SOME_BLOCKS = st.one_of(st.integers(0, BLOCKS).map(lambda count: {*range(count)}), st.sets(st.integers(0, BLOCKS - 1)))
DISKS = st.lists(st.tuples(SOME_BLOCKS, st.sampled_from(["well", "damaged", "failing", "off"])), max_size=3)


class PagedDisks:
    """A disk for each tier, which gets the transfers that this tier has begun, and ends some of them in each round."""

    def __init__(self, tiers: Sequence[DiskTier], disks: Sequence[PagedDisk]) -> None:
        self.tiers = tiers
        self.disks = disks
        self.loaded: list[list[bytes]] = [[] for _ in disks]

    def submit(self, copies: BlockCopies) -> None:
        for tier, disk, loaded in zip(self.tiers, self.disks, self.loaded, strict=True):
            mine = [each for each in copies.transfers if each.tier == tier.name]
            loaded += [each.block_hash for each in mine if each.is_load]
            disk.submit(BlockCopies(transfers=mine))

    def take(self, timeout: float) -> list[TransferResult]:
        return [result for disk in self.disks for result in disk.take(timeout)]


class CheckedExecutor(PagedExecutor):
    """Notices a block that is written by two of the copies and transfers that are under way."""

    disks: PagedDisks

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        copies = scheduler_output.copies
        on_device = [each.target for each in (*copies.blocks_to_copy, *copies.blocks_to_swap_in)]
        on_host = [each.target for each in (*copies.blocks_to_swap_out, *copies.blocks_to_swap_ahead)]
        for tier in self.disks.tiers:
            in_flight = tier._in_flight._transfers.values()
            on_host += [each.transfer.host_block for each in in_flight if each.transfer.is_load]
            on_disk = [each.transfer.tier_block for each in in_flight]
            assert len(set(on_disk)) == len(on_disk), "two transfers use a block of one disk"
        for targets in (on_device, on_host):
            assert len(set(targets)) == len(targets), "a block is written twice"
        return super().execute_model(scheduler_output)


class Engine:
    """An engine that has some of the blocks of ``PROMPT`` on the device, on the host and on each disk."""

    def __init__(self, device: Blocks, host: Blocks, disks: Sequence[tuple[Blocks, Health]], random: Random) -> None:
        self.executor = CheckedExecutor(CAPACITY)
        self.executor.parents = dict(zip(DIGESTS, [b"", *DIGESTS], strict=False))
        self.memory = KVCacheManager(CAPACITY)
        _fill(self.memory.device_pool, self.executor.device, device)
        _fill(self.memory.host_pool, self.executor.host, host)
        self.tiers = [
            DiskTier(DiskContents(40, [(i, NAMES[i]) for i in blocks]), self.memory.device_pool, self.memory.host)
            for blocks, _ in disks
        ]
        for number, tier in enumerate(self.tiers):
            tier.name = f"disk {number}"
        self.memory.tiers = MultiConnector([self.memory.host, *self.tiers])
        self.disks = PagedDisks(self.tiers, [self._disk(blocks, health, random) for blocks, health in disks])
        self.executor.disk = self.executor.disks = self.disks
        for tier, (_, health) in zip(self.tiers, disks, strict=True):
            if health == "off":
                tier.fail(TransferFailure.FAILED, "a test says so")
        config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE, max_num_batched_tokens=64)
        self.scheduler = Scheduler(config, self.memory, rates=Rates(1e3, 1e9))
        self.core = EngineCore(self.scheduler, self.executor, self._receive)
        self._output: list[int] = []

    def run(self) -> list[int]:
        """The output for ``PROMPT``; then all that tiers keep of it is stored."""
        self._output = []
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
        self.scheduler.add_request(Request("r", PROMPT, params))
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.core.step()
        assert not self.scheduler.has_work, "the engine made no progress"
        return self._output

    def pools(self) -> Iterator[BlockPool]:
        yield from (self.memory.device_pool, self.memory.host_pool, *(tier.pool for tier in self.tiers))

    def _disk(self, blocks: Blocks, health: Health, random: Random) -> PagedDisk:
        disk = PagedDisk(self.executor.host)
        disk.slots = {i: (NAMES[i], CONTENTS[i]) for i in blocks}
        disk.num_ending = lambda count: random.randint(0, count)
        outcome = {"damaged": TransferOutcome.DAMAGED, "failing": TransferOutcome.FAILED}.get(health)
        disk.outcome = lambda is_load: outcome if outcome and (is_load or health == "failing") else TransferOutcome.DONE
        return disk

    def _receive(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            assert output.error is None
            self._output += output.token_ids


def _fill(pool: BlockPool, memory: list[list[bytes]], blocks: Blocks) -> None:
    """Puts blocks into a pool, free and findable."""
    for index in blocks:
        block_id = pool.allocate()
        memory[block_id][:] = CONTENTS[index]
        pool.cache_block(block_id, NAMES[index])
        pool.decref(block_id)


def _prefix(blocks: Blocks) -> int:
    return next(count for count in range(BLOCKS + 1) if count not in blocks)


@given(device=SOME_BLOCKS, host=SOME_BLOCKS, disks=DISKS, seed=st.integers(0, 1000))
def test_each_tier_continues_the_prefix_that_those_before_have_and_a_failure_costs_only_computing(
    device: Blocks, host: Blocks, disks: list[tuple[Blocks, Health]], seed: int
) -> None:
    engine = Engine(device, host, disks, Random(seed))
    near = device | host
    wanted: list[list[bytes]] = []
    for blocks, health in disks:
        loads = [i for i in range(_prefix(near | blocks)) if i not in near and health != "off"]
        wanted.append([NAMES[i] for i in loads])
        near = near.union(loads if health == "well" else ())
    assert engine.run() == expected_output(PROMPT, 1, MAX_TOKENS)
    assert engine.disks.loaded == wanted
    found, stats = {*range(_prefix(near))}, engine.scheduler.stats
    assert stats.prefix_device_tokens == len(found & device) * SIZE
    assert stats.prefix_host_tokens == len(found & host - device) * SIZE
    assert stats.prefix_disk_tokens == len(found - host - device) * SIZE
    assert stats.computed_tokens == len(PROMPT) - len(found) * SIZE + MAX_TOKENS - 1


@given(device=SOME_BLOCKS, host=SOME_BLOCKS, disks=DISKS, seed=st.integers(0, 1000))
def test_what_is_used_twice_is_kept_by_every_tier_that_works_and_every_block_comes_back(
    device: Blocks, host: Blocks, disks: list[tuple[Blocks, Health]], seed: int
) -> None:
    engine = Engine(device, host, disks, Random(seed))
    assert [engine.run() for _ in range(2)] == [expected_output(PROMPT, 1, MAX_TOKENS)] * 2
    for tier, (_, health) in zip(engine.tiers, disks, strict=True):
        assert tier.is_on or health in ("failing", "off")
        assert [tier.look_up(name) is not None for name in NAMES] == [tier.is_on] * BLOCKS
    engine.memory.check_integrity()
    assert [pool.num_free for pool in engine.pools()] == [pool.num_blocks for pool in engine.pools()]


def test_the_counts_of_the_disk_leave_out_other_tiers() -> None:
    engine = Engine(set(), set(), [({*range(BLOCKS)}, "well")], Random(1))
    engine.tiers[0].name = "elsewhere"
    engine.run()
    assert engine.tiers[0].stats.num_loaded
    assert engine.scheduler.stats.disk_blocks_loaded == engine.scheduler.get_load().disk_blocks_total == 0
