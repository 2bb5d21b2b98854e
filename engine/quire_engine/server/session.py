"""One router's session: its live requests, its unacknowledged batches, and the changes to send with the next batch
(``CacheChanges``).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from math import isfinite

from quire.v1 import engine_pb2 as pb

from quire_engine.core.block_pool import BlockRemoved, BlockStored, KVCacheEvent, Tier
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.messages import changes_to_proto

MAX_UNACKNOWLEDGED = 8192
MAX_UNACKNOWLEDGED_BYTES = 16 << 20
MAX_BATCH_BYTES = 1 << 20
"""A longer batch is split, so that no step exceeds the largest message that a router receives."""

UPDATE_INTERVAL = 0.2
"""Seconds between batches of a session without outputs, unless its router sets another interval. Routers need the
engine's load and cache contents, but not at every step: otherwise every router would process all steps of a fleet.
"""

MAX_UPDATE_INTERVAL = 60.0


class SessionOverflowError(Exception):
    """The router does not read or acknowledge: the batches kept for it have reached their limit."""


class CacheChanges:
    """The changes of the prefix cache between two batches of a session. A block that was stored and removed again, or
    the reverse, cancels out: a pool stores only blocks that it does not have, and removes only blocks that it has. So
    there are never more changes than blocks in the cache before and now.
    """

    def __init__(self) -> None:
        self._pending: dict[Tier, dict[bytes, bool]] = {tier: {} for tier in Tier}  # hash -> whether it was stored
        self._device, self._host = self._pending[Tier.DEVICE], self._pending[Tier.HOST]

    def add(self, events: Iterable[KVCacheEvent]) -> None:
        """Adds the changes of a step, in order."""
        device, host = self._device, self._host
        for event in events:
            pending = device if event.tier is Tier.DEVICE else host
            if pending.pop(event.block_hash, None) is None:
                pending[event.block_hash] = isinstance(event, BlockStored)

    def take(self) -> list[pb.KvEvent]:
        """Returns the changes and forgets them. Removals come first, so that a router that applies the changes in order
        never counts more blocks than the engine has.
        """
        changes: list[pb.KvEvent] = []
        for kind, is_stored in ((BlockRemoved, False), (BlockStored, True)):
            for tier, pending in self._pending.items():
                if hashes := [block_hash for block_hash, stored in pending.items() if stored is is_stored]:
                    changes.append(changes_to_proto(kind, tier, hashes))
        self._device.clear()
        self._host.clear()
        return changes


class Updates:
    """What a router hears without outputs: the engine's load and cache changes, ``interval`` seconds after the batch
    before. ``due`` is that time, and ``has_deferred`` says whether there is anything. With ``is_off`` it hears neither.
    """

    def __init__(self, settings: pb.SetUpdates | None) -> None:
        self.is_off = settings is not None and settings.off
        self.interval = UPDATE_INTERVAL
        self.due = 0.0
        self.has_deferred = False
        self._changes = CacheChanges()
        if settings is not None:
            self.set(settings)

    def set(self, settings: pb.SetUpdates) -> None:
        """Applies the router's settings, except whether updates are off, which stays."""
        before, asked = self.interval, settings.interval_seconds
        self.interval = min(asked, MAX_UPDATE_INTERVAL) if isfinite(asked) and asked > 0 else UPDATE_INTERVAL
        self.due += self.interval - before

    def defer(self, events: Iterable[KVCacheEvent]) -> None:
        """Defers a step that need not be sent at once: its changes come with the next batch."""
        if not self.is_off:
            self._changes.add(events)
            self.has_deferred = True

    def take(self, events: Sequence[pb.KvEvent], now: float) -> Sequence[pb.KvEvent]:
        """Returns the changes for a batch that is sent now: the deferred ones or, if there are none, its ``events``."""
        assert not (events and self.has_deferred), "they follow what was deferred"
        changes = self._changes.take() if self.has_deferred else events
        self.has_deferred, self.due = False, now + self.interval
        return () if self.is_off else changes


class BatchLog:
    """The batches of a session that its router has not acknowledged. ``sequence`` is the number of the last batch."""

    def __init__(self) -> None:
        self.sequence = 0
        self.unacknowledged: deque[pb.StepBatch] = deque()
        self._num_bytes = 0

    @property
    def acknowledged(self) -> int:
        """The number of the last acknowledged batch."""
        return self.sequence - len(self.unacknowledged)

    @property
    def is_full(self) -> bool:
        """Whether as many batches are kept as may be."""
        return len(self.unacknowledged) >= MAX_UNACKNOWLEDGED or self._num_bytes >= MAX_UNACKNOWLEDGED_BYTES

    def append(self, batch: pb.StepBatch, size: int) -> None:
        """Adds a batch of ``size`` bytes."""
        self.sequence = batch.sequence
        self.unacknowledged.append(batch)
        self._num_bytes += size

    def acknowledge(self, sequence: int) -> None:
        """Drops the batches up to ``sequence``."""
        while self.unacknowledged and self.unacknowledged[0].sequence <= sequence:
            self._num_bytes -= self.unacknowledged.popleft().ByteSize()

    def after(self, sequence: int) -> list[pb.StepBatch]:
        """Returns the batches after ``sequence``, in order."""
        return list(islice(reversed(self.unacknowledged), self.sequence - sequence))[::-1]


class Session:
    """Numbers a session's batches from 1 and keeps each until the router acknowledges it.

    ``requests`` maps the ids of live requests, as the router chose them, to their keys in the core. ``draining`` is
    sent with every later batch. ``loras`` and ``active_loras``, the engine's adapters and the ones in use, are sent
    with the next batch if they have changed.
    """

    def __init__(
        self, session_id: str, generation: int, updates: pb.SetUpdates | None = None, *, draining: bool = False
    ) -> None:
        self.session_id = session_id
        self.draining = draining
        self.updates = Updates(updates)
        self.batches = BatchLog()
        self.loras: pb.Loras | None = None
        self.active_loras: pb.ActiveLoras | None = None
        self.requests: dict[str, str] = {}
        self._generation = generation
        self._stream = 0
        self._broken = 0
        self._changed = asyncio.Event()

    @property
    def sequence(self) -> int:
        """The number of the last batch."""
        return self.batches.sequence

    @property
    def is_finished(self) -> bool:
        """Whether all requests have ended and all batches are acknowledged."""
        return not self.requests and not self.batches.unacknowledged

    def can_resume(self, last_sequence: int) -> bool:
        """Whether all batches after ``last_sequence`` are still kept."""
        return 0 < last_sequence <= self.sequence and last_sequence >= self.batches.acknowledged

    def publish(
        self,
        step: int,
        outputs: Sequence[pb.SequenceOutput],
        load: pb.Load,
        events: Sequence[pb.KvEvent] = (),
        tokens: pb.TokenColumns | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        """Adds a batch with the deferred changes or, if there are none, with the ``events`` of its step. Splits it if
        it is too large. ``step`` is 0 for a batch without a step. ``now`` is in seconds on the clock of
        ``updates.due``. Raises ``SessionOverflowError`` if too many batches are kept already.
        """
        if self.batches.is_full:
            raise SessionOverflowError
        whole = pb.StepBatch(
            sequence=self.sequence + 1,
            step=step,
            outputs=outputs,
            load=None if self.updates.is_off else load,
            kv_events=self.updates.take(events, now),
            draining=self.draining,
            tokens=tokens,
            loras=self.loras,
            active_loras=self.active_loras,
        )
        self.loras = self.active_loras = None
        if (size := whole.ByteSize()) <= MAX_BATCH_BYTES:
            self.batches.append(whole, size)
        else:
            for part in _split(whole):
                self.batches.append(part, part.ByteSize())
        self._changed.set()

    def snapshot(
        self, load: pb.Load, cached: Sequence[pb.KvStored], loras: LoRARegistry, *, resumed: bool
    ) -> pb.SessionResponse:
        """Returns the first message of a stream: the sequence after which it starts, the load, the cached blocks and
        the engine's adapters.
        """
        sequence = self.batches.acknowledged if resumed else self.sequence
        return pb.SessionResponse(
            snapshot=pb.Snapshot(
                generation=self._generation,
                sequence=sequence,
                resumed=resumed,
                load=load,
                cached=() if self.updates.is_off else cached,
                draining=self.draining,
                loras=loras.to_proto(),
                active_loras=loras.active,
            )
        )

    def attach(self) -> int:
        """Starts a new stream and ends the older one. Returns the number to pass to ``stream``."""
        self._stream += 1
        self._changed.set()
        return self._stream

    def is_attached(self, number: int) -> bool:
        """Whether stream ``number`` is the newest."""
        return number == self._stream

    def break_stream(self, number: int) -> None:
        """Ends stream ``number``, but not a newer one."""
        self._broken = number
        self._changed.set()

    async def stream(self, number: int) -> AsyncIterator[pb.StepBatch]:
        """Yields the batches after the acknowledged ones, as they are published. Ends when a newer stream attaches or
        this one is broken.
        """
        sent = self.batches.acknowledged
        while self._is_open(number):
            unsent, sent = self.batches.after(sent), self.sequence
            for batch in unsent:
                yield batch
            # A newer stream may have cleared the event meanwhile, so the event alone does not show that nothing
            # changed.
            while sent == self.sequence and self._is_open(number):
                self._changed.clear()
                await self._changed.wait()

    def _is_open(self, number: int) -> bool:
        return self.is_attached(number) and self._broken != number


def _split(whole: pb.StepBatch) -> Iterator[pb.StepBatch]:
    """Yields batches with at most ``MAX_BATCH_BYTES`` of outputs, or with a single output. The last one has the tokens,
    which follow the outputs, and the events.
    """
    part = pb.StepBatch(sequence=whole.sequence, step=whole.step, load=whole.load, draining=whole.draining)
    if whole.HasField("loras"):
        part.loras.CopyFrom(whole.loras)
    if whole.HasField("active_loras"):
        part.active_loras.CopyFrom(whole.active_loras)
    size = 0
    for output in whole.outputs:
        size += output.ByteSize()
        if part.outputs and size > MAX_BATCH_BYTES:
            yield part
            sequence = part.sequence + 1
            part = pb.StepBatch(sequence=sequence, step=whole.step, load=whole.load, draining=whole.draining)
            size = output.ByteSize()
        part.outputs.append(output)
    if whole.HasField("tokens"):
        part.tokens.CopyFrom(whole.tokens)
    part.kv_events.extend(whole.kv_events)
    yield part
