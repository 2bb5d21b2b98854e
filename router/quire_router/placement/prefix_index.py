"""The prefix index: which engine has which KV block, and in which tier.

Each block's name leads to a bit mask of its holders, two bits for each engine: its device and its host pool. A prompt
is matched against all engines at once by going along its blocks and keeping, with one AND a block, those that had all
of them so far.
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

# Where an engine has a block. Plain data.


class Tier(IntEnum):
    """In device memory, ready to be used, or in the host pool, from where it is copied back."""

    DEVICE = 0
    HOST = 1


# Who holds blocks in the prefix index, and which bits stand for whom.


_FIRST_SLOTS = 16
_NEVER = -1


class IndexSlot:
    """What one engine holds from one snapshot to the next. ``bits`` has a bit for each tier, ``both`` the two together.

    ``held`` are the keys of its blocks, in whichever tier, at most ``bound`` of them.
    """

    __slots__ = ("bits", "both", "bound", "expected_tick", "held", "number", "row")

    def __init__(self, number: int, row: int, bound: int) -> None:
        self.number = number
        self.row = row
        self.bound = bound
        self.bits = (1 << 2 * number, 2 << 2 * number)
        self.both = self.bits[0] | self.bits[1]
        self.held: set[int] = set()
        self.expected_tick = _NEVER


class IndexSlots:
    """Gives a slot to each row of the table, and a new one when a row begins anew.

    What was held under the old slot is dead at once: ``live`` has the device bits of those that count. It is taken out
    of the index little by little, and only then is the slot used again, maybe for another row. So rows may be given to
    other engines at any time. ``hosting`` has the host bits of those of the live that ever had a block in their host
    pools. All rows that ever had a slot are below ``num_rows``.
    """

    def __init__(self, in_use: Callable[[int], bool]) -> None:
        """``in_use`` tells whether something that was expected in a tick may still be remembered."""
        self.live = 0
        self.hosting = 0
        self.num_rows = 0
        self.dead: deque[IndexSlot] = deque()
        self._in_use = in_use
        self._rows: dict[int, IndexSlot] = {}
        self._free: deque[IndexSlot] = deque()
        self._row_of: Rows = np.zeros(_FIRST_SLOTS, dtype=np.intp)
        self._made = 0

    @property
    def num_bytes(self) -> int:
        """How long the bits of all slots are."""
        return -(-2 * self._made // 8)

    def find(self, row: int) -> IndexSlot | None:
        """The row's slot, if it has one."""
        return self._rows.get(row)

    def take(self, row: int, bound: int) -> IndexSlot:
        """The row's slot; a fresh one where it has none."""
        slot = self._rows.get(row)
        if slot is None:
            slot = self._rows[row] = IndexSlot(self._number(), row, bound)
            self._row_of[slot.number] = row
            self.num_rows = max(self.num_rows, row + 1)
            self.live |= slot.bits[Tier.DEVICE]
        return slot

    def retire(self, row: int) -> None:
        """The row begins anew; the old slot waits until it is emptied."""
        slot = self._rows.pop(row, None)
        if slot is not None:
            self.live ^= slot.bits[Tier.DEVICE]
            self.hosting &= ~slot.bits[Tier.HOST]
            (self.dead if slot.held else self._free).append(slot)

    def emptied(self) -> None:
        """The first of the ``dead`` holds nothing any more."""
        self._free.append(self.dead.popleft())

    def rows(self, bits: Rows) -> Rows:
        """The rows that these numbers of bits stand for."""
        rows: Rows = self._row_of[bits >> 1]
        return rows

    def _number(self) -> int:
        if self._free and not self._in_use(self._free[0].expected_tick):
            return self._free.popleft().number
        self._made += 1
        if self._made > len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.zeros_like(self._row_of)])
        return self._made - 1


# Blocks that engines will have soon, because a request that makes them was just sent there.
#
# The engine's own word comes a step later. Until then a second request with the same prompt would be sent elsewhere,
# and what is cached would be computed twice. The idea of such entries is llm-d's.


SPECULATIVE_TTL = 2.0
MAX_PROMPT_BLOCKS = 256
MAX_SPECULATIVE_ENTRIES = 262_144
_TICKS = 4


class SpeculativeEntries:
    """Keys of blocks, and bits that say where. An entry lives for ``seconds``, and for up to a quarter of that more.

    Entries of one tick live and die together, so that nothing is ever done for one that has expired. Of one prompt the
    first ``MAX_PROMPT_BLOCKS`` are noted, and of all prompts ``max_entries``.
    """

    def __init__(self, seconds: float = SPECULATIVE_TTL, max_entries: int = MAX_SPECULATIVE_ENTRIES) -> None:
        self._tick_seconds = seconds / _TICKS
        self._left = max_entries
        self._ticks: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, bit: int, keys: Iterable[int], now: float) -> int:
        """Notes that ``bit`` will have these blocks; the number of the tick that they live with. ``now`` in seconds on
        a clock that never goes back.
        """
        self.expire(now)
        tick = int(now // self._tick_seconds)
        if not self._ticks or self._ticks[-1][0] < tick:
            self._ticks.append((tick, {}))
        tick, entries = self._ticks[-1]
        for key in islice(keys, min(MAX_PROMPT_BLOCKS, self._left)):
            known = entries.get(key)
            self._left -= known is None
            entries[key] = (known or 0) | bit
        return tick

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        oldest = int(now // self._tick_seconds) - _TICKS
        while self._ticks and self._ticks[0][0] < oldest:
            self._left += len(self._ticks.popleft()[1])

    def entries(self) -> list[Mapping[int, int]]:
        """Of each tick the blocks, each with the bits of those who will have it."""
        return [entries for _, entries in self._ticks]

    def has_tick(self, tick: int) -> bool:
        """Whether entries that live with this tick may be left."""
        return bool(self._ticks) and self._ticks[0][0] <= tick


# How much of a prompt each engine has, in blocks. Plain data.


Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockMatches:
    """Leading blocks of one prompt, a number for each row of the table: ``device`` are in device memory from the first
    on, and ``host`` more follow that at least the host pool has.
    """

    device: Blocks
    host: Blocks


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


# What decides that two prompts' blocks have the same names, and those names, each computed when it is asked for.


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """Engines with one revision of a model and one block size give equal names to equal blocks, and no others do."""

    model_revision: str
    block_size: int

    def hashes(self, tokens: Sequence[int], salt: bytes = b"") -> "BlockHashes":
        """The names of the full blocks of ``tokens``, in order, as ``quire_proto.hashing`` computes them."""
        return BlockHashes(tokens, self.block_size, extra_key(self.model_revision, salt))


class BlockHashes:
    """Can be gone through again and again: a name is computed when it is first reached, and kept.

    So a long prompt of which nothing is cached costs one name, and noting what the chosen engine will have costs
    none of them twice.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, extra: bytes) -> None:
        self._count = len(tokens) // block_size
        self._more = hash_chain(_packed(tokens), block_size * TOKEN_BYTES, extra)
        self._known: list[bytes] = []

    def extend(self, count: int) -> bytes | None:
        """Computes up to ``count`` more names; the last of them, None where none was left."""
        more = list(islice(self._more, count))
        self._known += more
        return more[-1] if more else None

    def __len__(self) -> int:
        """How many full blocks there are."""
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        known = self._known
        for index in range(self._count):
            if index == len(known):
                known.append(next(self._more))
            yield known[index]


def _packed(tokens: Sequence[int]) -> bytes | memoryview:
    """As ``pack``, and without a copy where the tokens are in memory that way: the names are kept for as long as their
    request.
    """
    if isinstance(tokens, array) and tokens.typecode == "i" and byteorder == "little":
        return memoryview(tokens).cast("B")
    return pack(tokens)


HashesByNamespace = dict[BlockNamespace, BlockHashes]
"""The names of one prompt's blocks, as each namespace has them."""
