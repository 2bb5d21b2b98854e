"""What a journal has been told and its database has not: one entry a request, coalesced, and bounded. Does no I/O."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from quire_proto.sampling import FinishReason

from quire_router.generation import Generation
from quire_router.journal.base import Lease
from quire_router.journal.deliveries import Deliveries

MAX_TOKENS_A_WRITE = 65_536


@dataclass(slots=True)
class Entry:
    """One request that runs, or that has ended and is not written yet.

    It holds the whole record, not only what is new, so that a database that lost it can be given it again: what was
    delivered, at 4 bytes a token, and the request with its prompt as it came. So much of ``deliveries`` is known to be
    there as ``stored`` says.
    """

    generation: Generation
    lease: Lease
    deliveries: Deliveries = field(init=False)
    opened: bool = False
    stored: int = 0
    finish: tuple[FinishReason, str] | None = None

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(self.generation.params.n)

    @property
    def made(self) -> int:
        """How long the row of deliveries is."""
        return len(self.deliveries.values)

    @property
    def unstored(self) -> int:
        """Tokens that wait to be written, the prompt's with them until the record is opened."""
        return self.made - self.stored + (0 if self.opened else len(self.generation.prompt_token_ids))


@dataclass(frozen=True, slots=True)
class Write:
    """What one flush writes of an entry, fixed at its start: the entry may grow while the database works."""

    entry: Entry
    opens: bool
    start: int
    end: int
    finish: tuple[FinishReason, str] | None


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

    def add(self, entry: Entry) -> bool:
        """False when there is no room for it."""
        if len(self._entries) >= self._max_requests or self._unstored + entry.unstored > self._max_tokens:
            return False
        self._entries[entry.lease.request_id] = entry
        self._unstored += entry.unstored
        self.touch(entry)
        return True

    def extend(
        self, entry: Entry, position: int, token_ids: list[int], index: int, finish_reason: FinishReason | None
    ) -> bool:
        """Adds what is new of a choice; False, and the entry is gone, when there is no room for it."""
        added = entry.deliveries.add(index, position, token_ids, finish_reason)
        self._unstored += added
        if self._unstored > self._max_tokens:
            self.drop(entry)
            return False
        if added:
            self.touch(entry)
        return True

    def touch(self, entry: Entry) -> None:
        """The entry has something to write."""
        self._dirty[entry.lease.request_id] = None
        self._news.set()

    def touch_running(self) -> None:
        """Every entry that could be written has its lease to renew."""
        for entry in self._entries.values():
            self.touch(entry)

    def drop(self, entry: Entry) -> None:
        """Forgets the entry."""
        if self._entries.pop(entry.lease.request_id, None) is not None:
            self._unstored -= entry.unstored
        self._dirty.pop(entry.lease.request_id, None)

    async def wait(self) -> None:
        """Returns when an entry is dirty."""
        while not self._dirty:
            self._news.clear()
            await self._news.wait()

    def next_writes(self, count: int) -> list[Write]:
        """What to write of the ``count`` entries that have waited longest."""
        return [_write(self._entries[request_id]) for request_id in islice(self._dirty, count)]

    def stored(self, write: Write) -> None:
        """The database has it."""
        entry = write.entry
        if self._entries.get(entry.lease.request_id) is not entry:
            return  # it was dropped in the meantime
        self._unstored -= entry.unstored
        entry.opened, entry.stored = True, max(entry.stored, write.end)
        self._unstored += entry.unstored
        if write.finish is not None:
            self.drop(entry)
        elif entry.stored == entry.made and entry.finish is None:
            self._dirty.pop(entry.lease.request_id, None)
        else:
            self._dirty.move_to_end(entry.lease.request_id)

    def lost(self, entry: Entry) -> None:
        """The database does not have what it had: everything is to be written again."""
        if self._entries.get(entry.lease.request_id) is entry:
            self._unstored -= entry.unstored
            entry.opened, entry.stored = False, 0
            self._unstored += entry.unstored
            self.touch(entry)


def _write(entry: Entry) -> Write:
    end = min(entry.made, entry.stored + MAX_TOKENS_A_WRITE)
    finish = entry.finish if end == entry.made else None
    return Write(entry, not entry.opened, entry.stored, end, finish)
