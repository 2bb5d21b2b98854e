"""The prefix index: which engine has which KV block, and in which tier.

Each block's name leads to a bit mask of its holders, two bits for each engine: its device and its host pool. A prompt
is matched against all engines at once by going along its blocks and keeping, with one AND a block, those that had all
of them so far.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from quire_proto.hashing import HASH_BYTES

from quire_router.placement.block_matches import BlockMatches, Blocks
from quire_router.placement.expected import SpeculativeEntries
from quire_router.placement.slots import IndexSlot, IndexSlots
from quire_router.placement.tier import Tier

MAX_BLOCKS = 10_000_000
MAX_SHARED_MASKS = 65_536
_SWEPT_FOR_ONE = 4
_SHARD = 0xFF


@dataclass(slots=True)
class IndexCounts:
    """``blocks`` are in the index now, counted once for each engine that has them. Since the start, ``dropped`` had no
    room and ``damaged`` had no name that could be one.
    """

    blocks: int = 0
    dropped: int = 0
    damaged: int = 0


class PrefixIndex:
    """Rows are those of the ``EngineTable``. Costs nothing for a row that was never stored to.

    Holds ``max_blocks`` entries at most, one for each block of each engine, and for each row what ``bound`` allows.
    Names are spread over small dictionaries, so that none takes long to grow.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, expected: SpeculativeEntries | None = None) -> None:
        self.counts = IndexCounts()
        self._max_blocks = max_blocks
        self._expected = expected or SpeculativeEntries()
        self._slots = IndexSlots(self._expected.has_tick)
        self._bounds: dict[int, int] = {}
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARD + 1)]
        self._masks: dict[int, int] = {}

    # What engines have

    def set_max_blocks(self, row: int, blocks: int) -> None:
        """The row's engine has so many blocks in both tiers together, and more are not believed."""
        self._bounds[row] = blocks
        slot = self._slots.find(row)
        if slot is not None:
            slot.bound = blocks

    def store(self, row: int, tier: Tier, hashes: Iterable[bytes]) -> None:
        """The row's engine has these blocks from now on. What has no room is dropped, and so is what is no name."""
        slot = self._take_slot(row)
        bit = slot.bits[tier]
        if tier == Tier.HOST:
            self._slots.hosting |= bit
        for key in self._keys(hashes):
            if key in slot.held or self._admit(slot, key):
                shard = self._shards[key & _SHARD]
                shard[key] = self._shared(shard.get(key, 0) | bit)

    def remove(self, row: int, tier: Tier, hashes: Iterable[bytes]) -> None:
        """The row's engine does not have these blocks in the tier any more."""
        slot = self._slots.find(row)
        if slot is None:
            return
        for key in self._keys(hashes):
            if key in slot.held and not self._take_away(key, slot.bits[tier]) & slot.both:
                slot.held.remove(key)
                self.counts.blocks -= 1

    def clear(self, row: int) -> None:
        """Nothing is known of the row any more: its engine left, or is about to say anew what it has. Takes no time;
        call ``sweep`` afterwards, until it has nothing to do. The row may be used for another engine at once; its bound
        is forgotten.
        """
        self._slots.retire(row)
        self._bounds.pop(row, None)

    def sweep(self, budget: int) -> bool:
        """Takes up to ``budget`` entries of cleared rows out of the index; whether more are left."""
        dead = self._slots.dead
        while dead and budget > 0:
            slot = dead[0]
            budget -= 1
            self._take_away(slot.held.pop(), slot.both)
            self.counts.blocks -= 1
            if not slot.held:
                self._slots.emptied()
        return bool(dead)

    # What engines will have

    def add_speculative(self, row: int, hashes: Iterable[bytes], now: float) -> None:
        """A request with these blocks was sent to the row's engine at ``now``: for two seconds they count as if it had
        them on its device. Of a long prompt only the first blocks are looked at.
        """
        slot = self._take_slot(row)
        slot.expected_tick = self._expected.add(slot.bits[Tier.DEVICE], self._keys(hashes), now)

    # Who has a prompt

    def match(self, hashes: Iterable[bytes], now: float, num_rows: int = 0) -> BlockMatches:
        """How many leading blocks of a prompt each row has. Goes along ``hashes`` for as long as anybody has them all.

        The arrays have an entry for each row that was stored to, and at least ``num_rows``.
        """
        self._expected.expire(now)
        shards, expected, hosting = self._shards, self._expected.entries(), self._slots.hosting
        device = anywhere = self._slots.live
        left_device, left = _PrefixDepths(), _PrefixDepths()
        depth = 0
        for name in hashes:
            key = int.from_bytes(name, "big")
            on_device = holders = shards[key & _SHARD].get(key, 0)
            for entries in expected:
                on_device |= entries.get(key, 0)
            if (kept := device & on_device) != device:
                left_device.note(device ^ kept, depth)
                device = kept
            if not hosting:
                anywhere = device
            elif (kept := anywhere & (on_device | holders >> 1)) != anywhere:
                left.note(anywhere ^ kept, depth)
                anywhere = kept
            if not anywhere:
                break
            depth += 1
        left_device.note(device, depth)
        left.note(anywhere, depth)
        num_rows = max(num_rows, self._slots.num_rows)
        in_device = left_device.depths(self._slots, num_rows)
        if not hosting or left == left_device:  # of most prompts nobody has more in the host pool
            return BlockMatches(in_device, np.zeros_like(in_device))
        return BlockMatches(in_device, left.depths(self._slots, num_rows) - in_device)

    def may_contain(self, name: bytes) -> bool:
        """Whether any engine may have the block or is expected to: one that left may still count."""
        key = int.from_bytes(name, "big")
        return key in self._shards[key & _SHARD] or any(key in entries for entries in self._expected.entries())

    # Inside

    def _take_slot(self, row: int) -> IndexSlot:
        return self._slots.find(row) or self._slots.take(row, self._bounds.get(row, self._max_blocks))

    def _keys(self, hashes: Iterable[bytes]) -> Iterator[int]:
        """Names as numbers, which take less memory. What is no name is left out."""
        for name in hashes:
            if len(name) == HASH_BYTES:
                yield int.from_bytes(name, "big")
            else:
                self.counts.damaged += 1

    def _admit(self, slot: IndexSlot, key: int) -> bool:
        """Counts one more block of an engine. When there is no room, makes some of what is left to be swept."""
        if self.counts.blocks >= self._max_blocks:
            self.sweep(_SWEPT_FOR_ONE)
        if self.counts.blocks >= self._max_blocks or len(slot.held) >= slot.bound:
            self.counts.dropped += 1
            return False
        slot.held.add(key)
        self.counts.blocks += 1
        return True

    def _take_away(self, key: int, bits: int) -> int:
        """What is left of the block's holders."""
        shard = self._shards[key & _SHARD]
        holders = shard[key] & ~bits
        if holders:
            shard[key] = self._shared(holders)
        else:
            del shard[key]
        return holders

    def _shared(self, mask: int) -> int:
        """The same mask, as the one object that blocks with these holders share."""
        known = self._masks.get(mask)
        if known is not None:
            return known
        if len(self._masks) >= MAX_SHARED_MASKS:
            self._masks.clear()
        self._masks[mask] = mask
        return mask


@dataclass(slots=True)
class _PrefixDepths:
    """Who was left behind at which depth. Those that never had anything are not noted."""

    _depths: list[int] = field(default_factory=list)
    _masks: list[int] = field(default_factory=list)

    def note(self, mask: int, depth: int) -> None:
        """Those in ``mask`` have so many blocks, and not the next one."""
        if mask and depth:
            self._depths.append(depth)
            self._masks.append(mask)

    def depths(self, slots: IndexSlots, num_rows: int) -> Blocks:
        """The depth of each row. All masks are unpacked together, as that costs little more than one."""
        depths = np.zeros(num_rows, dtype=np.int64)
        if self._masks:
            size = slots.num_bytes
            packed = np.frombuffer(b"".join([mask.to_bytes(size, "little") for mask in self._masks]), dtype=np.uint8)
            places = np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_))
            which, bits = np.divmod(places, 8 * size)
            depths[slots.rows(bits)] = np.array(self._depths)[which]
        return depths
