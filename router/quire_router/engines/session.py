"""``Session``: the state of a router's session with one engine: what is in flight, and how batches are applied. And
``CommandQueue``, the commands to the engine. Does no I/O.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from uuid import uuid4

from quire.v1 import engine_pb2
from quire_proto.convert import error_from_proto, finish_from_proto, logprobs_from_proto, stop_token_from_proto
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason

from quire_router.core.generation import LoRA
from quire_router.engines.attempt import (
    DrainExceeded,
    EngineDraining,
    EngineFull,
    EngineLost,
    EngineSilent,
    LoRAMissing,
    Output,
)
from quire_router.engines.base import KvListener, LoadListener
from quire_router.engines.output_stream import ExpectedOutput, OutputStream
from quire_router.engines.settings import ConnectionSettings

log = logging.getLogger(__name__)

OUTPUTS_PER_YIELD = 4
TOKENS_PER_YIELD = 8
"""A sixth of a millisecond or so, after which requests that come have their turn."""


class CommandQueue:
    """Commands to one engine, in a bounded queue that one writer empties. Cancels go first, because they free memory;
    of acknowledgements only the newest is kept.

    Cancels need no limit of their own: there is at most one for each request that was submitted and has not ended.
    """

    def __init__(self, max_submits: int) -> None:
        self._max_submits = max_submits
        self._submits: OrderedDict[str, engine_pb2.Submit] = OrderedDict()
        self._cancels: OrderedDict[str, dict[int, None]] = OrderedDict()
        self._ack = 0
        self._updates: engine_pb2.SetUpdates | None = None
        self._nonempty = asyncio.Event()

    def submit(self, message: engine_pb2.Submit) -> None:
        """Raises ``EngineFull`` if the engine does not read commands fast enough."""
        if len(self._submits) >= self._max_submits:
            raise EngineFull("too many requests wait to be sent to it")
        self._submits[message.request_id] = message
        self._nonempty.set()

    def repeat(self, message: engine_pb2.Submit) -> None:
        """Puts a Submit that may have been lost before all others; it was within the limit when it came first."""
        self._submits[message.request_id] = message
        self._submits.move_to_end(message.request_id, last=False)
        self._nonempty.set()

    def has_submit(self, request_id: str) -> bool:
        """Whether the request's Submit has not been handed to the writer."""
        return request_id in self._submits

    def withdraw(self, request_id: str) -> bool:
        """Removes a Submit. Returns False if the writer has it, or has sent it."""
        return self._submits.pop(request_id, None) is not None

    def cancel(self, request_id: str, *indexes: int) -> None:
        """Has the engine end some choices of a request, or all of it without any. Idempotent."""
        waiting = self._cancels.get(request_id)
        if not indexes or waiting is None:
            self._cancels[request_id] = dict.fromkeys(indexes)
        elif waiting:  # and not the whole request
            waiting.update(dict.fromkeys(indexes))
        self._nonempty.set()

    def has_cancel(self, request_id: str) -> bool:
        """Whether a Cancel of the request waits for the writer."""
        return request_id in self._cancels

    def ack(self, sequence: int) -> None:
        """Every batch up to ``sequence`` was processed."""
        self._ack = sequence
        self._nonempty.set()

    def set_updates(self, updates: engine_pb2.SetUpdates) -> None:
        """Has the engine send its updates as often as this."""
        self._updates = updates
        self._nonempty.set()

    def reset_for_stream(self) -> None:
        """A new stream begins: acknowledgements and Cancels of the old one mean nothing on it, and its Open has the
        updates.
        """
        self._cancels.clear()
        self._ack, self._updates = 0, None

    async def next(self) -> engine_pb2.SessionRequest:
        """Waits for a command and takes it out."""
        while True:
            command = self._pop()
            if command is not None:
                return command
            self._nonempty.clear()
            await self._nonempty.wait()

    def _pop(self) -> engine_pb2.SessionRequest | None:
        if self._cancels:
            request_id, indexes = self._cancels.popitem(last=False)
            return engine_pb2.SessionRequest(cancel=engine_pb2.Cancel(request_id=request_id, indexes=indexes))
        if self._submits:
            _, message = self._submits.popitem(last=False)
            return engine_pb2.SessionRequest(submit=message)
        if self._ack:
            sequence, self._ack = self._ack, 0
            return engine_pb2.SessionRequest(ack=engine_pb2.Ack(sequence=sequence))
        if self._updates is not None:
            updates, self._updates = self._updates, None
            return engine_pb2.SessionRequest(set_updates=updates)
        return None


MAX_PENDING_CANCELS = 65_536
MAX_UNLOADED_LORAS = 1_024


class SequenceGap(Exception):  # noqa: N818 - a finding about a stream
    """A batch is missing, so that what the engine sent since cannot be applied."""


class Session:
    """A router's session with one engine, which outlives its streams.

    A Cancel may be lost with a stream, so what was cancelled is remembered until the engine reports its end, and is
    cancelled again on the next stream. A Submit may be lost as well, which the router cannot find out: it is kept until
    the engine answers, and repeated on a stream that resumes the session, because an engine ignores a request that it
    runs already. At most ``settings.max_unconfirmed`` are kept; others are cancelled and end with ``EngineLost``.

    ``loras`` are the engine's adapters by name, of which its requests use those that ``active_loras`` names, and
    ``unloaded_loras`` those that it had: what it lost because it began again is not among them. ``on_loras`` is called
    when there are others. ``address`` is the engine's, for the log.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        on_kv_event: KvListener | None = None,
        on_load: LoadListener | None = None,
        on_loras: Callable[[], None] = lambda: None,
        *,
        address: str = "",
    ) -> None:
        self.address = address
        self.id = uuid4().hex
        self.engine_generation = 0
        self.sequence = 0
        self.draining = False
        self.kv_events = 0
        self.loras: dict[str, LoRA] = {}
        self.unloaded_loras: dict[LoRA, None] = {}  # the oldest first
        self.active_loras: set[str] = set()
        self.commands = CommandQueue(settings.max_unsent)
        self._settings = settings
        self._on_kv_event = on_kv_event
        self._on_load = on_load
        self._on_loras = on_loras
        self._streams: dict[str, OutputStream] = {}
        self._choices: dict[int, tuple[OutputStream, int]] = {}  # by handle: the request's plus the choice's index
        self._next_handle = 1
        self._unconfirmed: OrderedDict[str, engine_pb2.Submit] = OrderedDict()
        self._resubmitted: set[str] = set()
        self._maybe_duplicated: dict[str, None] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()  # and how many choices the engine has not ended

    @property
    def in_flight(self) -> int:
        """Requests whose outputs have not all ended."""
        return len(self._streams)

    @property
    def _loss(self) -> type[EngineLost]:
        """The exception for a request that the engine runs and that is lost now."""
        return DrainExceeded if self.draining else EngineLost

    def submit(self, message: engine_pb2.Submit, vocabulary: int = 0) -> OutputStream:
        """Sends a request, once the writer gets to it, to an engine whose model has so many tokens; 0 if unknown.
        Raises ``EngineFull`` if too many wait already.
        """
        if message.request_id in self._streams:
            raise internal()
        message.handle = self._next_handle
        self.commands.submit(message)
        stream = OutputStream(
            message.request_id,
            ExpectedOutput.of(message, vocabulary),
            on_cancel=self._cancel,
            slow_client_timeout=self._settings.slow_client_timeout,
        )
        self._streams[message.request_id] = stream
        self._add_handles(stream, message.handle)
        self._unconfirmed[message.request_id] = message
        if len(self._unconfirmed) > self._settings.max_unconfirmed:
            self._unconfirmed.popitem(last=False)
        return stream

    def open_request(self, updates: engine_pb2.SetUpdates | None = None) -> engine_pb2.SessionRequest:
        """The first command of a stream, which says how often the router wants to hear of the engine."""
        opening = engine_pb2.Open(session_id=self.id, last_sequence=self.sequence, updates=updates)
        return engine_pb2.SessionRequest(open=opening)

    def begin(self, snapshot: engine_pb2.Snapshot) -> None:
        """A stream is open. Decides what has survived: all, when the engine resumed the session where it broke. Raises
        ``SequenceGap`` when it resumed one that was given up.
        """
        same_engine = snapshot.generation == self.engine_generation
        self.commands.reset_for_stream()
        if same_engine and snapshot.resumed and snapshot.sequence <= self.sequence:
            self._resubmit()
        else:
            self._start_over(snapshot)
        if same_engine:
            self._resend_cancels()
        else:
            self._cancelled.clear()
            self._maybe_duplicated.clear()
        self.engine_generation, self.draining = snapshot.generation, snapshot.draining
        self._set_loras(snapshot.loras, same_engine=same_engine)
        self.active_loras = set(snapshot.active_loras)
        if self._on_load is not None:
            self._on_load(snapshot.load)

    def process_batch(self, batch: engine_pb2.StepBatch) -> Iterator[None]:
        """Applies a batch. Each step of the returned iterator passes a few of its outputs to their requests, and it has
        to be exhausted before the next batch. A batch that came before is ignored; raises ``SequenceGap`` if one is
        missing.
        """
        if batch.sequence <= self.sequence:
            return iter(())
        if batch.sequence != self.sequence + 1:
            raise SequenceGap(f"batch {batch.sequence} came after {self.sequence}")
        self.sequence = batch.sequence
        self.draining = self.draining or batch.draining
        if self._on_load is not None and batch.HasField("load"):
            self._on_load(batch.load)
        if batch.HasField("loras"):
            self._set_loras(batch.loras)
        if batch.HasField("active_loras"):
            self.active_loras = set(batch.active_loras.names)
        self._report_kv_events(batch)
        return self._outputs(batch)

    def _outputs(self, batch: engine_pb2.StepBatch) -> Iterator[None]:
        for number, output in enumerate(batch.outputs, 1):
            self._receive(output)
            if number % OUTPUTS_PER_YIELD == 0:
                yield
        if batch.HasField("tokens"):
            yield from self._tokens(batch.tokens)
        if self._maybe_duplicated:
            self._prune_duplicates()

    def _tokens(self, columns: engine_pb2.TokenColumns) -> Iterator[None]:
        choices = self._choices
        # Slices are the quickest copies of repeated fields.
        rows = zip(columns.handles[:], columns.token_ids[:], columns.positions[:], strict=True)
        for number, (handle, token_id, position) in enumerate(rows, 1):
            if (choice := choices.get(handle)) is not None:
                choice[0].push_token(choice[1], token_id, position)
            if number % TOKENS_PER_YIELD == 0:
                yield

    def _set_loras(self, message: engine_pb2.Loras, *, same_engine: bool = True) -> None:
        loras = {each.name: LoRA(each.name, each.digest, each.path) for each in message.loras}
        if loras == self.loras:
            return
        if same_engine:
            self.unloaded_loras |= dict.fromkeys(self.loras.values())
        for lora in loras.values():
            self.unloaded_loras.pop(lora, None)
        for lora in list(self.unloaded_loras)[:-MAX_UNLOADED_LORAS]:
            del self.unloaded_loras[lora]
        self.loras = loras
        self._on_loras()

    def fail_all(self, reason: str) -> None:
        """Ends every request with ``EngineLost``. The next stream opens a new session, and so gets a whole snapshot:
        what was known of the engine's cache is lost too.
        """
        self.sequence = 0
        if count := self.in_flight:
            log.warning("lost engine %s (%s); resubmitting %s", self.address, reason, _requests(count))
        for stream in list(self._streams.values()):
            self._remember_cancel(stream)
            stream.lose(self._loss(reason))
        self._streams.clear()
        self._choices.clear()

    def withdraw_all(self, loss: type[EngineLost], reason: str) -> None:
        """Ends requests with ``loss`` at an engine that may still run them; it gets Cancels. Those that are to stay
        where they are do not end with ``EngineSilent``.
        """
        leaving = [each for each in self._streams.values() if loss is not EngineSilent or not each.stays_when_silent]
        if leaving:
            log.warning("moving %s away from engine %s: %s", _requests(len(leaving)), self.address, reason)
        for stream in leaving:
            stream.withdraw(loss(reason))

    def invalidate(self) -> None:
        """Ends the session, as its state is not known any more."""
        self.fail_all("a batch of the engine was lost")

    def _start_over(self, snapshot: engine_pb2.Snapshot) -> None:
        same_engine = snapshot.generation == self.engine_generation
        self.fail_all("it has forgotten the session" if same_engine else "it restarted")
        if snapshot.resumed:  # it was on its way while the session was given up, and does not have the cache contents
            raise SequenceGap("the engine resumed a session that was given up")
        self.sequence = snapshot.sequence
        if self._on_kv_event is not None:
            self._on_kv_event(snapshot)

    def _resubmit(self) -> None:
        """Sends again, in their order and before what is still to be sent, what may have been lost on its way."""
        sent = [
            each
            for each in self._streams.values()
            if not each.confirmed and not self.commands.has_submit(each.request_id)
        ]
        for stream in reversed(sent):
            message = self._unconfirmed.get(stream.request_id)
            if message is None:
                stream.withdraw(EngineLost("the stream to the engine broke while the request was on its way"))
            else:
                self._resubmitted.add(stream.request_id)
                self.commands.repeat(message)

    def _receive(self, message: engine_pb2.SequenceOutput) -> None:
        ended = message.finish_reason
        reason = finish_from_proto(ended) if ended else None
        stream = self._streams.get(message.request_id)
        if stream is not None:
            if not stream.confirmed:
                self._unconfirmed.pop(message.request_id, None)
            output = _output(message, reason, stream.expected)
            if reason is None:
                stream.push(output)
            else:
                self._on_end(stream, message.index, reason)
                self._deliver(stream, output)
        elif reason is not None:
            self._on_cancelled_end(message.request_id, reason)

    def _on_end(self, stream: OutputStream, index: int, reason: FinishReason) -> None:
        stream.on_engine_end(index, reason)
        if not stream.num_running_choices:
            del self._streams[stream.request_id]
            self._remove_handles(stream)
            self._cancel_duplicate(stream.request_id)

    def _cancel_duplicate(self, request_id: str) -> None:
        """Cancels what a repeated Submit runs if it came after its request had ended: its outputs are dropped."""
        if request_id in self._resubmitted:
            self._resubmitted.discard(request_id)
            if not self.commands.withdraw(request_id):
                self._maybe_duplicated[request_id] = None
                self.commands.cancel(request_id)

    def _prune_duplicates(self) -> None:
        """Forgets duplicates whose Cancel was sent. The engine sends no end for a duplicate that it never ran; a batch
        that arrives once the Cancel is sent shows that the stream held, which is enough.
        """
        self._maybe_duplicated = {each: None for each in self._maybe_duplicated if self.commands.has_cancel(each)}

    def _on_cancelled_end(self, request_id: str, reason: FinishReason) -> None:
        left = self._cancelled.get(request_id, 0) - 1
        if left > 0 and reason is not FinishReason.ERROR:
            self._cancelled[request_id] = left
        else:
            self._cancelled.pop(request_id, None)

    def _deliver(self, stream: OutputStream, output: Output) -> None:
        error, reason = output.error, output.finish_reason
        refused = error is not None and error.code is ErrorCode.UNAVAILABLE
        if error is not None and _is_of_lora(error) and not stream.confirmed and not (refused and self.draining):
            stream.refuse(LoRAMissing(error))
        elif refused and not self.draining and not stream.confirmed:
            stream.refuse(EngineFull("it cannot take it now"))
        elif refused or (reason is FinishReason.ABORT and stream.is_open(output.index)):
            # This router did not cancel it: the engine is shutting down.
            output.finish_reason = output.error = None
            stream.push(output)
            loss = EngineDraining if refused and self.draining else self._loss
            stream.withdraw(loss("the engine gave the request back"))
        elif error is not None and error.code is ErrorCode.OVERLOADED and not stream.confirmed:
            stream.refuse(EngineFull("its queue is full"))
        elif error is not None and error.code is ErrorCode.INVALID and stream.expected.is_resumed:
            # Another engine took the request, so nothing is wrong with what its client sent.
            stream.lose(EngineLost(f"it does not go on with what another engine wrote: {error.message}"))
        else:
            stream.push(output)

    def _report_kv_events(self, batch: engine_pb2.StepBatch) -> None:
        self.kv_events += len(batch.kv_events)
        if self._on_kv_event is not None:
            for event in batch.kv_events:
                self._on_kv_event(event)

    def _cancel(self, request_id: str, index: int | None) -> None:
        if index is not None:
            self.commands.cancel(request_id, index)
            return
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self._remove_handles(stream)
        if self._remember_cancel(stream):
            self.commands.cancel(request_id)

    def _add_handles(self, stream: OutputStream, handle: int) -> None:
        stream.handle = handle
        for index in stream.expected.positions:
            self._choices[handle + index] = stream, index
        self._next_handle = handle + max(stream.expected.positions, default=0) + 1

    def _remove_handles(self, stream: OutputStream) -> None:
        for index in stream.expected.positions:
            self._choices.pop(stream.handle + index, None)

    def _remember_cancel(self, stream: OutputStream) -> bool:
        """Notes that the outputs of a cancelled request are to be dropped. Returns False when its Submit was not sent
        yet, so that the engine needs no Cancel.
        """
        self._unconfirmed.pop(stream.request_id, None)
        repeated = stream.request_id in self._resubmitted
        self._resubmitted.discard(stream.request_id)
        if self.commands.withdraw(stream.request_id) and not repeated:
            return False
        if repeated:
            self._maybe_duplicated[stream.request_id] = None
        self._cancelled[stream.request_id] = stream.num_running_choices
        if len(self._cancelled) > MAX_PENDING_CANCELS:
            self._cancelled.popitem(last=False)
        return True

    def _resend_cancels(self) -> None:
        for request_id in (*self._cancelled, *self._maybe_duplicated):
            self.commands.cancel(request_id)
        for stream in self._streams.values():
            if stream.cancelled:
                self.commands.cancel(stream.request_id, *stream.cancelled)


def _is_of_lora(error: QuireError) -> bool:
    """Whether an engine has the request's adapter no more, or cannot read it."""
    return error.code is ErrorCode.NOT_FOUND or (error.code is ErrorCode.UNAVAILABLE and error.param == "model")


def _output(message: engine_pb2.SequenceOutput, reason: FinishReason | None, asked: ExpectedOutput) -> Output:
    # A slice is the quickest copy of a repeated field.
    output = Output(message.token_ids[:], message.position, reason, None, message.cached_tokens, message.index)
    if asked.logprobs:
        output.logprobs = list(map(logprobs_from_proto, message.logprobs))
    if asked.prompt_logprobs:
        output.prompt_logprobs = list(map(logprobs_from_proto, message.prompt_logprobs))
        output.prompt_position = message.prompt_position
    if reason is not None:
        output.score = message.score if message.HasField("score") else None
        output.pooled = message.pooled
        output.error = error_from_proto(message.error) if reason is FinishReason.ERROR else None
        if reason is FinishReason.STOP and message.HasField("stop_token"):
            stop_token = stop_token_from_proto(message.stop_token)
            output.stop_token = stop_token if asked.logprobs or stop_token.logprobs is None else None
    return output


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
