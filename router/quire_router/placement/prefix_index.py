"""The prefix index: which engine has which KV block, and in which tier.

Each block's hash leads to a bit mask of its holders, two bits for each engine: its device and its host pool. A prompt
is matched against all engines at once by going along its blocks and keeping, with one AND a block, those that had all
of them so far. Blocks that an engine will have soon, because a request that makes them was just sent there, count as
its own for two seconds: the engine's own event comes a step later, and until then a second request with the same prompt
would be sent elsewhere, and what is cached would be computed twice. The idea of such entries is llm-d's.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from sys import byteorder

import numpy as np
import numpy.typing as npt
from quire_proto.hashing import HASH_BYTES, TOKEN_BYTES, extra_key, hash_chain, pack

from quire_router.placement.engine_table import Rows

Blocks = npt.NDArray[np.int64]

SPECULATIVE_TTL = 2.0  # seconds
MAX_PROMPT_BLOCKS = 256
MAX_SPECULATIVE_ENTRIES = 262_144

MAX_BLOCKS = 10_000_000
MAX_SHARED_MASKS = 65_536
_TICKS = 4

_FIRST_SLOTS = 16
_NEVER = -1
_SWEPT_PER_ADDED = 4
_SHARD = 0xFF


class Tier(IntEnum):
    """Where an engine has a block: in device memory, ready to be used, or in the host pool, from where it is copied
    back.
    """

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class BlockMatches:
    """How many leading blocks of a prompt each row of the table has: ``device`` in device memory from the first on, and
    ``host`` more that follow and that at least the host pool has.
    """

    device: Blocks
    host: Blocks


@dataclass(slots=True)
class IndexCounts:
    """``blocks`` are in the index now, counted once for each engine that has them. Since the start, ``dropped`` blocks
    were over a bound and ``damaged`` ones had something that is no hash.
    """

    blocks: int = 0
    dropped: int = 0
    damaged: int = 0


class SpeculativeEntries:
    """Blocks that engines will have soon: keys, with the bits of the engines. An entry lives for ``seconds``, and for
    up to a quarter of that more. The name is that of llm-d's precise prefix cache (``speculativeIndexing``,
    ``speculativeTTL``); it has nothing to do with speculative decoding.

    Entries of one tick expire together, so that an expired entry costs nothing. Of one prompt the first
    ``MAX_PROMPT_BLOCKS`` are kept, and of all prompts ``max_entries``.
    """

    def __init__(self, seconds: float = SPECULATIVE_TTL, max_entries: int = MAX_SPECULATIVE_ENTRIES) -> None:
        self._tick_seconds = seconds / _TICKS
        self._free_entries = max_entries
        self._ticks: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, bit: int, keys: Iterable[int], now: float) -> int:
        """Adds that the engine of ``bit`` will have these blocks. Returns the number of the tick that they expire with.
        ``now`` is in seconds of a clock that never goes back.
        """
        self.expire(now)
        tick = int(now // self._tick_seconds)
        if not self._ticks or self._ticks[-1][0] < tick:
            self._ticks.append((tick, {}))
        tick, entries = self._ticks[-1]
        for key in islice(keys, min(MAX_PROMPT_BLOCKS, self._free_entries)):
            bits = entries.get(key)
            self._free_entries -= bits is None
            entries[key] = (bits or 0) | bit
        return tick

    def expire(self, now: float) -> None:
        """Removes the entries that are too old."""
        oldest = int(now // self._tick_seconds) - _TICKS
        while self._ticks and self._ticks[0][0] < oldest:
            self._free_entries += len(self._ticks.popleft()[1])

    def entries(self) -> list[Mapping[int, int]]:
        """Returns for each tick its keys with the bits of the engines that will have them."""
        return [entries for _, entries in self._ticks]

    def has_tick(self, tick: int) -> bool:
        """Returns whether entries of this tick may be left."""
        return bool(self._ticks) and self._ticks[0][0] <= tick


class IndexSlot:
    """What one engine has from one snapshot to the next. ``bits`` has a bit for each tier, ``mask`` the two together.
    ``keys`` are those of its blocks, in whichever tier, at most ``max_blocks`` of them. ``speculative_tick`` is the
    last tick of its speculative entries.
    """

    __slots__ = ("bits", "keys", "mask", "max_blocks", "number", "row", "speculative_tick")

    def __init__(self, number: int, row: int, max_blocks: int) -> None:
        self.number = number
        self.row = row
        self.max_blocks = max_blocks
        self.bits = (1 << 2 * number, 2 << 2 * number)
        self.mask = self.bits[0] | self.bits[1]
        self.keys: set[int] = set()
        self.speculative_tick = _NEVER


class PrefixIndex:
    """Which rows of the ``EngineTable`` have which blocks. Costs nothing for a row that was never stored to.

    Has ``max_blocks`` entries at most, one for each block of each engine, and for each row what ``set_max_blocks``
    allows. Keys are spread over small dictionaries, so that none takes long to grow.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, speculative: SpeculativeEntries | None = None) -> None:
        self.counts = IndexCounts()
        self._max_blocks = max_blocks
        self._speculative = speculative or SpeculativeEntries()
        self._slots = IndexSlots(self._speculative.has_tick)
        self._bounds: dict[int, int] = {}
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARD + 1)]
        self._masks: dict[int, int] = {}

    def set_max_blocks(self, row: int, blocks: int) -> None:
        """Sets how many blocks the row's engine has in both tiers together; more are dropped."""
        self._bounds[row] = blocks
        slot = self._slots.find(row)
        if slot is not None:
            slot.max_blocks = blocks

    def store(self, row: int, tier: Tier, hashes: Iterable[bytes]) -> None:
        """Adds blocks that the row's engine has from now on. Drops those over a bound, and what is no hash."""
        slot = self._get_slot(row)
        bit, keys, shards = slot.bits[tier], slot.keys, self._shards
        if tier == Tier.HOST:
            self._slots.hosting |= bit
        for key in self._keys(hashes):
            if key in keys or self._admit(slot, key):
                shard = shards[key & _SHARD]
                holders = shard.get(key)  # most blocks have one holder, and then the mask is the slot's own
                shard[key] = bit if holders is None else self._share_mask(holders | bit)

    def remove(self, row: int, tier: Tier, hashes: Iterable[bytes]) -> None:
        """Removes blocks that the row's engine does not have in the tier any more."""
        slot = self._slots.find(row)
        if slot is None:
            return
        bit, keys, shards = slot.bits[tier], slot.keys, self._shards
        for key in self._keys(hashes):
            if key not in keys:
                continue
            shard = shards[key & _SHARD]
            if shard[key] is bit:
                del shard[key]
            elif self._remove_holders(key, bit) & slot.mask:
                continue
            keys.remove(key)
            self.counts.blocks -= 1

    def blocks(self, row: int) -> Iterator[tuple[Tier, bytes]]:
        """Yields the blocks that the row's engine has in each tier. Of what is stored or removed meanwhile it may have
        the state before or after.
        """
        slot = self._slots.find(row)
        if slot is None:
            return
        for key in list(slot.keys):
            holders = self._shards[key & _SHARD].get(key, 0)
            for tier in Tier:
                if holders & slot.bits[tier]:
                    yield tier, key.to_bytes(HASH_BYTES, "big")

    def num_blocks(self, row: int) -> int:
        """Returns how many blocks the row's engine has, in whichever tier."""
        slot = self._slots.find(row)
        return 0 if slot is None else len(slot.keys)

    def clear(self, row: int) -> None:
        """Removes all blocks of the row, and its bound: its engine left, or is about to send a snapshot. Takes no time;
        call ``sweep`` afterwards, until it returns False. The row may be used for another engine at once.
        """
        self._slots.retire(row)
        self._bounds.pop(row, None)

    def sweep(self, budget: int) -> bool:
        """Removes up to ``budget`` entries of cleared rows from the index. Returns whether more are left."""
        dead = self._slots.dead
        while dead and budget > 0:
            slot = dead[0]
            budget -= 1
            self._remove_holders(slot.keys.pop(), slot.mask)
            self.counts.blocks -= 1
            if not slot.keys:
                self._slots.free_first_dead()
        return bool(dead)

    def add_speculative(self, row: int, hashes: Iterable[bytes], now: float) -> None:
        """Records that a request with these blocks was sent to the row's engine at ``now``: for two seconds they count
        as if it had them on its device. Of a long prompt only the first ``MAX_PROMPT_BLOCKS`` count.
        """
        slot, first = self._get_slot(row), islice(hashes, MAX_PROMPT_BLOCKS)
        slot.speculative_tick = self._speculative.add(slot.bits[Tier.DEVICE], self._keys(first), now)

    def match(self, hashes: Iterable[bytes], now: float, num_rows: int = 0) -> BlockMatches:
        """Returns how many leading blocks of a prompt each row has. Iterates over ``hashes`` for as long as any engine
        has them all. The arrays have an entry for each row that was stored to, and at least ``num_rows``.
        """
        self._speculative.expire(now)
        shards, speculative, hosting = self._shards, self._speculative.entries(), self._slots.hosting
        device = in_any_tier = self._slots.live
        device_depths, any_depths = _PrefixDepths(), _PrefixDepths()
        depth = 0
        for block_hash in hashes:
            key = int.from_bytes(block_hash, "big")
            on_device = holders = shards[key & _SHARD].get(key, 0)
            for entries in speculative:
                on_device |= entries.get(key, 0)
            if (remaining := device & on_device) != device:
                device_depths.add(device ^ remaining, depth)
                device = remaining
            if not hosting:
                in_any_tier = device
            elif (remaining := in_any_tier & (on_device | holders >> 1)) != in_any_tier:
                any_depths.add(in_any_tier ^ remaining, depth)
                in_any_tier = remaining
            if not in_any_tier:
                break
            depth += 1
        device_depths.add(device, depth)
        any_depths.add(in_any_tier, depth)
        num_rows = max(num_rows, self._slots.num_rows)
        in_device = device_depths.depths(self._slots, num_rows)
        if not hosting or any_depths == device_depths:  # of most prompts no engine has more in the host pool
            return BlockMatches(in_device, np.zeros_like(in_device))
        return BlockMatches(in_device, any_depths.depths(self._slots, num_rows) - in_device)

    def may_contain(self, block_hash: bytes) -> bool:
        """Returns whether any engine may have the block or will have it soon: one that left may still count."""
        key = int.from_bytes(block_hash, "big")
        return key in self._shards[key & _SHARD] or any(key in entries for entries in self._speculative.entries())

    def _get_slot(self, row: int) -> IndexSlot:
        return self._slots.find(row) or self._slots.get_or_create(row, self._bounds.get(row, self._max_blocks))

    def _keys(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns hashes as numbers, which take less memory. Counts and leaves out what is no hash."""
        hashes = list(hashes)
        found = [int.from_bytes(block_hash, "big") for block_hash in hashes if len(block_hash) == HASH_BYTES]
        self.counts.damaged += len(hashes) - len(found)
        return found

    def _admit(self, slot: IndexSlot, key: int) -> bool:
        """Counts one more block of an engine. If the index is full, sweeps a few cleared ones first. Returns False if
        the block is over a bound.
        """
        if self.counts.blocks >= self._max_blocks:
            self.sweep(_SWEPT_PER_ADDED)
        if self.counts.blocks >= self._max_blocks or len(slot.keys) >= slot.max_blocks:
            self.counts.dropped += 1
            return False
        slot.keys.add(key)
        self.counts.blocks += 1
        return True

    def _remove_holders(self, key: int, bits: int) -> int:
        """Removes holders of a block. Returns those that are left."""
        shard = self._shards[key & _SHARD]
        holders = shard[key] & ~bits
        if holders:
            shard[key] = self._share_mask(holders)
        else:
            del shard[key]
        return holders

    def _share_mask(self, mask: int) -> int:
        """Returns an equal mask, the one object that all blocks with these holders share."""
        shared = self._masks.get(mask)
        if shared is not None:
            return shared
        if len(self._masks) >= MAX_SHARED_MASKS:
            self._masks.clear()
        self._masks[mask] = mask
        return mask


@dataclass(slots=True)
class _PrefixDepths:
    """How many leading blocks of a prompt each engine has, as masks by depth. Those that have none are left out."""

    _depths: list[int] = field(default_factory=list)
    _masks: list[int] = field(default_factory=list)

    def add(self, mask: int, depth: int) -> None:
        """Adds that the engines in ``mask`` have so many blocks, and not the next one."""
        if mask and depth:
            self._depths.append(depth)
            self._masks.append(mask)

    def depths(self, slots: "IndexSlots", num_rows: int) -> Blocks:
        """Returns the depth of each row. All masks are unpacked together, as that costs little more than one."""
        depths = np.zeros(num_rows, dtype=np.int64)
        if self._masks:
            size = slots.num_bytes
            packed = np.frombuffer(b"".join([mask.to_bytes(size, "little") for mask in self._masks]), dtype=np.uint8)
            positions = np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_))
            which, bits = np.divmod(positions, 8 * size)
            depths[slots.rows(bits)] = np.array(self._depths)[which]
        return depths


class IndexSlots:
    """The bits of the engines in masks: a slot for each row of the table, and a new one when the row is cleared.

    The blocks of the old slot count no more at once: ``live`` has the device bits of those that count. They are removed
    from the index little by little, and only then is the slot reused, maybe for another row. So rows may be given to
    other engines at any time. ``hosting`` has the host bits of the live slots that ever had a block in their host
    pools. All rows that ever had a slot are below ``num_rows``.
    """

    def __init__(self, has_tick: Callable[[int], bool]) -> None:
        """``has_tick`` returns whether speculative entries of a tick may be left."""
        self.live = 0
        self.hosting = 0
        self.num_rows = 0
        self.dead: deque[IndexSlot] = deque()
        self._has_tick = has_tick
        self._rows: dict[int, IndexSlot] = {}
        self._free: deque[IndexSlot] = deque()
        self._row_of: Rows = np.zeros(_FIRST_SLOTS, dtype=np.intp)
        self._num_slots = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a mask of all slots."""
        return -(-2 * self._num_slots // 8)

    def find(self, row: int) -> IndexSlot | None:
        """Returns the row's slot, None if it has none."""
        return self._rows.get(row)

    def get_or_create(self, row: int, max_blocks: int) -> IndexSlot:
        """Returns the row's slot, a new one if it has none."""
        slot = self._rows.get(row)
        if slot is None:
            slot = self._rows[row] = IndexSlot(self._allocate_number(), row, max_blocks)
            self._row_of[slot.number] = row
            self.num_rows = max(self.num_rows, row + 1)
            self.live |= slot.bits[Tier.DEVICE]
        return slot

    def retire(self, row: int) -> None:
        """Ends the row's slot, which is reused once its blocks are removed from the index."""
        slot = self._rows.pop(row, None)
        if slot is not None:
            self.live ^= slot.bits[Tier.DEVICE]
            self.hosting &= ~slot.bits[Tier.HOST]
            (self.dead if slot.keys else self._free).append(slot)

    def free_first_dead(self) -> None:
        """Frees the first of the ``dead``, which has no blocks any more."""
        self._free.append(self.dead.popleft())

    def rows(self, bits: Rows) -> Rows:
        """Returns the rows of these bit numbers."""
        rows: Rows = self._row_of[bits >> 1]
        return rows

    def _allocate_number(self) -> int:
        if self._free and not self._has_tick(self._free[0].speculative_tick):
            return self._free.popleft().number
        self._num_slots += 1
        if self._num_slots > len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.zeros_like(self._row_of)])
        return self._num_slots - 1


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What block hashes depend on beside tokens, salt and adapter: engines with one revision of a model and one block
    size compute equal hashes for equal blocks, and no others do.
    """

    model_revision: str
    block_size: int

    def hashes(self, tokens: Sequence[int], salt: bytes = b"", lora_digest: bytes = b"") -> "BlockHashes":
        """Returns the hashes of the full blocks of ``tokens``, in order, as ``quire_proto.hashing`` computes them."""
        return BlockHashes(tokens, self.block_size, extra_key(self.model_revision, salt, lora_digest))


class BlockHashes:
    """The hashes of a prompt's full blocks. May be iterated over again and again: each is computed when it is first
    reached, and kept. So a long prompt of which nothing is cached costs one hash, and recording what the chosen engine
    will have computes none of them twice.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, extra: bytes) -> None:
        self._count = len(tokens) // block_size
        self._chain = hash_chain(_packed(tokens), block_size * TOKEN_BYTES, extra)
        self._computed: list[bytes] = []

    def extend(self, count: int) -> bytes | None:
        """Computes up to ``count`` more hashes. Returns the last of them, None if none was left."""
        more = list(islice(self._chain, count))
        self._computed += more
        return more[-1] if more else None

    def __len__(self) -> int:
        """Returns the number of full blocks."""
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        computed = self._computed
        for index in range(self._count):
            if index == len(computed):
                computed.append(next(self._chain))
            yield computed[index]


def _packed(tokens: Sequence[int]) -> bytes | memoryview:
    """As ``pack``, and without a copy if the tokens are in memory that way: hashes are kept for as long as their
    request.
    """
    if isinstance(tokens, array) and tokens.typecode == "i" and byteorder == "little":
        return memoryview(tokens).cast("B")
    return pack(tokens)


HashesByNamespace = dict[BlockNamespace, BlockHashes]
"""The hashes of one prompt's blocks in each namespace."""
