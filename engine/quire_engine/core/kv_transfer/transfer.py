"""What an executor reports about its disk and about transfers to and from it: plain data. ``kv_transfer.disk_tier``
plans these transfers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

DISK = "disk"
"""The name of the disk's tier in a ``Transfer``."""


class TransferOutcome(IntEnum):
    """The outcome of a transfer; over several ranks, the largest value. ``DAMAGED``: the loaded data differ from the
    stored data. ``FAILED``: the disk cannot be used.
    """

    DONE = 0
    DAMAGED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer. ``seconds`` is how much longer the disk is busy for one more block: the duration divided
    by the number of concurrent transfers. ``reason`` says why it failed.
    """

    transfer_id: int
    outcome: TransferOutcome = TransferOutcome.DONE
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """A disk as an executor has opened it. ``num_blocks`` is its size. ``stored`` holds pairs of a block and the hash
    found in it, oldest first. ``block_seconds`` is the measured time to load a block. ``block_bytes`` is the size of a
    block with all its parts.
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
        """Returns what all ranks have in common. Each rank keeps its part of every block in its own file."""
        own, *others = parts
        elsewhere = [set(part.stored) for part in others]
        stored = [each for each in own.stored if all(each in part for part in elsewhere)]
        seconds, num_bytes = max(part.block_seconds for part in parts), sum(part.block_bytes for part in parts)
        return cls(own.num_blocks, stored, seconds, num_bytes)
