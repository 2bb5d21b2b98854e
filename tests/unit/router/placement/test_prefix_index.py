"""The prefix index agrees with sets of blocks, whatever comes in which order, and stays within its bounds."""

from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quire_proto import hashing
from quire_proto.hashing import extra_key
from quire_router.placement.prefix_index import (
    MAX_PROMPT_BLOCKS,
    SPECULATIVE_TTL,
    BlockNamespace,
    PrefixIndex,
    SpeculativeEntries,
    Tier,
)

from tests.support.hashes import hash_blocks

ROWS = 12
# Few last bytes, so that shards are shared, and few names, so that engines share blocks.
NAMES = [index.to_bytes(15, "big") + bytes([index % 2]) for index in range(10)]
DAMAGED = [b"", b"short", bytes(17)]

rows = st.integers(0, ROWS - 1)
tiers = st.sampled_from(Tier)
names = st.lists(st.sampled_from(NAMES), max_size=8)
TICK = SPECULATIVE_TTL / 4


def leading(found: list[bool]) -> int:
    return found.index(False) if False in found else len(found)


class IndexMachine(RuleBasedStateMachine):
    @initialize(max_blocks=st.sampled_from([10**6, 10**6, 25]))
    def start(self, max_blocks):
        self.index = PrefixIndex(max_blocks)
        self.max_blocks = max_blocks
        self.stored = {(row, tier): set() for row in range(ROWS) for tier in Tier}
        self.expected: list[tuple[int, bytes, float]] = []
        self.bounds = dict.fromkeys(range(ROWS), 10**9)
        self.left = 0  # entries of rows that were cleared, that may not be swept yet
        self.now = 0.0

    def known(self, row: int) -> set[bytes]:
        return self.stored[row, Tier.DEVICE] | self.stored[row, Tier.HOST]

    @rule(row=rows, tier=tiers, stored=names, damaged=st.sampled_from([None, *DAMAGED]))
    def store(self, row, tier, stored, damaged):
        counts, before = self.index.counts, len(self.known(row))
        dropped, bad = counts.dropped, counts.damaged
        hashes = stored if damaged is None else [*stored, damaged]
        self.index.store(row, tier, hashes)
        assert counts.damaged == bad + (damaged is not None)
        new = [name for name in dict.fromkeys(stored) if name not in self.known(row)]
        if self.max_blocks < 10**6:
            # Which ones had room depends on how much was swept: ask the index itself, and look at how many they are.
            admitted = {name for name in new if self.has(row, name)}
            assert len(admitted) == len(new) or counts.dropped > dropped
        else:
            admitted = set(new[: max(0, self.bounds[row] - before)])
        self.stored[row, tier] |= {name for name in stored if name in admitted or name in self.known(row)}

    def has(self, row: int, name: bytes) -> bool:
        slot = self.index._slots.find(row)
        return slot is not None and int.from_bytes(name, "big") in slot.keys

    @rule(row=rows, tier=tiers, removed=names)
    def remove(self, row, tier, removed):
        self.index.remove(row, tier, [*removed, b"damaged"])
        self.stored[row, tier] -= set(removed)

    @rule(row=rows, then=st.booleans())
    def clear(self, row, then):
        self.index.clear(row)
        self.expected = [entry for entry in self.expected if entry[0] != row]
        self.stored[row, Tier.DEVICE], self.stored[row, Tier.HOST] = set(), set()
        self.bounds[row] = 10**9
        if then:
            self.bounds[row] = 3
            self.index.set_max_blocks(row, 3)

    @rule(budget=st.integers(0, 6))
    def sweep(self, budget):
        before = self.index.counts.blocks
        more = self.index.sweep(budget)
        alive = sum(len(self.known(row)) for row in range(ROWS))
        assert before - self.index.counts.blocks <= budget
        assert more == (self.index.counts.blocks > alive)

    @rule(row=rows, blocks=names)
    def expect(self, row, blocks):
        self.index.add_speculative(row, blocks, self.now)
        end = (self.now // TICK + 1) * TICK + SPECULATIVE_TTL
        self.expected += [(row, name, end) for name in blocks]

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(prompt=names, num_rows=st.integers(0, 20))
    def match(self, prompt, num_rows):
        found = self.index.match(prompt, self.now, num_rows)
        assert len(found.device) == len(found.host) >= num_rows
        self.expected = [entry for entry in self.expected if entry[2] > self.now]
        for row in range(len(found.device)):
            soon = {name for where, name, _ in self.expected if where == row}
            device = self.stored.get((row, Tier.DEVICE), set()) | soon
            either = device | self.stored.get((row, Tier.HOST), set())
            on_device = leading([name in device for name in prompt])
            assert found.device[row] == on_device
            assert found.host[row] == leading([name in either for name in prompt]) - on_device
        for row in range(len(found.device), ROWS):
            assert not self.known(row)

    @invariant()
    def it_is_bounded_and_counts_what_it_has(self):
        if not hasattr(self, "index"):
            return
        slots = [*self.index._slots._rows.values(), *self.index._slots.dead]
        num_blocks = sum(len(slot.keys) for slot in slots)
        assert self.index.counts.blocks == num_blocks <= self.max_blocks
        bits = sum(bool(mask & slot.mask) for slot in slots for shard in self.index._shards for mask in shard.values())
        assert bits == num_blocks
        assert all(mask for shard in self.index._shards for mask in shard.values())
        assert all(len(self.known(row)) <= self.bounds[row] for row in range(ROWS))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def chain(length: int, first: int = 0) -> list[bytes]:
    return [(first + index).to_bytes(15, "big") + bytes([index % 256]) for index in range(length)]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=300))
@settings(max_examples=30, deadline=None)
def test_hundreds_of_engines_are_matched_at_once(depths: list[tuple[int, int]]) -> None:
    index, prompt = PrefixIndex(), chain(64)
    for row, (device, host) in enumerate(depths):
        index.store(row, Tier.DEVICE, prompt[:device])
        index.store(row, Tier.HOST, prompt[device : device + host])
    found = index.match(prompt, 0.0)
    assert found.device.tolist() == [min(64, device) for device, _ in depths]
    assert (found.device + found.host).tolist() == [min(64, device + host) for device, host in depths]


def test_an_uncached_prompt_costs_one_hash_and_a_cached_prefix_one_more_than_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal computed
        computed += 1
        return blake2b(*arguments, **more)

    space, tokens, index = BlockNamespace("revision", 16), list(range(16 * 500)), PrefixIndex()
    cold = space.hashes(tokens)
    index.store(3, Tier.DEVICE, chain(5))
    known = list(space.hashes(tokens))[:7]
    monkeypatch.setattr(hashing, "blake2b", counted)
    index.match(cold, 0.0)
    assert computed == 1
    index.store(3, Tier.HOST, known)
    index.match(cold, 0.0)
    assert computed == 8


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 9), st.binary(max_size=32), st.integers(0, 8))
@settings(deadline=None)
def test_hashes_are_those_that_the_engines_compute(tokens: list[int], size: int, salt: bytes, stop: int) -> None:
    space = BlockNamespace("revision", size)
    hashes = space.hashes(tokens, salt)
    for _, _ in zip(range(stop), hashes, strict=False):
        pass
    expected = hash_blocks(tokens, size, extra_key("revision", salt))
    assert list(hashes) == list(hashes) == expected
    assert len(hashes) == len(expected)


def test_speculative_blocks_of_one_prompt_and_of_all_are_bounded() -> None:
    index = PrefixIndex(speculative=SpeculativeEntries(max_entries=MAX_PROMPT_BLOCKS + 10))
    index.add_speculative(0, chain(1000), 0.0)
    assert index.match(chain(1000), 0.0).device.tolist() == [MAX_PROMPT_BLOCKS]
    index.add_speculative(1, chain(100, first=5000), 0.0)
    assert index.match(chain(100, first=5000), 0.0).device.tolist() == [0, 10]
    index.add_speculative(1, chain(100, first=5000), 10.0)
    assert index.match(chain(100, first=5000), 10.0).device.tolist() == [0, 100]


def test_speculative_blocks_count_for_two_seconds_and_not_for_three() -> None:
    index, prompt = PrefixIndex(), chain(4)
    index.add_speculative(0, prompt, 10.3)
    index.add_speculative(1, prompt, 10.3)
    assert index.match(prompt, 10.3 + SPECULATIVE_TTL).device.tolist() == [4, 4]
    assert index.match(prompt, 10.3 + SPECULATIVE_TTL + TICK).device.tolist() == [0, 0]


def test_a_slot_is_not_reused_while_its_last_user_has_speculative_blocks() -> None:
    index, prompt = PrefixIndex(), chain(4)
    index.add_speculative(0, prompt, 0.0)
    index.clear(0)
    index.store(1, Tier.DEVICE, chain(1, first=900))
    assert index.match(prompt, 0.1, num_rows=2).device.tolist() == [0, 0]


def test_engines_that_join_and_leave_do_not_make_masks_longer() -> None:
    index = PrefixIndex()
    for round_ in range(200):
        index.add_speculative(round_ % 3, chain(3), float(10 * round_))
        index.store(round_ % 3, Tier.DEVICE, chain(50))
        index.clear(round_ % 3)
        index.match(chain(1), float(10 * round_ + 5))
        while index.sweep(10):
            pass
    assert index.counts.blocks == 0
    assert index._slots.num_bytes <= 2
    assert not any(index._shards)


def test_a_bound_is_kept_until_the_row_is_cleared() -> None:
    index = PrefixIndex()
    index.set_max_blocks(0, 3)
    index.store(0, Tier.DEVICE, chain(10))
    index.set_max_blocks(0, 5)
    index.store(0, Tier.HOST, chain(10))
    assert (index.counts.blocks, index.counts.dropped) == (5, 7 + 5)
    index.clear(0)
    index.store(0, Tier.DEVICE, chain(10))
    assert index.match(chain(10), 0.0).device.tolist() == [10]


def test_a_full_index_reuses_the_entries_of_cleared_rows() -> None:
    index = PrefixIndex(max_blocks=100)
    index.store(0, Tier.DEVICE, chain(100))
    index.clear(0)
    index.store(0, Tier.DEVICE, chain(100))
    assert index.match(chain(100), 0.0).device.tolist() == [100]
    assert index.counts.dropped == 0
    index.store(1, Tier.DEVICE, chain(5))
    assert index.counts.dropped == 5
