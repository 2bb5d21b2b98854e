"""The blocks of one sequence: a table for each group of layers, and what pools know the blocks by."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from quire_proto.hashing import ROOT, hash_block

from quire_engine.core.block_pool import NULL_BLOCK, Tier


@dataclass(slots=True)
class GroupTable:
    """The blocks that hold the tokens of one sequence for one group of layers, on the device or, while it is swapped
    out, on the host; exactly one of the two lists is in use.

    ``block_ids[i]`` holds tokens ``[i * block_size, (i + 1) * block_size)``. The first ``num_skipped`` are the null
    block, as no window reaches them any more; ``host_block_ids`` has only those that follow. In pools, the names of the
    blocks end with ``suffix``.
    """

    suffix: bytes = b""
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    num_skipped: int = 0


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: a table for each group of layers. All have ``num_blocks`` blocks on the device.

    ``block_hashes`` are the hashes of the sequence's full blocks as far as they were needed; they only ever grow,
    because known tokens do not change. ``num_cached_blocks`` counts the blocks of the device tables that were offered
    to the pool under their name, and ``num_swapped_ahead`` those of them that ``swap_ahead`` has seen to. After a fork,
    ``tail_shared`` says that the last block may be shared although it is not full. The sequence begins with
    ``num_prompt_tokens`` and ends with ``max_tokens`` at most, which only memory that reserves needs to know.

    The worker was sent the first ``num_sent`` blocks of each group; those at ``changed`` (a group and an index) are
    others by now.
    """

    extra_key: bytes
    groups: tuple[GroupTable, ...] = field(default_factory=lambda: (GroupTable(),))
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
        """The device blocks of all groups."""
        return sum([len(group.block_ids) - group.num_skipped for group in self.groups]) if self.num_blocks else 0

    def append_blocks(self, block_ids: Iterable[int]) -> None:
        """Adds a block to each group."""
        for group, block_id in zip(self.groups, block_ids, strict=True):
            group.block_ids.append(block_id)
        self.num_blocks += 1

    def replace_block(self, group: int, index: int, block_id: int) -> None:
        """Puts another block in the place of one that a group has."""
        self.groups[group].block_ids[index] = block_id
        if index < self.num_sent:
            self.changed.append((group, index))

    def remove_last_blocks(self) -> list[int]:
        """Takes the last block from each group, and returns these."""
        self.num_blocks -= 1
        self.num_sent = min(self.num_sent, self.num_blocks)
        return [group.block_ids.pop() for group in self.groups]

    def clear(self) -> None:
        """Takes all blocks from the device tables."""
        for group in self.groups:
            group.block_ids.clear()
        self.num_blocks = self.num_swapped_ahead = 0

    def take_all(self) -> tuple["array[int]", ...]:
        """Returns the table of each group, for a worker that has nothing of them."""
        self.num_sent = self.num_blocks
        self.changed.clear()
        return tuple([array("i", group.block_ids) for group in self.groups])

    def take_changes(self) -> list[tuple[int, int, int]]:
        """Returns the blocks that the worker lacks, which are sent now: a group, an index in it, and the block."""
        places = [(number, index) for number, index in self.changed if index < self.num_sent]
        places += product(range(len(self.groups)), range(self.num_sent, self.num_blocks))
        self.num_sent = self.num_blocks
        self.changed.clear()
        return [(number, index, self.groups[number].block_ids[index]) for number, index in places]

    def copy(self) -> "BlockTable":
        """Returns a table of the same blocks for a sequence that is forked from this one; the caller adds the
        references.
        """
        groups = tuple([replace(each, block_ids=[*each.block_ids], host_block_ids=[]) for each in self.groups])
        return replace(self, groups=groups, block_hashes=[*self.block_hashes], changed=[])

    def extend_block_hashes(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Computes names until there are ``num_blocks`` of them; all their tokens must be known."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else ROOT
            self.block_hashes.append(hash_block(parent, token_ids[start : start + block_size], self.extra_key))


class CachedBlock(NamedTuple):
    """A block that holds what is needed, and the pool that it is in."""

    block_id: int
    tier: Tier


CachedBlocks = list[CachedBlock]
"""One block of a prefix: that of each group of layers, ``SKIPPED`` where no window behind the prefix reaches it."""
SKIPPED = CachedBlock(NULL_BLOCK, Tier.DEVICE)


def block_name(table: BlockTable, number: int, index: int) -> bytes:
    """Returns what pools know block ``index`` of a group by: the hash of its tokens, and the group's suffix."""
    return table.block_hashes[index] + table.groups[number].suffix
