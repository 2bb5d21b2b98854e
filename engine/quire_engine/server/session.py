"""One router's session: what it submitted, and the batches that it has not acknowledged."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from quire.v1 import engine_pb2 as pb

MAX_UNACKNOWLEDGED = 8192
MAX_UNACKNOWLEDGED_BYTES = 16 << 20
# A batch that would be longer goes as several, so that no step can outgrow what a router receives as one message.
MAX_BATCH_BYTES = 1 << 20


class SessionOverflowError(Exception):
    """The router does not read, or does not acknowledge: what is kept for it reached its bound."""


class Session:
    """Numbers a session's batches from 1 and keeps each until the router acknowledged it.

    ``requests`` maps the live requests' ids, as the router chose them, to the keys that the core knows them by.
    ``draining`` is told with everything that follows.
    """

    def __init__(self, session_id: str, generation: int, *, draining: bool = False) -> None:
        self.session_id = session_id
        self.draining = draining
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
        """Whether there is news that waits for the next batch."""
        return self._deferred is not None

    @property
    def acknowledged(self) -> int:
        """The last sequence that is no longer kept."""
        return self.sequence - len(self._unacknowledged)

    @property
    def is_finished(self) -> bool:
        """Whether the router has heard of the end of everything that it submitted."""
        return not self.requests and not self._unacknowledged

    def can_resume(self, last_sequence: int) -> bool:
        """Whether everything after ``last_sequence`` is still here."""
        return 0 < last_sequence <= self.sequence and last_sequence >= self.acknowledged

    def acknowledge(self, sequence: int) -> None:
        """Forgets the batches up to ``sequence``."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._unacknowledged_bytes -= self._unacknowledged.popleft().ByteSize()

    def defer(self, events: Sequence[pb.KvEvent]) -> None:
        """Notes a step of which the router need not hear at once: its events come first in the next batch."""
        self._deferred = self._deferred or []
        self._deferred += events

    def publish(
        self, step: int, outputs: Sequence[pb.SequenceOutput], load: pb.Load, events: Sequence[pb.KvEvent]
    ) -> None:
        """Adds a step's batches, 0 as the step when none was needed: one, or several where there is much to tell.
        Raises ``SessionOverflowError`` when too many were kept before.
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
        )
        self._deferred = None
        if (size := whole.ByteSize()) <= MAX_BATCH_BYTES:
            self._append(whole, size)
        else:
            for part in _split(whole):
                self._append(part, part.ByteSize())
        self._changed.set()

    def snapshot(self, load: pb.Load, cached: Sequence[pb.KvStored], *, resumed: bool) -> pb.SessionResponse:
        """Where the stream that is about to start stands."""
        sequence = self.acknowledged if resumed else self.sequence
        return pb.SessionResponse(
            snapshot=pb.Snapshot(
                generation=self._generation,
                sequence=sequence,
                resumed=resumed,
                load=load,
                cached=cached,
                draining=self.draining,
            )
        )

    def attach(self) -> int:
        """A new stream takes the session over; the number it must pass to ``stream``. An older stream ends."""
        self._stream += 1
        self._changed.set()
        return self._stream

    def is_attached(self, number: int) -> bool:
        """Whether no newer stream took over."""
        return number == self._stream

    def break_stream(self, number: int) -> None:
        """Ends stream ``number``, and only that one."""
        self._broken = number
        self._changed.set()

    async def stream(self, number: int) -> AsyncIterator[pb.StepBatch]:
        """The batches after the acknowledged ones, as they come; ends when a newer stream attaches or this one is
        broken.
        """
        sent = self.acknowledged
        while self._is_open(number):
            unsent = list(islice(reversed(self._unacknowledged), self.sequence - sent))
            sent = self.sequence
            for batch in reversed(unsent):
                yield batch
            # A newer stream may have cleared the event for itself meanwhile, so it alone does not tell.
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
    """The same news in batches with at most ``MAX_BATCH_BYTES`` of outputs, or a single one; the events come last."""
    part = pb.StepBatch(sequence=whole.sequence, step=whole.step, load=whole.load, draining=whole.draining)
    size = 0
    for output in whole.outputs:
        size += output.ByteSize()
        if part.outputs and size > MAX_BATCH_BYTES:
            yield part
            sequence = part.sequence + 1
            part = pb.StepBatch(sequence=sequence, step=whole.step, load=whole.load, draining=whole.draining)
            size = output.ByteSize()
        part.outputs.append(output)
    part.kv_events.extend(whole.kv_events)
    yield part
