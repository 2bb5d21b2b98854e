"""One router's session: its live requests, and the batches that it has not acknowledged."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from quire.v1 import engine_pb2 as pb

from quire_engine.server.loras import LoRARegistry

MAX_UNACKNOWLEDGED = 8192
MAX_UNACKNOWLEDGED_BYTES = 16 << 20
MAX_BATCH_BYTES = 1 << 20
"""A longer batch is split, so that no step can exceed what a router receives as one message."""


class SessionOverflowError(Exception):
    """The router does not read, or does not acknowledge: the batches kept for it reached their limit."""


class Session:
    """Numbers a session's batches from 1 and keeps each until the router acknowledges it.

    ``requests`` maps the live requests' ids, as the router chose them, to their keys in the core. ``draining`` is sent
    with every later batch, and with the next one ``loras`` and ``active_loras``, which are the engine's adapters and
    those in use, where they have changed.
    """

    def __init__(self, session_id: str, generation: int, *, draining: bool = False) -> None:
        self.session_id = session_id
        self.draining = draining
        self.loras: pb.Loras | None = None
        self.active_loras: pb.ActiveLoras | None = None
        self.requests: dict[str, str] = {}
        self.sequence = 0
        self._generation = generation
        self._unacknowledged: deque[pb.StepBatch] = deque()
        self._unacknowledged_bytes = 0
        self._stream = 0
        self._broken = 0
        self._changed = asyncio.Event()
        self._deferred: list[pb.KvEvent] | None = None

    @property
    def has_deferred(self) -> bool:
        """Whether a step was deferred to the next batch."""
        return self._deferred is not None

    @property
    def acknowledged(self) -> int:
        """The sequence of the last acknowledged batch."""
        return self.sequence - len(self._unacknowledged)

    @property
    def is_finished(self) -> bool:
        """Whether all requests have ended and all batches are acknowledged."""
        return not self.requests and not self._unacknowledged

    def can_resume(self, last_sequence: int) -> bool:
        """Whether all batches after ``last_sequence`` are still kept."""
        return 0 < last_sequence <= self.sequence and last_sequence >= self.acknowledged

    def acknowledge(self, sequence: int) -> None:
        """Drops the batches up to ``sequence``."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._unacknowledged_bytes -= self._unacknowledged.popleft().ByteSize()

    def defer(self, events: Sequence[pb.KvEvent]) -> None:
        """Defers a step that need not be sent at once: its events come first in the next batch."""
        self._deferred = self._deferred or []
        self._deferred += events

    def publish(
        self,
        step: int,
        outputs: Sequence[pb.SequenceOutput],
        load: pb.Load,
        events: Sequence[pb.KvEvent],
        tokens: pb.TokenColumns | None = None,
    ) -> None:
        """Adds a step's batch, split if it is too large. ``step`` is 0 for a batch without a step. Raises
        ``SessionOverflowError`` when too many batches are kept already.
        """
        if len(self._unacknowledged) >= MAX_UNACKNOWLEDGED or self._unacknowledged_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise SessionOverflowError
        whole = pb.StepBatch(
            sequence=self.sequence + 1,
            step=step,
            outputs=outputs,
            load=load,
            kv_events=[*(self._deferred or ()), *events],
            draining=self.draining,
            tokens=tokens,
            loras=self.loras,
            active_loras=self.active_loras,
        )
        self._deferred = self.loras = self.active_loras = None
        if (size := whole.ByteSize()) <= MAX_BATCH_BYTES:
            self._append(whole, size)
        else:
            for part in _split(whole):
                self._append(part, part.ByteSize())
        self._changed.set()

    def snapshot(
        self, load: pb.Load, cached: Sequence[pb.KvStored], loras: LoRARegistry, *, resumed: bool
    ) -> pb.SessionResponse:
        """The first message of a stream: the sequence that it starts after, the load, the cached blocks and the
        engine's adapters.
        """
        sequence = self.acknowledged if resumed else self.sequence
        return pb.SessionResponse(
            snapshot=pb.Snapshot(
                generation=self._generation,
                sequence=sequence,
                resumed=resumed,
                load=load,
                cached=cached,
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
        """Ends stream ``number`` and no newer one."""
        self._broken = number
        self._changed.set()

    async def stream(self, number: int) -> AsyncIterator[pb.StepBatch]:
        """Yields the batches after the acknowledged ones, as they are published. Ends when a newer stream attaches or
        this one is broken.
        """
        sent = self.acknowledged
        while self._is_open(number):
            unsent = list(islice(reversed(self._unacknowledged), self.sequence - sent))
            sent = self.sequence
            for batch in reversed(unsent):
                yield batch
            # A newer stream may have cleared the event meanwhile, so the event alone does not say that nothing changed.
            while sent == self.sequence and self._is_open(number):
                self._changed.clear()
                await self._changed.wait()

    def _append(self, batch: pb.StepBatch, size: int) -> None:
        self.sequence = batch.sequence
        self._unacknowledged.append(batch)
        self._unacknowledged_bytes += size

    def _is_open(self, number: int) -> bool:
        return self.is_attached(number) and self._broken != number


def _split(whole: pb.StepBatch) -> Iterator[pb.StepBatch]:
    """Yields batches with at most ``MAX_BATCH_BYTES`` of outputs, or with a single output; the tokens, which follow
    the outputs, and the events are in the last.
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
