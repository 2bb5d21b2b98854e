"""A pool of blocks of equal size: reference counts, free order and the hash index. Every operation is O(1) unless it
says otherwise.

A block is in use (references above 0) or free. A free block keeps the hash of its contents until it is allocated again,
so that a later request with the same prefix can reuse it. The free order is the whole eviction policy: blocks without a
hash go first, newest first; then blocks with a hash, least recently used first. The idea is vLLM's free block queue.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice


class Tier(Enum):
    """Where a block is."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Block ``block_hash`` can now be found in ``tier``."""

    block_hash: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Block ``block_hash`` can no longer be found in ``tier``."""

    block_hash: bytes
    tier: Tier


KVCacheEvent = BlockStored | BlockRemoved
"""A change of the prefix cache's contents, for the routers' index."""


class BlockPool:
    """Blocks ``reserved .. size - 1`` of one tier; ids below ``reserved`` are never allocated. ``num_blocks`` can be
    allocated, free or in use.

    Calls ``emit`` when a block can be found by its hash, and when it no longer can. Calls ``on_evict`` with each block
    that has a hash, and the hash, before the contents are overwritten.
    """

    def __init__(
        self,
        size: int,
        tier: Tier,
        *,
        reserved: int = 0,
        emit: Callable[[KVCacheEvent], None] | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self._tier = tier
        self._reserved = reserved
        self._emit = emit or _ignore
        self._on_evict = on_evict
        self.num_blocks = max(0, size - reserved)
        self._ref_counts = [0] * size
        self._block_hashes: list[bytes | None] = [None] * size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(reserved, size))
        self._hash_to_block: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that ``allocate`` can return now, including those with a hash."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """The number of blocks in use."""
        return self.num_blocks - self.num_free

    def is_free(self, block_id: int) -> bool:
        """Whether no table uses the block."""
        return self._ref_counts[block_id] == 0

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one table uses the block."""
        return self._ref_counts[block_id] > 1

    def allocate(self) -> int:
        """Evicts the first block in free order and returns it with one reference. The caller makes sure that a block is
        free.
        """
        block_id, _ = self._free.popitem(last=False)
        block_hash = self._block_hashes[block_id]
        if block_hash is not None:
            self._evict_hash(block_id, block_hash)
        self._ref_counts[block_id] = 1
        return block_id

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, in use or free; None if there is none. Take it with ``incref`` before
        allocating anything else.
        """
        return self._hash_to_block.get(block_hash)

    def incref(self, block_id: int) -> None:
        """Adds a reference. Takes the block out of the free list if it was free."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def decref(self, block_id: int) -> None:
        """Removes a reference; removing the last one frees the block."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free[block_id] = None
            if self._block_hashes[block_id] is None:
                self._free.move_to_end(block_id, last=False)

    def cache_block(self, block_id: int, block_hash: bytes) -> None:
        """Lets a full block be found by its hash. A second block with the same contents gets no hash, so tables never
        change.
        """
        if block_hash in self._hash_to_block or self._block_hashes[block_id] is not None:
            return
        self._hash_to_block[block_hash] = block_id
        self._block_hashes[block_id] = block_hash
        self._emit(BlockStored(block_hash, self._tier))

    def forget(self, block_id: int) -> None:
        """Removes a block's hash, because its contents are not what the hash says."""
        block_hash = self._block_hashes[block_id]
        if block_hash is not None:
            self._remove_hash(block_id, block_hash)
            if self._ref_counts[block_id] == 0:
                self._free.move_to_end(block_id, last=False)

    def evict_all(self) -> None:
        """Evicts every block that has a hash, in free order. No block may be in use. O(blocks)."""
        assert self.num_free == self.num_blocks, "blocks are in use"
        for block_id in self._free:
            if (block_hash := self._block_hashes[block_id]) is not None:
                self._evict_hash(block_id, block_hash)

    def restore(self, block_id: int, block_hash: bytes) -> None:
        """Lets a free block be found by its hash, whose contents date from before the start. It is the last to be
        evicted.
        """
        self.cache_block(block_id, block_hash)
        self._free.move_to_end(block_id)

    def move_to_back(self, block_id: int) -> None:
        """Makes a free block the last to be evicted."""
        if self._ref_counts[block_id] == 0:
            self._free.move_to_end(block_id)

    def stored_blocks(self) -> list[BlockStored]:
        """Returns all blocks that can be found, in the order in which they were stored."""
        return [BlockStored(block_hash, self._tier) for block_hash in self._hash_to_block]

    def block_states(self) -> bytes:
        """Returns one byte per block that can be allocated: 0 free, 1 free with a hash, 2 used by one table, 3 used by
        several tables. O(blocks).
        """
        pairs = islice(zip(self._ref_counts, self._block_hashes, strict=True), self._reserved, None)
        return bytes([min(count, 2) + 1 if count else block_hash is not None for count, block_hash in pairs])

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one place. For tests and idle engines: O(blocks)."""
        assert all(count >= 0 for count in self._ref_counts)
        assert not any(self._ref_counts[: self._reserved]), "a reserved block is in use"
        free = [i for i in range(self._reserved, len(self._ref_counts)) if self._ref_counts[i] == 0]
        assert sorted(self._free) == free, "the free list and the reference counts disagree"
        named = {block_hash: i for i, block_hash in enumerate(self._block_hashes) if block_hash is not None}
        assert named == self._hash_to_block, "the hash index and the blocks' names disagree"

    def _evict_hash(self, block_id: int, block_hash: bytes) -> None:
        if self._on_evict is not None:
            self._on_evict(block_id, block_hash)
        self._remove_hash(block_id, block_hash)

    def _remove_hash(self, block_id: int, block_hash: bytes) -> None:
        self._block_hashes[block_id] = None
        del self._hash_to_block[block_hash]
        self._emit(BlockRemoved(block_hash, self._tier))


def _ignore(event: KVCacheEvent) -> None:
    del event


NULL_BLOCK = 0
"""The device block that stands in a table for a released block. It is never allocated."""
UNBOUNDED_TOKENS = 1 << 40
"""The capacity of one sequence if all layers have windows."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table: in them a token attends to the last ``window`` tokens, including itself, or to
    all if ``window`` is None (vLLM's ``KVCacheGroupSpec``).
    """

    window: int | None = None

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Returns the first block that any token after the first ``num_computed_tokens`` can attend to."""
        return 0 if self.window is None else max(0, num_computed_tokens + 1 - self.window) // block_size

    def releases_at(self, block: int, block_size: int) -> int:
        """Returns the number of computed tokens after which no later token can attend to ``block``. Only with a
        window.
        """
        assert self.window is not None, "without a window, tokens attend to every block"
        return (block + 1) * block_size + self.window - 1


@dataclass(frozen=True, slots=True)
class StateCacheConfig:
    """The states of recurrent layers that fit into memory. A block of these pools holds one state, of ``block_bytes``:
    that after the last computed token of ``block_size`` tokens. Device block 0 is the null block.

    If at most ``max_num_seqs`` sequences run at once, with at most the tokens of a step that the engine allows, the
    device pool always has room for them.
    """

    block_size: int
    device_blocks: int
    host_blocks: int
    block_bytes: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The blocks that fit into memory, as decided by the executor that owns the memory. Device block 0 is the null
    block. ``block_bytes`` is the size of one block in either pool.

    A block belongs to one of the ``groups`` of layers; a sequence has a block table per group. Most models have one
    group. ``max_step_tokens`` is how many tokens of one sequence the steps in flight compute at most; the windows of
    all of them are kept. ``states`` are the pools of layers that keep a state; None without such layers.
    """

    block_size: int
    device_blocks: int
    host_blocks: int
    block_bytes: int = 1
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    max_step_tokens: int = 1
    states: StateCacheConfig | None = None

    def max_blocks(self, num_tokens: int) -> int:
        """Returns the most device blocks that a sequence holds at any time while it grows to ``num_tokens``."""
        whole = -(-num_tokens // self.block_size)
        return sum(min(whole, most) for most in self._max_blocks_of_groups())

    @property
    def device_bytes(self) -> int:
        """Bytes of all blocks and states on the device. There is a spare state for each sequence that may run."""
        states = self.states
        state_bytes = 0 if states is None else (states.device_blocks + states.max_num_seqs) * states.block_bytes
        return self.device_blocks * self.block_bytes + state_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all blocks and states on the host."""
        state_bytes = 0 if self.states is None else self.states.host_blocks * self.states.block_bytes
        return self.host_blocks * self.block_bytes + state_bytes

    @property
    def num_tables(self) -> int:
        """The number of block tables that a worker has of each sequence: one per group, and one of states."""
        return len(self.groups) + (self.states is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the device blocks if windows release no blocks."""
        return (self.device_blocks - 1) // len(self.groups) * self.block_size

    @property
    def usable_tokens(self) -> int:
        """Tokens that one sequence can hold if it runs alone."""
        left, length = self.device_blocks - 1, 0
        bounds = sorted(self._max_blocks_of_groups())
        for number, bound in enumerate(bounds):  # the first ``number`` groups need no more blocks as the sequence grows
            growing = len(bounds) - number
            if bound == UNBOUNDED_TOKENS or (bound - length) * growing > left:
                return (length + left // growing) * self.block_size
            left, length = left - (bound - length) * growing, bound
        return UNBOUNDED_TOKENS

    def _max_blocks_of_groups(self) -> list[int]:
        """Returns the most blocks that a sequence holds, per group. A window may start and end within a block."""
        held = [None if group.window is None else group.window - 1 + self.max_step_tokens for group in self.groups]
        return [UNBOUNDED_TOKENS if tokens is None else -(-tokens // self.block_size) + 1 for tokens in held]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copies block ``source`` of one pool to block ``target`` of the same or the other pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Stores ``host_block`` of the host pool as ``tier_block`` of the tier named ``tier``, or loads it from there.
    ``block_hash`` names its contents. Its result has the same ``transfer_id``.
    """

    transfer_id: int
    tier: str
    is_load: bool
    host_block: int
    tier_block: int
    block_hash: bytes


@dataclass(slots=True)
class PoolCopies:
    """The copies of a step between the pools of the device and the host, in this order: from the device to the host
    (``blocks_to_swap_out``), within the device (``blocks_to_copy``), and from the host to the device
    (``blocks_to_swap_in``). Each list runs in its own order: a block may be the target of one copy and the source of a
    later one.
    """

    blocks_to_swap_out: list[BlockCopy] = field(default_factory=list)
    blocks_to_copy: list[BlockCopy] = field(default_factory=list)
    blocks_to_swap_in: list[BlockCopy] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.blocks_to_swap_out or self.blocks_to_copy or self.blocks_to_swap_in)


@dataclass(slots=True)
class BlockCopies(PoolCopies):
    """The copies of KV blocks of a step, and the copies of ``states`` in their own pools; None if there are none.

    ``blocks_to_swap_ahead`` are copied to the host after the others, while the step computes. The step does not read or
    write their targets, and does not write their sources.

    After all of these, the ``transfers`` between the host and further tiers start. They may last for several steps. No
    other copy uses their blocks until the executor has returned their results.
    """

    blocks_to_swap_ahead: list[BlockCopy] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    states: PoolCopies | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (
            self.blocks_to_swap_out
            or self.blocks_to_copy
            or self.blocks_to_swap_in
            or self.blocks_to_swap_ahead
            or self.transfers
            or self.states
        )
