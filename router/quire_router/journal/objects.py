"""``ObjectStore``: what is kept beside the records of requests, in the same database: files, batches, conversations.

An account counts the bytes that are kept for a tenant, by names that expire with what they count. Everything that a
client stores is charged before it is written. Where a store has a size of its own, accounts have shares of it.

An object is a short text with a version, and numbered parts. The text is replaced only by who has read its last
version, so two routers never overwrite each other. A part is written once: the first write of a number stays. Names are
listed in collections. Everything expires. Here: the protocol, and objects in memory.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from time import monotonic
from typing import Final, Protocol

from quire_router.admission.fair_queue import LazyHeap
from quire_router.core.errors import store_full

MAX_MEMORY_BYTES = 256 * 2**20  # of all objects in memory
MAX_NAMES = 10_000  # of one collection
_FEW = 64  # accounts or collections in memory, among which none is looked for that has expired
BEGUN = 60.0  # seconds that a charge lasts until its object is written, as who writes it may die, or the database
OBJECTS_AT_ONCE = 256  # that are read in a round trip: a text is a kilobyte or so


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The text of an object; ``version`` is 1 at first, and grows by one with each change."""

    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What an account may have at most: so many names, and so many bytes. None: any number."""

    max_names: int | None = None
    max_bytes: int | None = None


ANY: Final = Quota()
FILES, BATCHES, CONVERSATIONS, RESPONSES = "files", "batches", "conversations", "responses"
"""The kinds of accounts. Responses are in the journal, and the others here."""
SHARES: Final = {FILES: 0.8, CONVERSATIONS: 0.15, BATCHES: 0.05}
"""The part of a store of bounded size that all accounts of one kind have together."""


def account_of(kind: str, tenant: str) -> str:
    """Returns the name of a tenant's account of one kind."""
    return f"{kind}:{tenant}"


def kind_of(account: str) -> str:
    """Returns the kind of an account."""
    return account.partition(":")[0]


class Excess(IntEnum):
    """What an account would have too much of."""

    NAMES = 1
    BYTES = 2
    SHARE = 3  # bytes of a store of bounded size (``fits_share``)


class ObjectStore(Protocol):
    """Objects by their names. Every method raises ``QuireError`` UNAVAILABLE while the database cannot be used, and
    those that write OVERLOADED when it has no room. ``ttl`` is the seconds after which an object and its parts expire,
    from that call on.
    """

    async def get(self, name: str) -> StoredObject | None:
        """Returns an object, or None."""
        ...

    async def get_many(self, names: Sequence[str]) -> list[StoredObject | None]:
        """Returns the objects of these names, None for those that are not there, in one round trip."""
        ...

    async def put(self, name: str, data: bytes, version: int, ttl: float, *, drop_parts: bool = False) -> bool:
        """Makes ``data`` the text of the object if its version is ``version``, 0 for one that is not there, and deletes
        its parts with ``drop_parts``. Returns False, and changes nothing, if it is another one.
        """
        ...

    async def delete(self, name: str) -> None:
        """Deletes an object and its parts."""
        ...

    async def add_part(self, name: str, number: int, data: bytes, ttl: float) -> bool:
        """Writes a part, which may come before its object. Returns False, and changes nothing, if it is there."""
        ...

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """Returns the parts of these numbers; None for those that are not there."""
        ...

    async def part_numbers(self, name: str) -> list[int]:
        """Returns the numbers of all parts, in order."""
        ...

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        """Adds a name to a collection, or keeps it there, for ``ttl`` seconds from now on."""
        ...

    async def leave(self, collection: str, *names: str) -> None:
        """Removes names from a collection."""
        ...

    async def names(self, collection: str) -> list[str]:
        """Returns the names of a collection in the order in which they came, ``MAX_NAMES`` at most. Their objects may
        not be there any more.
        """
        ...

    async def charge(self, account: str, name: str, size: int, ttl: float, quota: Quota = ANY) -> Excess | None:
        """Counts ``size`` bytes of ``name`` in an account for ``ttl`` seconds, instead of what was counted before.
        Returns what there would be too much of, and changes nothing then. Less than before is never too much, and
        without a quota nothing is.
        """
        ...

    async def discharge(self, account: str, name: str) -> None:
        """Counts nothing of ``name`` in an account any more."""
        ...


async def read_objects(
    store: ObjectStore, collection: str, names: Sequence[str]
) -> AsyncGenerator[tuple[str, StoredObject]]:
    """Yields the objects of some ``names`` of a collection, with these. Names of objects that have expired leave it."""
    for start in range(0, len(names), OBJECTS_AT_ONCE):
        some = names[start : start + OBJECTS_AT_ONCE]
        found = dict(zip(some, await store.get_many(some), strict=True))
        for name, each in found.items():
            if each is not None:
                yield name, each
        if gone := [name for name, each in found.items() if each is None]:
            await store.leave(collection, *gone)


def excess_of(quota: Quota, names: int, total: int, before: int | None, size: int) -> Excess | None:
    """Returns what an account of so many ``names`` and ``total`` bytes would have too much of with ``size`` bytes of a
    name, instead of those ``before``.
    """
    if before is None and quota.max_names is not None and names >= quota.max_names:
        return Excess.NAMES
    more = size - (before or 0)
    return Excess.BYTES if more > 0 and quota.max_bytes is not None and total + more > quota.max_bytes else None


def fits_share(account: str, own: int, total: int, max_bytes: int) -> bool:
    """Returns whether an account may have ``own`` bytes in a store of ``max_bytes``, where all accounts of its kind
    would have ``total``. A tenant leaves at least as much of their part free as it has itself, so none locks others
    out. Without keys, the one tenant may have all of it.
    """
    part = SHARES.get(kind_of(account))
    has_keys = not account.endswith(":")
    return part is None or total + (own if has_keys else 0) <= part * max_bytes


@dataclass(slots=True)
class _MemoryAccount:
    """The bytes of each name, in the order in which they came, and when it expires; ``total`` of all. ``kinds`` has the
    totals of all accounts of one kind.
    """

    kind: str
    kinds: Counter[str]
    sizes: dict[str, int] = field(default_factory=dict)
    total: int = 0
    expirations: LazyHeap[str] = field(default_factory=LazyHeap)

    def expire(self, now: float) -> None:
        while self.expirations and self.expirations.key(name := self.expirations.first()) <= now:
            self.remove(name)

    def put(self, name: str, expires: float, size: int) -> None:
        self._add(size - self.sizes.get(name, 0))
        self.sizes[name] = size
        self.expirations.put(name, expires)

    def remove(self, name: str) -> None:
        self.expirations.discard(name)
        self._add(-self.sizes.pop(name, 0))

    def _add(self, size: int) -> None:
        self.total += size
        self.kinds[self.kind] += size


class _MemoryAccounts(dict[str, _MemoryAccount]):
    """Accounts by their names. Those of which everything has expired leave."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self._clock = clock
        self._sweep_at = _FEW

    def current(self, account: str) -> _MemoryAccount:
        """Returns an account without what has expired; an empty one where there is none."""
        found = self.get(account) or _MemoryAccount(kind_of(account), self.kinds)
        found.expire(self._clock())
        return found

    def put(self, account: str, name: str, size: int, ttl: float) -> None:
        """Counts a name, instead of what was counted of it before."""
        if account not in self and len(self) >= self._sweep_at:
            self.expire_all()
            self._sweep_at = max(_FEW, 2 * len(self))
        counted = self[account] = self.current(account)
        counted.put(name, self._clock() + ttl, size)

    def discard(self, account: str, *names: str) -> None:
        """Counts names no more."""
        if (counted := self.get(account)) is not None:
            for name in names:
                counted.remove(name)
            if not counted.sizes:
                del self[account]

    def expire_all(self) -> None:
        """Removes what has expired from all accounts."""
        for name in list(self):
            if not self.current(name).sizes:
                del self[name]


@dataclass(slots=True)
class _MemoryObject:
    expires: float
    data: bytes = b""
    version: int = 0
    parts: dict[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.data) + sum(map(len, self.parts.values()))


class MemoryObjectStore:
    """Objects in this process, at most ``max_bytes`` of them."""

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES, clock: Callable[[], float] = monotonic) -> None:
        self._objects: dict[str, _MemoryObject] = {}
        self._collections, self._accounts = _MemoryAccounts(clock), _MemoryAccounts(clock)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._clock = clock

    async def get(self, name: str) -> StoredObject | None:
        """See ``ObjectStore``."""
        found = self._find(name)
        return StoredObject(found.data, found.version) if found is not None and found.version else None

    async def get_many(self, names: Sequence[str]) -> list[StoredObject | None]:
        """See ``ObjectStore``."""
        return [await self.get(name) for name in names]

    async def put(self, name: str, data: bytes, version: int, ttl: float, *, drop_parts: bool = False) -> bool:
        """See ``ObjectStore``."""
        found = self._find(name)
        if (0 if found is None else found.version) != version:
            return False
        stored = self._reserve(name, len(data) - (0 if found is None else len(found.data)), ttl)
        stored.data, stored.version, stored.expires = data, version + 1, self._clock() + ttl
        if drop_parts:
            self._bytes -= sum(map(len, stored.parts.values()))
            stored.parts.clear()
        return True

    async def delete(self, name: str) -> None:
        """See ``ObjectStore``."""
        if (found := self._objects.pop(name, None)) is not None:
            self._bytes -= found.size

    async def add_part(self, name: str, number: int, data: bytes, ttl: float) -> bool:
        """See ``ObjectStore``."""
        found = self._find(name)
        if found is not None and number in found.parts:
            return False
        stored = self._reserve(name, len(data), ttl)
        stored.parts[number], stored.expires = data, max(stored.expires, self._clock() + ttl)
        return True

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """See ``ObjectStore``."""
        found = self._find(name)
        return [None if found is None else found.parts.get(number) for number in numbers]

    async def part_numbers(self, name: str) -> list[int]:
        """See ``ObjectStore``."""
        found = self._find(name)
        return [] if found is None else sorted(found.parts)

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        """See ``ObjectStore``."""
        self._collections.put(collection, name, 0, ttl)

    async def leave(self, collection: str, *names: str) -> None:
        """See ``ObjectStore``."""
        self._collections.discard(collection, *names)

    async def names(self, collection: str) -> list[str]:
        """See ``ObjectStore``."""
        return list(self._collections.current(collection).sizes)[:MAX_NAMES]

    async def charge(self, account: str, name: str, size: int, ttl: float, quota: Quota = ANY) -> Excess | None:
        """See ``ObjectStore``."""
        counted = self._accounts.current(account)
        before = counted.sizes.get(name)
        excess = excess_of(quota, len(counted.sizes), counted.total, before, size)
        more = size - (before or 0)
        if excess is None and quota != ANY and more > 0 and not self._fits(account, counted.total, more):
            excess = Excess.SHARE
        if excess is None:
            self._accounts.put(account, name, size, ttl)
        return excess

    async def discharge(self, account: str, name: str) -> None:
        """See ``ObjectStore``."""
        self._accounts.discard(account, name)

    async def close(self) -> None:
        """There is nothing to close."""

    def _fits(self, account: str, own: int, more: int) -> bool:
        """Returns whether an account of ``own`` bytes may have ``more`` (see ``fits_share``)."""

        def fits() -> bool:
            return fits_share(account, own + more, self._accounts.kinds[kind_of(account)] + more, self._max_bytes)

        if not fits():
            self._accounts.expire_all()
        return fits()

    def _find(self, name: str) -> _MemoryObject | None:
        found = self._objects.get(name)
        if found is not None and found.expires <= self._clock():
            self._remove_expired()
            return None
        return found

    def _reserve(self, name: str, size: int, ttl: float) -> _MemoryObject:
        if self._bytes + size > self._max_bytes:
            self._remove_expired()
        if self._bytes + size > self._max_bytes:
            raise store_full()
        self._bytes += size
        return self._objects.setdefault(name, _MemoryObject(self._clock() + ttl))

    def _remove_expired(self) -> None:
        for name in [name for name, each in self._objects.items() if each.expires <= self._clock()]:
            self._bytes -= self._objects.pop(name).size
