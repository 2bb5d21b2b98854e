"""``UpdateSharing``: the workers of one router hear of each engine once. Every worker has sessions with all engines,
but only one of them, the engine's *listener*, is sent its load and cache contents, and passes them on to the others
over a Unix socket in the folder of their supervisor: many engines in one message, which costs a fraction of as many
messages.

Workers that start later, or whose pool has a new engine, ask its listener for all that is known. What a listener has
passed on counts until it says something else, or has been gone for ``GONE_SECONDS``: its supervisor starts it again
within some seconds, and its new sessions begin with whole snapshots.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from zlib import crc32

from google.protobuf.message import DecodeError
from quire.v1 import engine_pb2, load_pb2
from quire_proto.supervise import Backoff, SupervisedTask

from quire_router.core.retry import supervise
from quire_router.placement.prefix_index import Tier

log = logging.getLogger(__name__)

PASS_ON_SECONDS = 0.05
"""For which updates are collected; with the way to an engine less than ``load.SETTLE_SECONDS``."""

GONE_SECONDS = 10.0
MAX_UNREAD_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
_SLICE = 2_000  # blocks, about a millisecond
_APPLIED_AT_ONCE = 16  # updates
_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0
_LENGTH_BYTES = 4
_TIERS = {Tier.DEVICE: engine_pb2.KV_TIER_DEVICE, Tier.HOST: engine_pb2.KV_TIER_HOST}


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which of so many ``workers`` this is, from 1 on, and the ``folder`` of their sockets."""

    folder: Path
    number: int
    workers: int

    def socket(self, number: int) -> str:
        """The path at which a worker passes on what it hears."""
        return str(self.folder / f"updates-{number}.sock")


class UpdateSharing:
    """One worker's part. The pool reports to it what it hears, and sets what it is to call: ``apply`` with another
    worker's update, ``forget`` with an engine of which nothing is known any more, ``engine_ids`` for all that the pool
    has. ``blocks`` returns what an engine has cached, None while that is not complete.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self.apply: Callable[[load_pb2.EngineUpdate], None] = lambda _update: None
        self.forget: Callable[[str], None] = lambda _engine_id: None
        self.engine_ids: Callable[[], Iterable[str]] = lambda: ()
        self.blocks: Callable[[str], Iterator[tuple[Tier, bytes]] | None] = lambda _engine_id: iter(())
        self._place = place
        self._loads: dict[str, engine_pb2.Load] = {}  # the last of each engine that this worker hears
        self._pending: dict[str, load_pb2.EngineUpdate] = {}
        self._held: Counter[str] = Counter()  # engines whose contents are being sent, before what is pending
        self._followers: set[asyncio.StreamWriter] = set()
        self._pass_on_timer: asyncio.TimerHandle | None = None
        self._listeners: dict[int, asyncio.StreamWriter] = {}
        self._wanted: dict[int, list[str]] = {}
        self._want_handle: asyncio.Handle | None = None
        self._tasks: list[SupervisedTask] = []

    def hears(self, engine_id: str) -> bool:
        """Whether this worker is the engine's listener."""
        return self._listener_of(engine_id) == self._place.number

    def start(self) -> None:
        """Begins to pass on, and to hear the others; never waits, never fails."""
        self._tasks = [supervise("updates for workers", self._serve)]
        for number in range(1, self._place.workers + 1):
            if number != self._place.number:
                task = supervise("updates of workers", partial(self._follow, number), of=str(number))
                self._tasks.append(task)

    async def close(self) -> None:
        """Ends both."""
        await asyncio.gather(*(task.stop() for task in self._tasks))
        for handle in (self._pass_on_timer, self._want_handle):
            if handle is not None:
                handle.cancel()
        for writer in (*self._followers, *self._listeners.values()):
            writer.close()

    # What this worker hears

    def on_load(self, engine_id: str, load: engine_pb2.Load) -> None:
        """An engine that this worker hears has reported its load."""
        self._loads.setdefault(engine_id, engine_pb2.Load()).CopyFrom(load)
        self._update(engine_id).load.CopyFrom(load)

    def on_kv_event(self, engine_id: str, change: engine_pb2.Snapshot | engine_pb2.KvEvent) -> None:
        """Its cache has changed."""
        update = self._update(engine_id)
        if isinstance(change, engine_pb2.Snapshot):
            update.ClearField("kv_events")
            update.snapshot.CopyFrom(change)
        else:
            update.kv_events.append(change)

    def on_removed(self, engine_id: str) -> None:
        """It has left."""
        self._loads.pop(engine_id, None)

    def _update(self, engine_id: str) -> load_pb2.EngineUpdate:
        update = self._pending.get(engine_id)
        if update is None:
            update = self._pending[engine_id] = load_pb2.EngineUpdate(engine_id=engine_id)
            if self._pass_on_timer is None:
                self._pass_on_timer = asyncio.get_running_loop().call_later(PASS_ON_SECONDS, self._pass_on)
        return update

    def _pass_on(self) -> None:
        self._pass_on_timer = None
        updates = [update for engine_id, update in self._pending.items() if not self._held[engine_id]]
        self._pending = {engine_id: update for engine_id, update in self._pending.items() if self._held[engine_id]}
        if self._followers:
            for frame in map(_frame, _batches(updates)):
                for writer in list(self._followers):
                    self._send(writer, frame)

    def _send(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("a worker fell behind on engines' reports and has to ask again")
            self._followers.discard(writer)
            writer.close()
        else:
            writer.write(frame)

    async def _serve(self) -> None:
        path = self._place.socket(self._place.number)
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a worker that had this number and was killed
        server = await asyncio.start_unix_server(self._serve_follower, path)
        async with server:
            await server.serve_forever()

    async def _serve_follower(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._followers.add(writer)
        try:
            while (payload := await _read(reader)) is not None:
                for engine_id in load_pb2.EngineUpdatesWanted.FromString(payload).engine_ids:
                    await self._send_all(engine_id, writer)
        except (OSError, DecodeError):
            pass  # it ended, and its successor asks again
        finally:
            self._followers.discard(writer)
            writer.close()

    async def _send_all(self, engine_id: str, writer: asyncio.StreamWriter) -> None:
        """Sends what is known of an engine. What it reports meanwhile follows: to apply it twice changes nothing."""
        while (blocks := self.blocks(engine_id)) is None:  # noqa: ASYNC110 - it takes some turns of the loop
            await asyncio.sleep(PASS_ON_SECONDS)
        self._held[engine_id] += 1
        try:
            found: dict[Tier, list[bytes]] = {tier: [] for tier in Tier}
            while some := list(islice(blocks, _SLICE)):
                for tier, block_hash in some:
                    found[tier].append(block_hash)
                await asyncio.sleep(0)
            load = self._loads.get(engine_id, engine_pb2.Load())
            cached = [engine_pb2.KvStored(block_hashes=each, tier=_TIERS[tier]) for tier, each in found.items() if each]
            snapshot = engine_pb2.Snapshot(load=load, cached=cached)
            update = load_pb2.EngineUpdate(engine_id=engine_id, load=load, snapshot=snapshot)
            self._send(writer, _frame(load_pb2.EngineUpdates(updates=[update])))
        finally:
            self._held[engine_id] -= 1
            if engine_id in self._pending and self._pass_on_timer is None:
                self._pass_on_timer = asyncio.get_running_loop().call_later(PASS_ON_SECONDS, self._pass_on)
        await writer.drain()

    # What the others hear

    def want(self, engine_id: str) -> None:
        """The pool has a new engine that another worker hears: asks it for all that is known."""
        self._wanted.setdefault(self._listener_of(engine_id), []).append(engine_id)
        self._want_handle = self._want_handle or asyncio.get_running_loop().call_soon(self._send_wanted)

    def _send_wanted(self) -> None:
        self._want_handle = None
        wanted, self._wanted = self._wanted, {}
        for number, engine_ids in wanted.items():
            if (writer := self._listeners.get(number)) is not None:  # else all are asked for when it is there
                writer.write(_frame(load_pb2.EngineUpdatesWanted(engine_ids=engine_ids)))

    async def _follow(self, number: int) -> None:
        """Applies what another worker hears, for as long as this one runs."""
        loop, backoff = asyncio.get_running_loop(), Backoff(_FIRST_DELAY, _LAST_DELAY)
        heard = loop.time()
        while True:
            with suppress(OSError, DecodeError):
                reader, writer = await asyncio.open_unix_connection(self._place.socket(number))
                backoff.reset()
                try:
                    self._listeners[number] = writer
                    for engine_id in self._heard_by(number):
                        self.want(engine_id)
                    await self._apply_all(reader)
                finally:
                    self._listeners.pop(number, None)
                    writer.close()
                    heard = loop.time()
            if loop.time() - heard > GONE_SECONDS:
                heard = float("inf")  # once
                log.warning("worker %d is gone; what it reported of engines no longer counts", number)
                for engine_id in self._heard_by(number):
                    self.forget(engine_id)
            await asyncio.sleep(backoff.next())

    async def _apply_all(self, reader: asyncio.StreamReader) -> None:
        while (payload := await _read(reader)) is not None:
            for place, update in enumerate(load_pb2.EngineUpdates.FromString(payload).updates, 1):
                self.apply(update)
                if place % _APPLIED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _heard_by(self, number: int) -> list[str]:
        return [engine_id for engine_id in self.engine_ids() if self._listener_of(engine_id) == number]

    def _listener_of(self, engine_id: str) -> int:
        return crc32(engine_id.encode()) % self._place.workers + 1


def _batches(updates: Iterable[load_pb2.EngineUpdate]) -> Iterator[load_pb2.EngineUpdates]:
    """In messages that are not much longer than ``_BATCH_BYTES``: a fleet that joins has the contents of all caches."""
    batch, size = load_pb2.EngineUpdates(), 0
    for update in updates:
        batch.updates.append(update)
        size += update.ByteSize()
        if size > _BATCH_BYTES:
            yield batch
            batch, size = load_pb2.EngineUpdates(), 0
    if batch.updates:
        yield batch


def _frame(message: load_pb2.EngineUpdates | load_pb2.EngineUpdatesWanted) -> bytes:
    payload = message.SerializeToString()
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's payload; None at the end. Raises ``OSError`` for one that is too long."""
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if size > _MAX_MESSAGE_BYTES:
            raise OSError("a message is too long")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None
