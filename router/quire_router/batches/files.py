"""``Files``: what a tenant uploads for batches, and what batches leave: kept in the ``ObjectStore`` in chunks, found by
this tenant alone, and gone after a time.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from secrets import token_hex
from time import time
from typing import Any

from quire_proto.errors import invalid

from quire_router.core.errors import file_not_found, journal_unavailable, share_full, too_much_stored
from quire_router.core.tenant_ids import ids_of, owns
from quire_router.journal import records
from quire_router.journal.objects import ANY, FILES, Excess, ObjectStore, Quota, StoredObject, account_of, read_objects

CHUNK_BYTES = 256 * 1024
MAX_FILES = 1_000  # of a tenant
MAX_FILENAME = 255  # characters
UPLOAD_TTL = 3600.0  # seconds after its last chunk for which a file that is not complete is kept
MIN_TTL, MAX_TTL = 3600, 2_592_000  # seconds that a client may ask for, as OpenAI's


@dataclass(frozen=True, slots=True)
class FileSettings:
    """A file has ``max_bytes`` at most. All of a tenant have ``max_tenant_bytes``, with uploads that have not ended and
    what ``Files.charge_results`` counts. They are kept for ``retention`` seconds unless their client asks for less.
    """

    max_bytes: int = 100 * 2**20
    max_tenant_bytes: int = 2**30
    retention: float = 604_800.0


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is stored of a file beside its chunks. Times are in seconds since 1970."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def to_object(self) -> dict[str, object]:
        """Returns the file as OpenAI's API shows it."""
        shown = {name: value for name, value in asdict(self).items() if name != "tenant"}
        return {"object": "file", **shown, "status": "processed", "status_details": None}


class Files:
    """The files of all tenants. Raises ``QuireError``, UNAVAILABLE among others (see ``ObjectStore``)."""

    def __init__(self, store: ObjectStore, settings: FileSettings) -> None:
        self._store = store
        self.settings = settings

    async def new_upload(self, tenant: str) -> "Upload":
        """Returns an upload for a tenant. Raises ``QuireError`` for one that has as many files as it may have."""
        upload = Upload(self, self._store, tenant)
        await self.charge(tenant, upload.id, 0, UPLOAD_TTL)
        return upload

    async def charge(self, tenant: str, name: str, size: int, ttl: float) -> None:
        """Counts a file of this tenant before its bytes are written. Raises ``QuireError`` OVERLOADED for one that has
        as many files, or bytes of them, as it may have.
        """
        quota = Quota(MAX_FILES, self.settings.max_tenant_bytes)
        excess = await self._store.charge(account_of(FILES, tenant), name, size, ttl, quota)
        if excess is Excess.NAMES:
            raise too_much_stored(f"There are {MAX_FILES} files, as many as there may be: delete some.")
        if excess is Excess.SHARE:
            raise share_full()
        if excess is not None:
            most = self.settings.max_tenant_bytes
            raise too_much_stored(f"All files together would be larger than {most} bytes: delete some.")

    async def charge_results(self, tenant: str, batch_id: str, size: int, ttl: float) -> bool:
        """Counts the results of a batch, of ``size`` bytes, among its tenant's files. They count twice, because they
        are copied into files when the batch ends. Returns False, and counts nothing, if that is too much.
        """
        quota = Quota(max_bytes=self.settings.max_tenant_bytes)
        return await self._store.charge(account_of(FILES, tenant), batch_id, 2 * size, ttl, quota) is None

    async def discharge(self, tenant: str, name: str) -> None:
        """Counts a file, or the results of a batch, no more."""
        await self._store.discharge(account_of(FILES, tenant), name)

    async def get(self, file_id: str, tenant: str, param: str = "file_id") -> FileInfo:
        """Returns a file of this tenant. Raises ``QuireError`` NOT_FOUND for the parameter that names it."""
        info = await self._find(_name(file_id, param))
        if info is None or not owns(tenant, info.tenant):
            raise file_not_found(file_id, param)
        return info

    async def is_whole(self, file_id: str) -> bool:
        """Whether a file is there with all that was written: a Redis that died may have lost a part of it."""
        info = await self._find(file_id)
        return info is not None and len(await self._store.part_numbers(file_id)) >= _num_chunks(info)

    async def _find(self, file_id: str) -> FileInfo | None:
        found = await self._store.get(file_id)
        return None if found is None else records.read(FileInfo, file_id, found.data)

    async def list(
        self, tenant: str, after: str = "", *, ascending: bool = False, purpose: str | None = None
    ) -> AsyncGenerator[FileInfo]:
        """Yields the files of a tenant, of all purposes or of one, the newest first, or those that come ``after`` one
        of them. Raises ``QuireError`` INVALID if there is none of that id.
        """
        async with aclosing(owned_objects(self._store, collection_of, tenant, after, ascending=ascending)) as objects:
            async for name, found in objects:
                info = records.read(FileInfo, name, found.data)
                if info is not None and purpose in (None, info.purpose):
                    yield info

    async def delete(self, info: FileInfo) -> None:
        """Deletes a file."""
        await self.discharge(info.tenant, info.id)  # before: if this fails, the client can repeat the request
        await self._store.delete(info.id)
        await self._store.leave(collection_of(info.tenant), info.id)

    async def read(self, info: FileInfo) -> AsyncGenerator[bytes]:
        """Yields the chunks of a file. Raises ``QuireError`` NOT_FOUND when it was deleted meanwhile."""
        for number in range(_num_chunks(info)):
            (chunk,) = await self._store.parts(info.id, [number])
            if chunk is None:
                raise file_not_found(info.id)
            yield chunk

    async def write(self, info: FileInfo, chunks: AsyncIterator[bytes]) -> FileInfo:
        """Writes a file of what is stored and counted already. Its id follows from what it holds, so that it may be
        written again: what is there stays. Returns it with its size.
        """
        ttl = max(1.0, info.expires_at - time())

        async def charge(size: int) -> None:
            await self._store.charge(account_of(FILES, info.tenant), info.id, size, ttl, ANY)

        writer = _ChunkWriter(self._store, info.id, ttl, charge)
        async for chunk in chunks:
            await writer.write(chunk)
        info = replace(info, bytes=await writer.end())
        await _create(self._store, info, ttl)
        return info


class Upload:
    """A file that arrives. Each chunk is counted before it is written. The file cannot be found until it has ended; one
    that breaks off is deleted, or expires if its router dies.
    """

    def __init__(self, files: Files, store: ObjectStore, tenant: str) -> None:
        self.id = f"file-{token_hex(12)}"
        self._files = files
        self._store = store
        self._settings = files.settings
        self._tenant = tenant
        self._writer = _ChunkWriter(store, self.id, UPLOAD_TTL, self._charge)

    async def write(self, data: bytes) -> None:
        """Adds some bytes. Raises ``QuireError`` INVALID for too large a file, and OVERLOADED where its tenant would
        have too many bytes.
        """
        if self._writer.bytes + len(data) > self._settings.max_bytes:
            raise invalid("file", f"The file is larger than the limit of {self._settings.max_bytes} bytes.")
        await self._writer.write(data)

    async def end(self, filename: str, purpose: str, ttl: float | None) -> FileInfo:
        """Makes the file one that can be found, for ``ttl`` seconds at most. Raises ``QuireError`` as ``write`` does,
        and UNAVAILABLE if a part of it was lost.
        """
        size, now = await self._writer.end(), int(time())
        kept = min(self._settings.retention, self._settings.retention if ttl is None else ttl)
        info = FileInfo(self.id, self._tenant, filename, purpose, size, now, int(now + kept))
        await _create(self._store, info, kept)
        if not await self._files.is_whole(info.id):
            raise journal_unavailable()
        await self._files.charge(self._tenant, self.id, size, kept)  # until now it counted as an upload
        return info

    async def abandon(self) -> None:
        """Deletes what has arrived."""
        await self._store.delete(self.id)
        await self._files.discharge(self._tenant, self.id)

    async def _charge(self, size: int) -> None:
        await self._files.charge(self._tenant, self.id, size, UPLOAD_TTL)


class _ChunkWriter:
    """Writes bytes as chunks of one size. Calls ``charge`` before each, with the bytes of the file up to its end."""

    def __init__(
        self, store: ObjectStore, name: str, ttl: float, charge: Callable[[int], Coroutine[Any, Any, None]]
    ) -> None:
        self.bytes = 0
        self._store = store
        self._name = name
        self._ttl = ttl
        self._charge = charge
        self._number = 0
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        self.bytes += len(data)
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            await self._flush()

    async def end(self) -> int:
        """Writes what is left. Returns the number of bytes."""
        if self._buffer:
            await self._flush()
        return self.bytes

    async def _flush(self) -> None:
        chunk = bytes(self._buffer[:CHUNK_BYTES])
        await self._charge(self._number * CHUNK_BYTES + len(chunk))
        await self._store.add_part(self._name, self._number, chunk, self._ttl)
        del self._buffer[:CHUNK_BYTES]
        self._number += 1


async def owned_objects(
    store: ObjectStore, collection_of: Callable[[str], str], tenant: str, after: str, *, ascending: bool = False
) -> AsyncGenerator[tuple[str, StoredObject]]:
    """Yields the objects of a tenant's collections with their names, the newest first, or those that come ``after`` one
    of them. Raises ``QuireError`` INVALID if that is not one of them.
    """
    places = [
        (place, name) for place in map(collection_of, reversed(ids_of(tenant))) for name in await store.names(place)
    ]
    ordered = places if ascending else places[::-1]
    if after:
        names = [name for _, name in ordered]
        if after not in names:
            raise invalid("after", f"This list has no {after[:64]!r}.")
        ordered = ordered[names.index(after) + 1 :]
    for place, group in groupby(ordered, itemgetter(0)):
        async with aclosing(read_objects(store, place, [name for _, name in group])) as objects:
            async for each in objects:
                yield each


async def _create(store: ObjectStore, info: FileInfo, ttl: float) -> None:
    """Lists a file that is there: readers of a list take names without an object out of it (``read_objects``). A file
    whose router died before it was listed expires.
    """
    await store.put(info.id, records.encode(info), 0, ttl)
    await store.enter(collection_of(info.tenant), info.id, ttl)


def _num_chunks(info: FileInfo) -> int:
    return -(-info.bytes // CHUNK_BYTES)


def collection_of(tenant: str) -> str:
    """Returns the collection of a tenant's files."""
    return f"files:{tenant}"


def _name(file_id: str, param: str) -> str:
    """Raises ``QuireError`` NOT_FOUND for what is no file's id."""
    if not file_id.startswith("file-") or not file_id.isascii() or len(file_id) > 64:
        raise file_not_found(file_id, param)
    return file_id
