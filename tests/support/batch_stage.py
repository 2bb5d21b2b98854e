"""Batches over the scripted API: what builds their routes, and workers that die at a given step."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import time
from typing import Any

from quire_router.admission.tenants import Tenants
from quire_router.api.rest.batch_endpoints import BatchApi
from quire_router.api.rest.batch_lines import BatchLines
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.batches.batch import WINDOW, Batch
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import CHUNK_BYTES, FileInfo, Files, FileSettings
from quire_router.batches.worker import BatchWorker
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor
from quire_router.journal.base import RequestRecord
from quire_router.journal.objects import ANY, Excess, MemoryObjectStore, ObjectStore, Quota, StoredObject

from tests.support.scripted_api import MODEL, ScriptedRunner, Stage, open_stage

CHAT = "/v1/chat/completions"


def batch_api(
    service: ApiService,
    store: ObjectStore,
    *,
    owner: str = "me",
    settings: FileSettings | None = None,
    clock: Callable[[], float] = time,
    quota: ResponseQuota | None = None,
) -> BatchApi:
    batches = Batches(store, Files(store, settings or FileSettings()))
    lines = BatchLines(service, Tenants(), quota)
    return BatchApi(batches, BatchWorker(batches, lines, owner=owner, max_line_bytes=10_000, clock=clock))


@asynccontextmanager
async def batch_stage(
    *args: Any,
    store: ObjectStore | None = None,
    settings: FileSettings | None = None,
    quota: ResponseQuota | None = None,
    **more: Any,
) -> AsyncIterator[Stage]:
    """The scripted API with files and batches, and a worker that runs until the block ends."""
    working: list[asyncio.Task[None]] = []

    def build(service: ApiService) -> BatchApi:
        api = batch_api(service, store or MemoryObjectStore(), settings=settings, quota=quota)
        working.append(asyncio.create_task(api.worker.run()))
        return api

    async with open_stage(*args, batches=build, quota=quota, **more) as stage:
        try:
            yield stage
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


def line(custom_id: str, content: str = "hi", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def store_batch(api: BatchApi, content: bytes, endpoint: str = CHAT) -> Batch:
    """A batch of a file with this content, which nobody has begun."""
    now = int(time())

    async def chunks() -> AsyncGenerator[bytes]:
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]

    info = await api.batches.files.write(FileInfo("file-in", "", "in.jsonl", "batch", 0, now, now + 9000), chunks())
    batch = Batch("batch_1", "", "", endpoint, info.id, now, now + WINDOW)
    await api.batches.create(batch)
    return batch


async def content_of(api: BatchApi, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    info = await api.batches.files.get(file_id, "")
    data = b"".join([chunk async for chunk in api.batches.files.read(info)])
    assert len(data) == info.bytes
    return [json.loads(each) for each in data.splitlines()]


@dataclass
class Life:
    """A router's process, which dies at its step number ``steps``: just before it takes effect or, with ``after``, just
    before its result is known. Nothing that it does from then on has an effect.
    """

    steps: int
    after: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def step(self, act: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        self.steps -= 1
        if self.steps < 0 or (self.steps == 0 and not self.after):
            await self.die()
        result = await act()
        if self.steps <= 0:
            await self.die()
        return result

    async def die(self) -> None:
        self.dead.set()
        await asyncio.Event().wait()


class MortalStore:
    """An object store as a process with a ``life`` uses it."""

    def __init__(self, store: ObjectStore, life: Life) -> None:
        self._store = store
        self._life = life

    async def get(self, name: str) -> StoredObject | None:
        return await self._life.step(lambda: self._store.get(name))

    async def get_many(self, names: Sequence[str]) -> list[StoredObject | None]:
        return await self._life.step(lambda: self._store.get_many(names))

    async def put(self, name: str, data: bytes, version: int, ttl: float, *, drop_parts: bool = False) -> bool:
        return await self._life.step(lambda: self._store.put(name, data, version, ttl, drop_parts=drop_parts))

    async def delete(self, name: str) -> None:
        await self._life.step(lambda: self._store.delete(name))

    async def add_part(self, name: str, number: int, data: bytes, ttl: float) -> bool:
        return await self._life.step(lambda: self._store.add_part(name, number, data, ttl))

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        return await self._life.step(lambda: self._store.parts(name, numbers))

    async def part_numbers(self, name: str) -> list[int]:
        return await self._life.step(lambda: self._store.part_numbers(name))

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        await self._life.step(lambda: self._store.enter(collection, name, ttl))

    async def leave(self, collection: str, *names: str) -> None:
        await self._life.step(lambda: self._store.leave(collection, *names))

    async def names(self, collection: str) -> list[str]:
        return await self._life.step(lambda: self._store.names(collection))

    async def charge(self, account: str, name: str, size: int, ttl: float, quota: Quota = ANY) -> Excess | None:
        return await self._life.step(lambda: self._store.charge(account, name, size, ttl, quota))

    async def discharge(self, account: str, name: str) -> None:
        await self._life.step(lambda: self._store.discharge(account, name))


class MortalRunner:
    """A runner as a process with a ``life`` uses it; requests go on without it."""

    def __init__(self, runner: ScriptedRunner, life: Life) -> None:
        self._runner = runner
        self._life = life

    async def start(self, generation: GenerationRequest) -> bool:
        return await self._life.step(lambda: self._runner.start(generation))

    async def record(self, request_id: str) -> RequestRecord | None:
        return await self._life.step(lambda: self._runner.record(request_id))

    def resume(
        self, record: RequestRecord, cursor: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        return self._runner.resume(record, cursor, deadline)

    async def cancel(self, request_id: str) -> bool:
        return await self._life.step(lambda: self._runner.cancel(request_id))
