"""Groups of layers with windows: which blocks are given up and which are found, and that nothing is ever read or found
that is not what it should be.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from quire_engine.core.block_pool import NULL_BLOCK, BlockCopy, BlockStored, KVCacheConfig, KVCacheGroup, Tier
from quire_engine.core.block_table import SKIPPED, BlockTable
from quire_engine.core.kv_cache_manager import KVCacheManager

SIZE = 4
Windows = tuple[int | None, ...]


def memory(windows: Windows, device: int = 60, host: int = 40, *, step: int = 8) -> KVCacheManager:
    groups = tuple(KVCacheGroup(window) for window in windows)
    return KVCacheManager(KVCacheConfig(SIZE, device, host, 100, groups, max_step_tokens=step))


def computed(kv: KVCacheManager, tokens: list[int], step: int = 8) -> BlockTable:
    """The table of a sequence that has computed these tokens, in steps of so many."""
    table = kv.new_table(b"")
    start = kv.attach_cached_blocks(table, kv.get_cached_blocks(table, tokens))
    go_on(kv, table, tokens, start, step)
    return table


def go_on(kv: KVCacheManager, table: BlockTable, tokens: list[int], start: int, step: int = 8) -> None:
    while start < len(tokens):
        end = min(start + step, len(tokens))
        kv.allocate_slots(table, start, end)
        kv.cache_full_blocks(table, tokens, end)
        kv.remove_skipped_blocks(table, end)
        start = end


def in_use(kv: KVCacheManager) -> int:
    return kv.device_pool.num_blocks - kv.device_pool.num_free


def cached(kv: KVCacheManager, tokens: list[int]) -> int:
    """The tokens that a request for these, and one more, would find."""
    return SIZE * len(kv.get_cached_blocks(kv.new_table(b""), [*tokens, 99]))


def evict_all(kv: KVCacheManager) -> None:
    for block_id in [kv.device_pool.allocate() for _ in range(kv.device_pool.num_free)]:
        kv.device_pool.decref(block_id)


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 2, 9), (1, 30)])
def test_a_table_changes_at_plain_until_and_at_no_token_before(windows: Windows) -> None:
    kv, tokens = memory(windows), list(range(50))
    table, until = kv.new_table(b""), 0
    for num_computed in range(1, len(tokens)):
        if not kv.has_room(table, num_computed):
            kv.allocate_slots(table, num_computed - 1, num_computed)
        until = kv.unchanged_until(table)
        before = (table.num_cached_blocks, [group.num_skipped for group in table.groups])
        kv.on_computed(table, tokens, num_computed)
        after = (table.num_cached_blocks, [group.num_skipped for group in table.groups])
        assert (before == after) == (num_computed < until)
    kv.fork(table)
    assert kv.unchanged_until(table) == 0


@pytest.mark.parametrize(
    ("window", "num_computed", "first"),
    [(None, 1000, 0), (8, 7, 0), (8, 11, 1), (8, 10, 0), (1, 4, 1), (1, 3, 0), (5, 40, 9), (5, 39, 8)],
)
def test_a_block_is_needed_until_the_window_of_the_next_token_has_left_it(
    window: int | None, num_computed: int, first: int
) -> None:
    assert KVCacheGroup(window).first_block(num_computed, SIZE) == first
    seen = range(0 if window is None else max(0, num_computed + 1 - window), num_computed + 1)
    assert first == seen.start // SIZE


def test_blocks_that_a_window_has_left_are_given_up_and_others_are_kept() -> None:
    kv = memory((None, 8, 3))
    table = computed(kv, list(range(26)))
    whole, long, short = table.groups
    assert [whole.num_skipped, long.num_skipped, short.num_skipped] == [0, 4, 6]
    assert NULL_BLOCK not in whole.block_ids
    assert long.block_ids[:4] == [NULL_BLOCK] * 4
    assert NULL_BLOCK not in long.block_ids[4:] + short.block_ids[6:]
    assert table.num_held_blocks == in_use(kv) == 7 + 3 + 1
    kv.free(table)
    assert in_use(kv) == 0
    kv.check_integrity()


def test_what_was_given_up_is_used_by_others() -> None:
    """This fails where nothing is given up: both sequences together have more blocks than there are."""
    kv = memory((None, 8), device=1 + 30 + 3 + 2 + 2, host=0)
    tables = [computed(kv, [number * 100 + token for token in range(60)], step=4) for number in (1, 2)]
    assert in_use(kv) == 2 * (15 + 2)
    for table in tables:
        kv.free(table)


def test_a_long_sequence_never_holds_more_than_was_said() -> None:
    kv = memory((None, 10, 6), device=200, step=8)
    table, most = kv.new_table(b""), 0
    for end in range(8, 240, 8):
        kv.allocate_slots(table, end - 8, end)
        most = max(most, table.num_blocks - table.groups[1].num_skipped)
        assert in_use(kv) <= kv.capacity.max_blocks(end)
        kv.remove_skipped_blocks(table, end)
    assert most <= -(-(10 - 1 + 8) // SIZE) + 1


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,), (6, 20), (None, None, 5)])
def test_the_tokens_that_are_said_to_fit_do_and_a_block_more_would_not(windows: Windows) -> None:
    kv = memory(windows, device=61, step=8)
    fitting = kv.capacity.usable_tokens
    if None not in windows:
        fitting = 400
    else:
        assert kv.capacity.max_blocks(fitting) <= 60 < kv.capacity.max_blocks(fitting + 1)
    table = computed(kv, list(range(fitting)))
    assert in_use(kv) == table.num_held_blocks
    assert memory(windows, device=len(windows) + 1).capacity.usable_tokens >= SIZE


def test_a_prefix_is_found_where_the_window_behind_it_is_there() -> None:
    kv = memory((None, 8))
    tokens = list(range(40))
    first = computed(kv, tokens)
    kv.free(first)
    assert cached(kv, tokens) == 40
    table = kv.new_table(b"")
    hits = kv.get_cached_blocks(table, [*tokens, 99])
    assert [block is SKIPPED for _, block in hits] == [True] * 8 + [False] * 2
    assert kv.attach_cached_blocks(table, hits) == 40
    assert table.num_held_blocks == in_use(kv) == 12


def test_a_prefix_is_as_long_as_the_windows_blocks_allow() -> None:
    """What was given up is found as long as it is there, and where a block of a window is missing the prefix ends
    before it.
    """
    kv = memory((None, 8))
    tokens = list(range(40))
    kv.free(computed(kv, tokens))
    names = {block_id: name for name, block_id in kv.device_pool._hash_to_block.items()}
    own = {name: block_id for block_id, name in names.items() if name[16:] == b"\1"}
    assert len(own) == 10
    assert cached(kv, tokens[:24]) == 24
    kv.device_pool.forget(list(own.values())[4])
    assert [cached(kv, tokens[:length]) for length in (16, 20, 24, 28, 32)] == [16, 16, 16, 28, 32]
    kv.device_pool.forget(list(own.values())[8])
    assert cached(kv, tokens) == 32


def test_without_the_window_nothing_of_a_prefix_is_found() -> None:
    kv = memory((None, 8), device=60)
    tokens = list(range(40))
    kv.free(computed(kv, tokens))
    for name, block_id in list(kv.device_pool._hash_to_block.items()):
        if name[16:] == b"\1":
            kv.device_pool.forget(block_id)
    assert cached(kv, tokens) == 0
    assert len(kv.stored_blocks()) == 10, "routers know of the blocks of all tokens"


@pytest.mark.parametrize("windows", [(None, 8), (8, None)])
def test_routers_hear_only_of_the_group_that_sees_all_tokens(windows: Windows) -> None:
    kv = memory(windows, device=45, host=20)
    for number in range(16):
        kv.free(computed(kv, [number // 2 % 4 * 100 + token for token in range(40)]))
        kv.take_pending_copies()
    known: set[BlockStored] = set()
    for event in kv.take_events():
        assert len(event.block_hash) == 16
        entry = BlockStored(event.block_hash, event.tier)
        (known.add if isinstance(event, BlockStored) else known.remove)(entry)
    assert known == set(kv.stored_blocks())
    assert {each.tier for each in known} == {Tier.DEVICE, Tier.HOST}


def test_a_swapped_sequence_takes_only_what_its_windows_see_to_the_host() -> None:
    kv = memory((None, 8))
    tokens = list(range(41))
    table = computed(kv, tokens)
    held = table.num_held_blocks
    assert kv.swap_cost(table, 41).bytes_to_move == 2 * held * 100
    assert kv.can_swap_out(table, 41)
    assert kv.swap_out(table, 41) == held == 11 + 3
    kv.take_pending_copies()
    evict_all(kv)
    kv.take_pending_copies()
    assert kv.num_blocks_needed_to_swap_in(table, 41) == held
    assert kv.swap_in(table) == held
    assert [group.num_skipped for group in table.groups] == [0, 8]
    assert table.num_held_blocks == in_use(kv) == held
    kv.free(table)
    kv.take_pending_copies()
    assert kv.host_pool.num_free == kv.host_pool.num_blocks


def test_forks_share_what_their_windows_see_and_part_in_all_groups() -> None:
    kv = memory((None, 8))
    tokens = list(range(22))
    table = computed(kv, tokens)
    held = table.num_held_blocks
    fork = kv.fork(table)
    assert in_use(kv) == held
    assert kv.num_blocks_needed(fork, 22, 23) == 2
    go_on(kv, fork, [*tokens, 1], 22)
    assert len(kv.take_pending_copies().blocks_to_copy) == 2
    assert in_use(kv) == held + 2
    for each in (table, fork):
        kv.free(each)
    assert in_use(kv) == 0


def test_admission_counts_what_a_long_prompt_holds_at_once() -> None:
    kv = memory((None, 8, 8, 8, 8), device=1 + 50 + 4 * 5)
    table, tokens = kv.new_table(b""), list(range(200))
    assert kv.num_free_blocks_after(table, [], len(tokens)) == 0
    go_on(kv, table, tokens, 0)
    assert memory((None,) * 5, device=71).num_free_blocks_after(kv.new_table(b""), [], len(tokens)) < 0


# Everything at once


@dataclass(eq=False)  # one that was forked has equal tokens and tables, and is another
class Sequence:
    tokens: list[int]
    table: BlockTable
    num_computed: int


Slot = tuple[int, tuple[int, ...]] | None


class GroupsStateMachine(RuleBasedStateMachine):
    """A manager, and memory whose slots remember of which group and of which tokens they are."""

    @initialize(
        windows=st.sampled_from([(None,), (None, 6), (None, 3, 10), (7,), (4, 9), (None, None, 1), (2,)]),
        blocks=st.integers(8, 40),
        host=st.sampled_from([0, 6, 40]),
    )
    def start(self, windows: Windows, blocks: int, host: int) -> None:
        self.windows = windows
        self.kv = memory(windows, device=1 + blocks, host=host, step=6)
        self.device: list[list[Slot]] = [[None] * SIZE for _ in range(1 + blocks)]
        self.host: list[list[Slot]] = [[None] * SIZE for _ in range(host)]
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.known: set[BlockStored] = set()

    def copy(self) -> None:
        copies = self.kv.take_pending_copies()

        def move(each: list[BlockCopy], source: list[list[Slot]], target: list[list[Slot]]) -> None:
            for copy in each:
                target[copy.target] = list(source[copy.source])

        move(copies.blocks_to_swap_out, self.device, self.host)
        move(copies.blocks_to_copy, self.device, self.device)
        move(copies.blocks_to_swap_in, self.host, self.device)
        move(copies.blocks_to_swap_ahead, self.device, self.host)

    @rule(stem=st.integers(0, 2), shared=st.integers(0, 40), own=st.integers(1, 6), salt=st.integers(3, 200))
    def admit(self, stem: int, shared: int, own: int, salt: int) -> None:
        tokens = [1000 * stem + place for place in range(shared)] + [salt] * own
        table = self.kv.new_table(b"")
        hits = self.kv.get_cached_blocks(table, tokens)
        for number, group in enumerate(self.kv.capacity.groups):
            first = group.first_block(len(hits) * SIZE, SIZE)
            for index, blocks in enumerate(hits):
                if index < first:
                    assert blocks[number] is SKIPPED
                else:
                    place = self.device if blocks[number].tier is Tier.DEVICE else self.host
                    self.check(place[blocks[number].block_id], number, tokens, index)
        if self.kv.num_free_blocks_after(table, hits, len(tokens)) < 0:
            return
        start = self.kv.attach_cached_blocks(table, hits)
        self.copy()
        self.running.append(Sequence(tokens, table, start))

    def check(self, slots: list[Slot], number: int, tokens: list[int], index: int) -> None:
        for offset in range(SIZE):
            assert slots[offset] == (number, tuple(tokens[: index * SIZE + offset + 1]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), length=st.integers(1, 6), grows=st.booleans())
    def compute(self, which: int, length: int, grows: bool) -> None:
        each = self.running[which % len(self.running)]
        start = each.num_computed
        if start >= len(each.tokens) or grows:
            each.tokens.append(7 + start % 5)
        end = min(start + length, len(each.tokens))
        if start >= end or self.kv.num_blocks_needed(each.table, start, end) > self.kv.device_pool.num_free:
            return
        self.kv.allocate_slots(each.table, start, end)
        self.copy()
        for number, (group, table) in enumerate(zip(self.kv.capacity.groups, each.table.groups, strict=True)):
            first = 0 if group.window is None else max(0, start + 1 - group.window)
            for position in range(first, end):
                block_id = table.block_ids[position // SIZE]
                assert block_id != NULL_BLOCK, "what a token sees was given up"
                slot = (number, tuple(each.tokens[: position + 1]))
                if position < start:
                    assert self.device[block_id][position % SIZE] == slot
                else:
                    assert not self.kv.device_pool.is_shared(block_id), "a block is written that others hold"
                    self.device[block_id][position % SIZE] = slot
        each.num_computed = end
        self.kv.cache_full_blocks(each.table, each.tokens, end)
        self.kv.remove_skipped_blocks(each.table, end)
        for group, table in zip(self.kv.capacity.groups, each.table.groups, strict=True):
            assert table.num_skipped == group.first_block(end, SIZE), "blocks are kept that nothing sees"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        each = self.running[which % len(self.running)]
        if len(self.running) < 6 and each.num_computed == len(each.tokens):
            self.running.append(Sequence([*each.tokens], self.kv.fork(each.table), each.num_computed))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        self.kv.free(self.running.pop(which % len(self.running)).table)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), limit=st.integers(1, 9))
    def swap_ahead(self, which: int, limit: int) -> None:
        assert self.kv.swap_ahead(self.running[which % len(self.running)].table, limit) <= limit
        self.copy()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def swap_out(self, which: int) -> None:
        each = self.running[which % len(self.running)]
        cost = self.kv.swap_cost(each.table, each.num_computed)
        assert 0 <= cost.uncached_tokens <= each.num_computed
        assert 0 <= cost.bytes_to_move <= 200 * self.kv.capacity.max_blocks(each.num_computed)
        if self.kv.can_swap_out(each.table, each.num_computed):
            self.running.remove(each)
            self.kv.swap_out(each.table, each.num_computed)
            self.copy()
            self.swapped.append(each)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99))
    def swap_in(self, which: int) -> None:
        each = self.swapped[which % len(self.swapped)]
        if self.kv.num_blocks_needed_to_swap_in(each.table, each.num_computed) <= self.kv.device_pool.num_free:
            self.swapped.remove(each)
            self.kv.swap_in(each.table)
            self.copy()
            self.running.append(each)

    @rule()
    def press(self) -> None:
        evict_all(self.kv)
        self.copy()

    @invariant()
    def every_block_is_in_one_place_and_those_in_use_are_in_tables(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        held: Counter[int] = Counter()
        groups_of: dict[int, int] = {}
        for each in self.running:
            lengths = {len(group.block_ids) for group in each.table.groups}
            assert len(lengths) == 1
            for number, group in enumerate(each.table.groups):
                assert group.block_ids[: group.num_skipped] == [NULL_BLOCK] * group.num_skipped
                held.update(group.block_ids[group.num_skipped :])
                for block_id in group.block_ids[group.num_skipped :]:
                    assert groups_of.setdefault(block_id, number) == number, "a block is of two groups"
        assert NULL_BLOCK not in held
        assert all(self.kv.device_pool._ref_counts[block_id] == count for block_id, count in held.items())
        assert in_use(self.kv) == len(held)
        for event in self.kv.take_events():
            entry = BlockStored(event.block_hash, event.tier)
            (self.known.add if isinstance(event, BlockStored) else self.known.remove)(entry)
        assert self.known == set(self.kv.stored_blocks())


TestGroups = GroupsStateMachine.TestCase
