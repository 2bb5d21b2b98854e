"""The blocks of one sequence: a block table per group of layers, and the names under which pools find the blocks."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from quire_proto.hashing import ROOT, hash_block

from quire_engine.core.block_pool import NULL_BLOCK, Tier


@dataclass(slots=True)
class GroupTable:
    """The blocks that hold the tokens of one sequence for one group of layers. They are on the device or, while the
    sequence is swapped out, on the host; exactly one of the two lists is in use.

    ``block_ids[i]`` holds tokens ``[i * block_size, (i + 1) * block_size)``. The first ``num_skipped`` entries are the
    null block, because no window reaches them any more; ``host_block_ids`` has only the entries after them. Names of
    the group's blocks in pools end with ``suffix``.
    """

    suffix: bytes = b""
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    num_skipped: int = 0


@dataclass(slots=True)
class StateTable:
    """The states of one sequence, on the device or, while it is swapped out, on the host (see ``state_pool``). Both
    lists and ``num_skipped`` are as in ``GroupTable``.

    The first ``num_cached`` states were offered to the pool under their names. The worker was sent the first
    ``num_sent``, and the entries ``changed`` were replaced since.
    """

    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    num_skipped: int = 0
    num_cached: int = 0
    num_sent: int = 0
    changed: list[int] = field(default_factory=list)

    def replace(self, index: int, block_id: int) -> None:
        """Replaces one state."""
        self.block_ids[index] = block_id
        if index < self.num_sent:
            self.changed.append(index)

    def take_all(self) -> "array[int]":
        """Returns the whole table, for a worker that has none of it, and marks it as sent."""
        self.num_sent = len(self.block_ids)
        self.changed.clear()
        return array("i", self.block_ids)

    def take_changes(self) -> list[tuple[int, int]]:
        """Returns what the worker lacks, as (index, block id), and marks it as sent."""
        indexes = [*self.changed, *range(self.num_sent, len(self.block_ids))]
        self.num_sent = len(self.block_ids)
        self.changed.clear()
        return [(index, self.block_ids[index]) for index in indexes]

    def copy(self) -> "StateTable":
        """Returns a table of the same states. The caller adds the references."""
        return replace(self, block_ids=[*self.block_ids], host_block_ids=[], changed=[])


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: a block table per group of layers. All have ``num_blocks`` blocks on the device.
    ``states`` has the states of recurrent layers; None without such layers.

    ``block_hashes`` are the hashes of the sequence's full blocks, computed only when needed; the list only grows,
    because known tokens do not change. ``num_cached_blocks`` counts the device blocks that were offered to the pool
    under their name; ``swap_ahead`` has handled the first ``num_swapped_ahead`` of them. After a fork, ``tail_shared``
    is True while the last block may be shared although it is not full. The sequence starts with ``num_prompt_tokens``
    and has at most ``max_tokens``; only memory that reserves blocks uses these two.

    The worker was sent the first ``num_sent`` blocks of each group. The entries ``changed`` (group, index) were
    replaced since.
    """

    extra_key: bytes
    groups: tuple[GroupTable, ...] = field(default_factory=lambda: (GroupTable(),))
    states: StateTable | None = None
    num_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_swapped_ahead: int = 0
    tail_shared: bool = False
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    num_sent: int = 0
    changed: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_held_blocks(self) -> int:
        """The number of device blocks in all groups, without null blocks."""
        return sum([len(group.block_ids) - group.num_skipped for group in self.groups]) if self.num_blocks else 0

    def append_blocks(self, block_ids: Iterable[int]) -> None:
        """Appends one block to each group."""
        for group, block_id in zip(self.groups, block_ids, strict=True):
            group.block_ids.append(block_id)
        self.num_blocks += 1

    def replace_block(self, group: int, index: int, block_id: int) -> None:
        """Replaces one block of a group."""
        self.groups[group].block_ids[index] = block_id
        if index < self.num_sent:
            self.changed.append((group, index))

    def remove_last_blocks(self) -> list[int]:
        """Removes the last block of each group and returns them."""
        self.num_blocks -= 1
        self.num_sent = min(self.num_sent, self.num_blocks)
        return [group.block_ids.pop() for group in self.groups]

    def clear(self) -> None:
        """Removes all blocks from the device tables."""
        for group in self.groups:
            group.block_ids.clear()
        self.num_blocks = self.num_swapped_ahead = 0

    def take_all(self) -> tuple["array[int]", ...]:
        """Returns the table of each group, then the table of states, for a worker that has none of them. Marks all as
        sent.
        """
        self.num_sent = self.num_blocks
        self.changed.clear()
        tables = [array("i", group.block_ids) for group in self.groups]
        if self.states is not None:
            tables.append(self.states.take_all())
        return tuple(tables)

    def take_changes(self) -> list[tuple[int, int, int]]:
        """Returns what the worker lacks, as (table, index, block id), and marks it as sent. The table of states comes
        after the groups' tables. It changes only together with another one.
        """
        places = [(number, index) for number, index in self.changed if index < self.num_sent]
        places += product(range(len(self.groups)), range(self.num_sent, self.num_blocks))
        self.num_sent = self.num_blocks
        self.changed.clear()
        changes = [(number, index, self.groups[number].block_ids[index]) for number, index in places]
        if self.states is not None:
            changes += [(len(self.groups), index, block_id) for index, block_id in self.states.take_changes()]
        return changes

    def copy(self) -> "BlockTable":
        """Returns a table of the same blocks, for a forked sequence. The caller adds the references."""
        groups = tuple([replace(each, block_ids=[*each.block_ids], host_block_ids=[]) for each in self.groups])
        states = None if self.states is None else self.states.copy()
        return replace(self, groups=groups, states=states, block_hashes=[*self.block_hashes], changed=[])

    def extend_block_hashes(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Computes block hashes until there are ``num_blocks``. All tokens of these blocks must be known."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else ROOT
            self.block_hashes.append(hash_block(parent, token_ids[start : start + block_size], self.extra_key))


class CachedBlock(NamedTuple):
    """A block found in a pool, and the tier that it is in."""

    block_id: int
    tier: Tier


CachedBlocks = list[CachedBlock]
"""One block of a prefix: an entry per group of layers, ``SKIPPED`` where no window after the prefix reaches the block.
"""
SKIPPED = CachedBlock(NULL_BLOCK, Tier.DEVICE)


def block_name(table: BlockTable, number: int, index: int) -> bytes:
    """Returns the name of block ``index`` of a group in pools: the hash of its tokens, then the group's suffix."""
    return table.block_hashes[index] + table.groups[number].suffix
