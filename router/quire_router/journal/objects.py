"""``ObjectStore``: what is kept beside the records of requests, in the same database: files and batches.

An object is a short text with a version, and numbered parts. The text is replaced only by who has read its last
version, so two routers never overwrite each other. A part is written once: the first write of a number stays. Names are
listed in collections. Everything expires. Here: the protocol, and objects in memory.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Protocol

from quire_router.core.errors import store_full

MAX_MEMORY_BYTES = 256 * 2**20  # of all objects in memory
MAX_NAMES = 10_000  # of one collection
OBJECTS_AT_ONCE = 256  # that are read in a round trip: a text is a kilobyte or so


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The text of an object; ``version`` is 1 at first, and grows by one with each change."""

    data: bytes
    version: int


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

    async def put(self, name: str, data: bytes, version: int, ttl: float) -> bool:
        """Makes ``data`` the text of the object if its version is ``version``, 0 for one that is not there. Returns
        False, and changes nothing, if it is another one.
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

    async def delete_parts(self, name: str) -> None:
        """Deletes the parts of an object, which stays."""
        ...

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        """Adds a name to a collection, which expires ``ttl`` seconds after the last one came."""
        ...

    async def leave(self, collection: str, *names: str) -> None:
        """Removes names from a collection."""
        ...

    async def names(self, collection: str) -> list[str]:
        """Returns the names of a collection in the order in which they came, ``MAX_NAMES`` at most. Their objects may
        have expired.
        """
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

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES, clock: Callable[[], float] = time) -> None:
        self._objects: dict[str, _MemoryObject] = {}
        self._collections: dict[str, dict[str, None]] = {}
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

    async def put(self, name: str, data: bytes, version: int, ttl: float) -> bool:
        """See ``ObjectStore``."""
        found = self._find(name)
        if (0 if found is None else found.version) != version:
            return False
        stored = self._reserve(name, len(data) - (0 if found is None else len(found.data)), ttl)
        stored.data, stored.version, stored.expires = data, version + 1, self._clock() + ttl
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
        self._reserve(name, len(data), ttl).parts[number] = data
        return True

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """See ``ObjectStore``."""
        found = self._find(name)
        return [None if found is None else found.parts.get(number) for number in numbers]

    async def part_numbers(self, name: str) -> list[int]:
        """See ``ObjectStore``."""
        found = self._find(name)
        return [] if found is None else sorted(found.parts)

    async def delete_parts(self, name: str) -> None:
        """See ``ObjectStore``."""
        if (found := self._find(name)) is not None:
            self._bytes -= sum(map(len, found.parts.values()))
            found.parts.clear()

    async def enter(self, collection: str, name: str, ttl: float) -> None:  # noqa: ARG002 - names that expired leave
        """See ``ObjectStore``."""
        self._collections.setdefault(collection, {})[name] = None

    async def leave(self, collection: str, *names: str) -> None:
        """See ``ObjectStore``."""
        left = self._collections.get(collection, {})
        for name in names:
            left.pop(name, None)
        if not left:
            self._collections.pop(collection, None)

    async def names(self, collection: str) -> list[str]:
        """See ``ObjectStore``."""
        return list(self._collections.get(collection, ()))[:MAX_NAMES]

    async def close(self) -> None:
        """There is nothing to close."""

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
