"""The block table of one sequence: which blocks hold its tokens, on the device or, while it is swapped out, on the
host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_proto.hashing import ROOT, hash_block


@dataclass(slots=True)
class BlockTable:
    """``block_ids[i]`` holds tokens ``[i * block_size, (i + 1) * block_size)``; exactly one of the two lists is in
    use.

    ``block_hashes`` are the hashes of the sequence's full blocks as far as they were needed; they only ever grow,
    because known tokens do not change. ``num_cached_blocks`` counts the blocks of the device table that were offered to
    the pool under their name. After a fork, ``tail_shared`` says that the last block may be shared although it is not
    full.
    """

    extra_key: bytes
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    tail_shared: bool = False

    def copy(self) -> "BlockTable":
        """The same blocks for a sequence that parts from this one; whoever copies adds the references."""
        return BlockTable(
            self.extra_key, [*self.block_ids], [], [*self.block_hashes], self.num_cached_blocks, self.tail_shared
        )

    def extend_block_hashes(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Computes names until there are ``num_blocks`` of them; all their tokens must be known."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else ROOT
            self.block_hashes.append(hash_block(parent, token_ids[start : start + block_size], self.extra_key))
