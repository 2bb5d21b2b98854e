"""The states of recurrent layers: a pool of their own, with a block size of its own.

Such a layer keeps one state for a sequence instead of keys and values for each token. A block of this pool is one state
of all these layers. Block i of a ``StateTable`` has the state after the last computed token among tokens
``[i * block_size, (i + 1) * block_size)``. The last block is overwritten as its sequence grows; once it is full it is a
*checkpoint*. Later requests can begin with a checkpoint, so a cached prefix ends at one. A sequence needs only the
state after its last computed token: checkpoints before that are free, and are kept until they are evicted.

A state is as large as the keys and values of hundreds or thousands of tokens, so blocks are that large too: few
checkpoints per prompt. (vLLM and SGLang keep the states of Mamba layers in such a pool.)

The pool needs no place in the scheduler's decisions, because it always has room for the sequences that run (see
``StateCacheConfig``). Steps do not overlap, because a state that was computed ahead could not be taken back.
"""

from collections.abc import Iterable

from quire_engine.core.block_pool import NULL_BLOCK, BlockCopy, BlockPool, PoolCopies, StateCacheConfig, Tier
from quire_engine.core.block_table import BlockTable, CachedBlock, StateTable
from quire_engine.core.kv_transfer.host_tier import HostTier


class StatePool:
    """The states on the device and on the host, and every operation on a ``StateTable``. Counts are in states, lengths
    in tokens. ``kv_block_size`` is the length of the blocks that hashes name. Without ``host_caching``, the host pool
    only serves swapped sequences.
    """

    def __init__(
        self, capacity: StateCacheConfig, kv_block_size: int, *, prefix_caching: bool, host_caching: bool
    ) -> None:
        self.block_size = capacity.block_size
        self.block_bytes = capacity.block_bytes
        self._kv_blocks = capacity.block_size // kv_block_size
        self._prefix_caching = prefix_caching
        self._copies = PoolCopies()
        on_evict = self._on_eviction if host_caching else None
        self.device_pool = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, on_evict=on_evict)
        self.host = HostTier(capacity.host_blocks, capacity.device_blocks, None)

    # Finding and starting

    def longest_prefix(self, table: BlockTable, num_tokens: int) -> int:
        """Returns the most tokens, up to ``num_tokens``, after which a checkpoint is cached. Their hashes must be
        known.
        """
        number = num_tokens // self.block_size
        while number and self._find(self._name(table, number - 1)) is None:
            number -= 1
        return number * self.block_size

    def attach(self, table: BlockTable, num_tokens: int) -> None:
        """Starts an empty table with the checkpoint after ``num_tokens``, which ``longest_prefix`` has found."""
        states, number = _states(table), num_tokens // self.block_size
        states.num_skipped = max(0, number - 1)
        states.num_cached = number
        states.block_ids[:] = [NULL_BLOCK] * states.num_skipped
        if not number:
            return
        name = self._name(table, number - 1)
        found = self._find(name)
        assert found is not None, "a prefix without a checkpoint was found"
        if found.tier is Tier.DEVICE:
            self.device_pool.incref(found.block_id)
            self.host.note_reuse([found.block_id])
            states.block_ids.append(found.block_id)
        else:
            self.host.hold(found.block_id)
            states.block_ids.append(self._load(found.block_id, name))

    def fork(self, table: BlockTable) -> None:
        """References the table's states for a copy of it. The table that grows first gets a copy of a last state that
        is not full.
        """
        states = _states(table)
        for block_id in states.block_ids[states.num_skipped :]:
            self.device_pool.incref(block_id)

    # Growing

    def allocate(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> None:
        """Allocates states for tokens ``[num_computed_tokens, num_tokens)``. Copies a shared last state first."""
        states, index = _states(table), num_computed_tokens // self.block_size
        if index < len(states.block_ids) and self.device_pool.is_shared(shared := states.block_ids[index]):
            own = self.device_pool.allocate()
            self._copies.blocks_to_copy.append(BlockCopy(shared, own))
            states.replace(index, own)
            self.device_pool.decref(shared)
        while len(states.block_ids) * self.block_size < num_tokens:
            states.block_ids.append(self.device_pool.allocate())

    def on_computed(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Notes that steps have computed ``num_computed_tokens`` in all: new checkpoints can be found, and states
        before the last one are released.
        """
        states, full = _states(table), num_computed_tokens // self.block_size
        if self._prefix_caching:
            for index in range(max(states.num_cached, states.num_skipped), full):
                self.device_pool.cache_block(states.block_ids[index], self._name(table, index))
            states.num_cached = max(states.num_cached, full)
        self._release_before(states, num_computed_tokens)

    # Swapping

    @property
    def can_swap_out(self) -> bool:
        """Whether the host has room for the state of one more sequence."""
        return self.host.pool.num_free > 0

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Moves the state after ``num_computed_tokens`` to the host."""
        states = _states(table)
        self._release_before(states, num_computed_tokens)
        for index in range(states.num_skipped, len(states.block_ids)):
            target, is_new = self.host.take(self._name_if_cached(table, index))
            states.host_block_ids.append(target)
            if is_new:
                self._copies.blocks_to_swap_out.append(BlockCopy(states.block_ids[index], target))
        self._release_device(states)

    def swap_in(self, table: BlockTable) -> None:
        """Moves the state back to the device."""
        states = _states(table)
        states.block_ids[:] = [NULL_BLOCK] * states.num_skipped
        for source in states.host_block_ids:
            name = self._name_if_cached(table, len(states.block_ids))
            found = None if name is None else self.device_pool.get_cached_block(name)
            if found is not None:
                self.device_pool.incref(found)
            states.block_ids.append(self._load(source, name) if found is None else found)
        self.host.held += states.host_block_ids
        states.host_block_ids.clear()

    # Ending

    def free(self, table: BlockTable) -> None:
        """Releases every state that the table holds, in either pool."""
        states = _states(table)
        self._release_device(states)
        for block_id in states.host_block_ids:
            self.host.pool.decref(block_id)
        states.host_block_ids.clear()
        states.num_skipped = states.num_cached = 0

    def take_copies(self) -> PoolCopies | None:
        """Returns the copies for everything decided since the last call, or None if there are none."""
        if self.host.held:
            self.host.release_held()
        if self._copies.is_empty:
            return None
        copies, self._copies = self._copies, PoolCopies()
        return copies

    @property
    def has_copies(self) -> bool:
        """Whether copies were collected since ``take_copies``."""
        return not self._copies.is_empty

    def count_leaked(self, tables: Iterable[BlockTable]) -> int:
        """Returns the states of both pools that are in use although none of ``tables`` holds them. O(states held)."""
        device: set[int] = set()
        host: set[int] = set()
        for table in tables:
            states = _states(table)
            device.update(states.block_ids[states.num_skipped :])
            host.update(states.host_block_ids)
        return self.device_pool.num_used - len(device) + self.host.pool.num_used - len(host)

    def check_integrity(self) -> None:
        """Asserts the integrity of both pools."""
        self.device_pool.check_integrity()
        self.host.pool.check_integrity()

    # Internals

    def _name(self, table: BlockTable, index: int) -> bytes:
        """Returns the name of checkpoint ``index``: the hash of all tokens before it."""
        return table.block_hashes[(index + 1) * self._kv_blocks - 1]

    def _name_if_cached(self, table: BlockTable, index: int) -> bytes | None:
        return self._name(table, index) if index < _states(table).num_cached else None

    def _find(self, name: bytes) -> CachedBlock | None:
        block_id = self.device_pool.get_cached_block(name)
        if block_id is not None:
            return CachedBlock(block_id, Tier.DEVICE)
        block_id = self.host.look_up(name)
        return None if block_id is None else CachedBlock(block_id, Tier.HOST)

    def _load(self, host_block_id: int, name: bytes | None) -> int:
        """Allocates a state and copies one of the host to it, under its name if it has one. Returns its id."""
        block_id = self.device_pool.allocate()
        self._copies.blocks_to_swap_in.append(BlockCopy(host_block_id, block_id))
        if name is not None:
            self.device_pool.cache_block(block_id, name)
        return block_id

    def _on_eviction(self, block_id: int, name: bytes) -> None:
        self.host.on_evict(self._copies, block_id, name)

    def _release_before(self, states: StateTable, num_computed_tokens: int) -> None:
        """Releases the states before the one after ``num_computed_tokens``."""
        for index in range(states.num_skipped, (num_computed_tokens - 1) // self.block_size):
            self.device_pool.decref(states.block_ids[index])
            states.block_ids[index] = NULL_BLOCK  # the worker does not read it again
            states.num_skipped = index + 1

    def _release_device(self, states: StateTable) -> None:
        for block_id in states.block_ids[states.num_skipped :]:
            self.device_pool.decref(block_id)
        states.block_ids.clear()


def _states(table: BlockTable) -> StateTable:
    """Returns the states of a table of a model that has some."""
    assert table.states is not None
    return table.states
