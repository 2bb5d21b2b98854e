"""The blocks of one sequence: a table for each group of layers, and what pools know the blocks by."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire_proto.hashing import ROOT, hash_block

from quire_engine.core.block_pool import NULL_BLOCK, Tier


@dataclass(slots=True, kw_only=True)
class GroupTable:
    """The blocks that hold the tokens of one sequence for one group of layers, on the device or, while it is swapped
    out, on the host; exactly one of the two lists is in use.

    ``block_ids[i]`` holds tokens ``[i * block_size, (i + 1) * block_size)``. The first ``num_skipped`` are the null
    block, as no window reaches them any more; ``host_block_ids`` has only those that follow.

    The worker was sent the first ``num_sent`` of ``block_ids``; those at ``changed`` are others by now.
    """

    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    num_skipped: int = 0
    num_sent: int = 0
    changed: list[int] = field(default_factory=list)

    def replace_block(self, index: int, block_id: int) -> None:
        """Puts another block in the place of one that the table has."""
        self.block_ids[index] = block_id
        if index < self.num_sent:
            self.changed.append(index)

    def remove_last_block(self) -> int:
        """Takes the last block from the table, and returns it."""
        block_id = self.block_ids.pop()
        self.num_sent = min(self.num_sent, len(self.block_ids))
        return block_id

    def take_all(self) -> "array[int]":
        """The whole table, for a worker that has nothing of it."""
        self.num_sent = len(self.block_ids)
        self.changed.clear()
        return array("i", self.block_ids)

    def take_changes(self) -> list[int]:
        """The indices at which the worker's table is behind this one, which are sent now."""
        indices = [index for index in self.changed if index < self.num_sent]
        indices += range(self.num_sent, len(self.block_ids))
        self.num_sent = len(self.block_ids)
        self.changed.clear()
        return indices


@dataclass(slots=True)
class BlockTable(GroupTable):
    """The blocks of one sequence: those of the first group of layers are the table's own, and ``others`` are the tables
    of the other groups, which have as many.

    ``block_hashes`` are the hashes of the sequence's full blocks as far as they were needed; they only ever grow,
    because known tokens do not change. ``num_cached_blocks`` counts the blocks of the device table that were offered to
    the pool under their name, and ``num_swapped_ahead`` those of them that ``swap_ahead`` has seen to. After a fork,
    ``tail_shared`` says that the last block may be shared although it is not full. The sequence begins with
    ``num_prompt_tokens`` and ends with ``max_tokens`` at most, which only memory that reserves needs to know.
    """

    extra_key: bytes
    others: tuple[GroupTable, ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_swapped_ahead: int = 0
    tail_shared: bool = False
    num_prompt_tokens: int = 0
    max_tokens: int = 0

    @property
    def groups(self) -> tuple[GroupTable, ...]:
        """The tables of all groups, in their order."""
        return (self, *self.others)

    @property
    def is_sent(self) -> bool:
        """Whether the worker has the tables of all groups as they are now."""
        is_sent = len(self.block_ids) == self.num_sent and not self.changed
        others = self.others
        return is_sent and not (others and any(len(o.block_ids) != o.num_sent or o.changed for o in others))

    @property
    def num_held_blocks(self) -> int:
        """The device blocks of all groups."""
        return sum([len(group.block_ids) - group.num_skipped for group in self.groups]) if self.block_ids else 0

    def copy(self) -> "BlockTable":
        """The same blocks for a sequence that is forked from this one; the caller adds the references."""
        return replace(
            self,
            block_ids=[*self.block_ids],
            host_block_ids=[],
            changed=[],
            others=tuple(
                replace(other, block_ids=[*other.block_ids], host_block_ids=[], changed=[]) for other in self.others
            ),
            block_hashes=[*self.block_hashes],
        )

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
    """What pools know a group's block by: the hash of its tokens, and behind it the group's number unless it is 0."""
    block_hash = table.block_hashes[index]
    return block_hash + bytes((number,)) if number else block_hash
