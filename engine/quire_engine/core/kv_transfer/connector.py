"""``KVConnector``: a tier of KV memory behind the device's pool, as the scheduler sees it. The name is vLLM's, the
interface is not. The scheduler plans what moves, and the worker moves it.

Tiers are one list, the nearest first (``multi_connector.make_tiers``). docs/contributing.md says how to add one.
Callers ask what a tier can do, never which one it is. Each tier continues the prefix that the tiers before it have. A
block that the device's pool gives up goes down the list until a tier does not take it.

A step copies blocks between the device and the host pool only, so there are two kinds of tiers:

* The blocks of a ``KVConnector`` are in the host pool. A step reads them there.
* The blocks of an ``AsyncKVConnector`` (``is_async``) are elsewhere. It loads them into the host pool over several
  steps, while their request waits (``gates.TransferGate``) and others run. Then the prefix cache finds them in the host
  pool. If a load fails, it does not, and the tokens are computed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from quire_engine.core.block_pool import BlockCopies
from quire_engine.core.block_table import BlockTable
from quire_engine.core.kv_transfer.transfer import TransferResult


class KVConnector(Protocol):
    """A tier that knows blocks by their names (``block_name``). Used by the scheduler's thread."""

    @property
    def is_async(self) -> bool:
        """Whether this is an ``AsyncKVConnector``. Constant."""
        ...

    def look_up(self, name: bytes) -> int | None:
        """Returns the tier's block with these contents, or None. It is a block of the host pool unless the tier
        ``is_async``.
        """
        ...

    def on_reuse(self, table: BlockTable) -> None:
        """Notes that a request begins with the blocks of ``table``. Blocks that are used again are worth keeping."""
        ...

    def on_evict(self, copies: BlockCopies, block_id: int, name: bytes) -> bool:
        """Takes a block that the device's pool gives up, if the block is worth it, and adds the copy to ``copies`` of
        the step that is being scheduled. Returns whether the tier took it, and not if it had the block.
        """
        ...


class AsyncKVConnector(KVConnector, Protocol):
    """A tier that exchanges blocks with the host pool by transfers that take several steps. Counts are in blocks."""

    @property
    def name(self) -> str:
        """The name of the tier in transfers, by which the worker knows who moves the blocks. Constant."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that the tier can hold; 0 if it has failed."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks of the tier that no transfer uses; 0 if it has failed."""
        ...

    @property
    def stats(self) -> "TransferStats":
        """Counts of transfers since the start."""
        ...

    # Begin

    def pays(self, num_blocks: int, recompute_seconds: float) -> bool:
        """Whether loading ``num_blocks``, after those that are being loaded, takes at most ``recompute_seconds``."""
        ...

    def has_room_for(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` more may be loaded at the same time as those that are being loaded."""
        ...

    def begin_load(
        self, copies: BlockCopies, names: Sequence[bytes], *, may_begin: bool = True
    ) -> tuple[list[bytes], int]:
        """Begins to load blocks that ``look_up`` finds and the host pool does not have. Some may be on their way.

        Returns the blocks to wait for and 0. If the host pool has no room for all, these are the first ones. Returns no
        blocks, and how many lack room, if ``has_room_for`` denies it or the caller says that none ``may_begin``: the
        caller tries again later.
        """
        ...

    def begin_stores(self, copies: BlockCopies, max_copies: int) -> int:
        """Begins to store blocks that are worth it. Called when all else of the step is scheduled. Returns how many
        blocks the step copies from the device to the host for that, at most ``max_copies``.
        """
        ...

    # Wait

    @property
    def is_on(self) -> bool:
        """False once the tier has failed."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to store, or a result to come. Until then the engine is not idle."""
        ...

    @property
    def has_transfers(self) -> bool:
        """Whether results are to come."""
        ...

    @property
    def held_host_blocks(self) -> list[int]:
        """The host blocks of the transfers that are under way, once for each transfer."""
        ...

    def is_loading(self, names: list[bytes]) -> bool:
        """Whether any of the blocks is being loaded. Removes the blocks at the end of the list that are not."""
        ...

    def take_ended_loads(self) -> list[bytes]:
        """Returns the blocks whose loads have ended since the last call, successful or not."""
        ...

    # Finish, and fail

    def finish(self, results: Iterable[TransferResult]) -> None:
        """Takes the results of its own transfers. Called in each round while there are transfers, also without
        results, so that the tier can fail when it has waited for too long.
        """
        ...

    def fail(self, failure: "TransferFailure", reason: str) -> None:
        """Turns the tier off for good. From then on it has no blocks, and no request waits for it."""
        ...

    # Tests

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one place. O(blocks)."""
        ...


class TransferFailure(StrEnum):
    """Why a transfer or a tier failed, as metrics name it."""

    DAMAGED = "damaged"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(slots=True)
class TransferStats:
    """Counts of blocks that were stored, loaded, or lost to a failure. ``block_bytes`` are those on all ranks."""

    block_bytes: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    failures: Counter[TransferFailure] = field(default_factory=Counter)
