"""What an executor reports of its disk and of the transfers to and from it: plain data. ``kv_transfer.disk_tier`` plans
these transfers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class TransferOutcome(IntEnum):
    """What came of a transfer; of several ranks the largest counts. ``DAMAGED``: what was loaded is not what was
    stored. ``FAILED``: the disk cannot be used.
    """

    DONE = 0
    DAMAGED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer. ``seconds`` is how much longer the disk is busy for one more block: how long this one took
    by the number of those that are transferred at once. ``reason`` says why it failed.
    """

    transfer_id: int
    outcome: TransferOutcome = TransferOutcome.DONE
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """A disk as an executor has opened it: its blocks, and hashes with the blocks that they were found in, the oldest
    first. ``block_seconds`` is how long a block takes to load, as was measured, and ``block_bytes`` are those of all
    its parts.
    """

    num_blocks: int
    stored: Sequence[tuple[int, bytes]] = ()
    block_seconds: float = 0.0
    block_bytes: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Returns the fields as values that JSON has."""
        return {**asdict(self), "stored": [(disk_block, block_hash.hex()) for disk_block, block_hash in self.stored]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "DiskContents":
        """Returns the inverse of ``to_plain``."""
        stored = [(disk_block, bytes.fromhex(block_hash)) for disk_block, block_hash in plain["stored"]]
        return cls(**{**plain, "stored": stored})

    @classmethod
    def in_common(cls, parts: Sequence["DiskContents"]) -> "DiskContents":
        """What all of several ranks have, each of which has its part of every block in a file of its own."""
        own, *others = parts
        elsewhere = [set(part.stored) for part in others]
        stored = [each for each in own.stored if all(each in part for part in elsewhere)]
        seconds, num_bytes = max(part.block_seconds for part in parts), sum(part.block_bytes for part in parts)
        return cls(own.num_blocks, stored, seconds, num_bytes)
