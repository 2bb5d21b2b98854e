"""What a journal has been told and its database has not: one entry a request, coalesced, and bounded. Does no I/O."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from quire_proto.sampling import FinishReason

from quire_router.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.journal.base import Lease, Piece
from quire_router.journal.bounds import MAX_ROW, is_bounded, size
from quire_router.journal.codec import pack_tokens
from quire_router.journal.deliveries import Deliveries

MAX_TOKENS_A_WRITE = 65_536


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended."""

    reason: FinishReason
    error: str = ""
    usage: Usage = NO_USAGE


@dataclass(slots=True)
class Entry:
    """One request that runs, or that has ended or was let go of and is not written yet.

    It holds the whole record, not only what is new, so that a database that lost it can be given it again: what was
    told, at 4 bytes a token, and the request with its prompt as it came. So much of ``deliveries`` is known to be
    there as ``stored`` says, and ``checksum`` is of. The lease was last renewed at ``renewed``.
    """

    generation: GenerationRequest
    lease: Lease
    deliveries: Deliveries = field(init=False)
    opened: bool = False
    stored: int = 0
    checksum: int = 0
    renewed: float = 0.0
    end: End | None = None
    released: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(self.generation.params.n)

    @property
    def live(self) -> bool:
        """Whether its lease may write."""
        return self.end is None and not self.released

    @property
    def made(self) -> int:
        """How long the row of deliveries is."""
        return len(self.deliveries.values)

    @property
    def unstored(self) -> int:
        """Tokens that wait to be written, the request's with them until the record is opened."""
        return self.made - self.stored + (0 if self.opened else size(self.generation))


@dataclass(slots=True)  # a frozen one takes longer to make, and there is one for each flush and stream
class Write:
    """What one flush writes of an entry, fixed at its start: the entry may grow while the database works. ``packed`` is
    its row from ``start`` to ``stop``, with which all of it has that ``checksum``, and as many tokens as ``told`` says
    where that is all there is.
    """

    entry: Entry
    opens: bool
    start: int
    stop: int
    packed: bytes
    checksum: int
    told: int | None
    end: End | None
    releases: bool


class Pending:
    """The entries, and which of them are dirty.

    At most ``max_requests`` entries and ``max_tokens`` unwritten tokens are held; what goes beyond is dropped, whole
    requests at a time, so that a record in the database is always a prefix of what happened.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entries: dict[str, Entry] = {}
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._unstored = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Requests with something to write."""
        return len(self._dirty)

    def get(self, request_id: str) -> Entry | None:
        """The request's entry, while it has one."""
        return self._entries.get(request_id)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another request."""
        return len(self._entries) >= self._max_requests

    def has_room(self, entry: Entry) -> bool:
        """Whether the entry is small enough to be kept, also beside what is here."""
        fits = not self.is_full and self._unstored + entry.unstored <= self._max_tokens
        return fits and is_bounded(entry.generation)

    def add(self, entry: Entry) -> bool:
        """False when there is no room for it, or there is one of its request."""
        if not self.has_room(entry) or entry.lease.request_id in self._entries:
            return False
        self._entries[entry.lease.request_id] = entry
        self._unstored += entry.unstored
        self.touch(entry)
        return True

    def extend(self, entry: Entry, position: int, piece: Piece) -> bool:
        """Adds what is new of a piece; False, and the entry is gone, when there is no room for it."""
        added = entry.deliveries.add(position, piece)
        self._unstored += added
        if self._unstored > self._max_tokens or entry.made > MAX_ROW:
            self.drop(entry)
            return False
        if added:
            self.touch(entry)
        return True

    def touch(self, entry: Entry) -> None:
        """The entry has something to write."""
        if entry.lease.request_id not in self._dirty:
            self._dirty[entry.lease.request_id] = None
            self._news.set()

    def touch_older(self, than: float) -> None:
        """Every entry whose lease was not renewed since then has it to renew."""
        for entry in self._entries.values():
            if entry.renewed < than:
                self.touch(entry)

    def has(self, entry: Entry) -> bool:
        """Whether the entry is still the one of its request."""
        return self._entries.get(entry.lease.request_id) is entry

    def drop(self, entry: Entry) -> None:
        """Forgets the entry."""
        if self.has(entry):
            self._unstored -= entry.unstored
            del self._entries[entry.lease.request_id]
            self._dirty.pop(entry.lease.request_id, None)

    async def wait(self) -> None:
        """Returns when an entry is dirty."""
        while not self._dirty:
            self._news.clear()
            await self._news.wait()

    def next_writes(self, count: int) -> list[Write]:
        """What to write of the ``count`` entries that have waited longest."""
        return [_write(self._entries[request_id]) for request_id in islice(self._dirty, count)]

    def stored(self, write: Write, now: float) -> None:
        """The database has it."""
        entry = write.entry
        if not self.has(entry):
            return  # it was dropped in the meantime
        self._unstored -= entry.unstored
        entry.opened, entry.renewed = True, now
        entry.stored, entry.checksum = write.stop, write.checksum
        self._unstored += entry.unstored
        if write.end is not None or (write.releases and entry.end is None):  # else it was cancelled in the meantime
            self.drop(entry)
        elif entry.stored == entry.made and entry.live:
            self._dirty.pop(entry.lease.request_id, None)
        else:
            self._dirty.move_to_end(entry.lease.request_id)

    def lost(self, entry: Entry) -> None:
        """The database does not have what it had: everything is to be written again."""
        if self.has(entry):
            self._unstored -= entry.unstored
            entry.opened, entry.stored, entry.checksum = False, 0, 0
            self._unstored += entry.unstored
            self.touch(entry)


def _write(entry: Entry) -> Write:
    stop = min(entry.made, entry.stored + MAX_TOKENS_A_WRITE)
    whole = stop == entry.made
    end = entry.end if whole else None
    packed = pack_tokens(entry.deliveries.values[entry.stored : stop])
    checksum = crc32(packed, entry.checksum)
    releases = whole and entry.released and end is None
    told = entry.deliveries.told if whole else None
    return Write(entry, not entry.opened, entry.stored, stop, packed, checksum, told, end, releases)
