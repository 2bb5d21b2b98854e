"""``RequestState``: one request between placement and its client. Turns each ``Output`` of an engine into deltas, with
the text of its choices, journals them, counts their tokens, and ends the request once. A token passes it without a task
switch, from ``try_direct_write`` on. Does no I/O.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING
from uuid import uuid4

from quire.v1 import engine_pb2
from quire_proto.convert import pooling_to_proto, sampling_to_proto
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, TokenLogprobs
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.admission.limits import Reservation
from quire_router.core import metrics
from quire_router.core.errors import consumer_deadline_exceeded, from_engine
from quire_router.core.generation import NO_USAGE, Delta, GenerationRequest, Move, ResponseConsumer, Usage
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.usage import difference
from quire_router.engines.attempt import EngineFull, Output
from quire_router.engines.output_stream import OutputStream
from quire_router.journal.base import Journal, Lease, RecordedDelta, RequestRecord
from quire_router.placement.prefix_index import HashesByNamespace
from quire_router.requests.choice import Choice, create_choices
from quire_router.requests.deltas import (
    BestOfSelection,
    chunked,
    mark_replayed,
    split_at_cursor,
    with_usage,
    yielding_to_loop,
)

if TYPE_CHECKING:
    from quire_router.requests.shadow import Shadow

_BY_SEVERITY = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)

MAX_MOVES = 2
MOVE_MEMORY = 60.0
"""A request leaves so many silent engines within so many seconds; it waits longer for the next one."""


class RequestState:
    """A request between its first and its last delta.

    ``lease`` is on its journal record, and ``reservation`` what it was charged; ``trace_context`` is the caller's, and
    ``tenant_label`` returns a tenant's name in metrics.
    ``interrupted`` is done once something other than the engine ends the request: with an error, or with None
    when it was cancelled; ``consumer_expired`` is set when that was because the ``consumer``'s deadline passed.
    ``refused_by`` are the engines that did not take it, with the reason, ``attempt`` counts those that it was sent to,
    of which ``engine_id`` is the last, and ``losses`` those that were lost since the last token; ``lost_by`` are all
    that lost it, which come last from then on. ``block_hashes`` are those of its prompt that were needed so far.
    ``finish_reason`` is None until the record is closed; of several choices the most severe reason counts.

    A request that continues from its ``record`` begins with what that holds, after ``replay_record``; nothing of that
    is emitted again. Its client may have received more than was written down: what is before its consumer's cursor is
    emitted as replayed. It is ``restored``: it was admitted before.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: ModelTokenizer,
        journal: Journal,
        lease: Lease,
        consumer: ResponseConsumer,
        *,
        record: RequestRecord | None = None,
        reservation: Reservation | None = None,
        tenant_label: Callable[[str], str] = str,
    ) -> None:
        self.generation = request
        self.trace_context = consumer.trace_context
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.refused_by: dict[str, EngineFull] = {}
        self.block_hashes: HashesByNamespace = {}
        self.attempt = 0
        self.engine_id = ""
        self.interrupted: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        self._tokenizer = tokenizer
        self._journal = journal
        self._lease = lease
        self.consumer = consumer
        self.consumer_expired = False
        self._cursor = consumer.cursor
        self._reservation = reservation
        self._direct_path = consumer.direct_path
        self.restored = record is not None
        self._outputs: OutputStream | None = None
        self._recorded = [0] * request.params.n
        self._finish_reasons: list[FinishReason | None] = [None] * request.params.n
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._start_choices()
        self._began = monotonic()
        self._first_token_seen = False
        self.losses = 0
        self.lost_by: set[str] = set()
        self._left: tuple[str, str, float] | None = None  # the engine, why, and when the last token came
        self._tokens_at_loss = 0
        self._moves = 0
        self._moved_at = 0.0
        self._refusals = 0
        self._unreplayed: list[RecordedDelta] = [] if record is None or self._selection is not None else record.deltas
        self._token_metrics = metrics.token_metrics(request.model)
        self._tenant_label = tenant_label
        self._used_before = self.usage if self._unreplayed else NO_USAGE
        self._version = UNKNOWN_VERSION if record is None else record.version
        self.shadow: Shadow | None = None

    @property
    def choices(self) -> Sequence[Choice]:
        """Its choices as they are; not to be changed."""
        return self._choices

    @property
    def id(self) -> str:
        """The request's id."""
        return self.generation.request_id

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return self._unfinished == 0

    @property
    def usage(self) -> Usage:
        """Tokens so far: the prompt once, and the outputs of all choices, also of those that are not delivered."""
        made = sum(len(each.token_ids) for each in self._unreplayed or self._choices)
        return Usage(len(self.generation.prompt_token_ids), made, self.cached_tokens or 0)

    @property
    def has_output(self) -> bool:
        """Whether anything of the answer was delivered."""
        return (
            bool(self._unreplayed) or any(self._recorded) or any(reason is not None for reason in self._finish_reasons)
        )

    @property
    def version(self) -> ModelVersion:
        """The version of the model that has to continue the answer; unknown while nothing of it was made."""
        begun = bool(self._unreplayed) or any(choice.has_output for choice in self._choices)
        return self._version if begun else UNKNOWN_VERSION

    def begin_on(self, version: ModelVersion) -> None:
        """The next attempt is made by this version of the model, which an answer that begins with it keeps."""
        if not self._unreplayed and not any(choice.has_output for choice in self._choices):
            self._version = version
            self._journal.set_version(self._lease, version)

    @property
    def resumable(self) -> bool:
        """Whether a client may return for the rest: one that can name the request, or has received a part of a stream,
        if only that of another of its prompts. None does if another prompt's error has ended the answer.
        """
        request, prompt_group = self.generation, self.consumer.prompt_group
        if prompt_group.failed:
            return False
        if request.background or request.digest:
            return True
        return request.stream and (self.has_output or self.restored or prompt_group.started)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why each choice has ended; none before the request has."""
        end = self.finish_reason
        return [] if end is None else [reason or end for reason in self._finish_reasons]

    async def replay_record(self) -> None:
        """Brings every choice to where the record ends; lets the event loop run in between. To be called before any
        other method.
        """
        if not self._unreplayed:
            return
        async for delta in yielding_to_loop(chunked(self._unreplayed)):
            choice = self._choices[delta.index]
            choice.process(Output(delta.token_ids, len(choice.token_ids), delta.finish_reason))
            if delta.prompt_logprobs:
                self._prompt_logprobs = []
        self._unreplayed = []
        self._recorded = [len(choice.token_ids) for choice in self._choices]
        self._finish_reasons = [choice.finish_reason for choice in self._choices]
        self._unfinished = self._finish_reasons.count(None)
        self._first_token_seen = self.has_output

    def leave(self, engine_id: str, reason: str) -> None:
        """The request leaves an engine. The first output of the next one takes the way that can tell the client so."""
        last = max(choice.last_token or self._began for choice in self._choices)
        self._left = engine_id, reason, last
        self._direct_path.sink = None

    def take_move(self, engine_id: str) -> Move | None:
        """Returns how the request came to its engine from one that it left, once; None if it left none."""
        if self._left is None:
            return None
        (lost, reason, last), self._left = self._left, None
        return Move(lost, reason, engine_id, monotonic() - last)

    def count_loss(self, engine_id: str) -> None:
        """An engine was lost, or has lost the request."""
        self.lost_by.add(engine_id)
        made = self.usage.completion_tokens
        self.losses = 1 if made > self._tokens_at_loss else self.losses + 1
        self._tokens_at_loss = made

    def count_move(self, engine_id: str) -> None:
        """An engine was left because it was silent, or its streams stood still."""
        self.lost_by.add(engine_id)
        now = monotonic()
        self._moves = self._moves + 1 if now - self._moved_at < MOVE_MEMORY else 1
        self._moved_at = now

    @property
    def has_moved(self) -> bool:
        """Whether it has left a silent engine: others may be silent for the same reason."""
        return self._moves > 0

    @property
    def stays_when_silent(self) -> bool:
        """Whether it has left enough silent engines lately: where all are starved, leaving them makes it worse."""
        return self._moves >= MAX_MOVES and monotonic() - self._moved_at < MOVE_MEMORY

    def count_refusal(self, engine_id: str, refusal: EngineFull) -> None:
        """An engine was too full to take the request, or does not have its adapter."""
        self._refusals += 1
        self.refused_by[engine_id] = refusal

    def build_submit(self, trace_headers: Mapping[str, str]) -> engine_pb2.Submit:
        """Returns the request as an engine gets it: its prompt, and the tokens that each choice has so far; and the
        trace context of the attempt.
        """
        request, params = self.generation, self.generation.params
        if self._prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they have come
        alone = len(self._choices) == 1
        return engine_pb2.Submit(
            request_id=self.id if self.attempt == 1 and not self.restored else _attempt_id(self.id),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self._choices[0].token_ids if alone else (),
            sampling=sampling_to_proto(params),
            cache_salt=request.cache_salt,
            traceparent=trace_headers.get("traceparent", ""),
            tracestate=trace_headers.get("tracestate", ""),
            delivered=() if alone else [_delivered(choice) for choice in self._choices if choice.has_output],
            priority=request.priority,
            lora_name="" if request.lora is None else request.lora.name,
            lora_digest=b"" if request.lora is None else request.lora.digest,
            pooling=None if request.pooling is None else pooling_to_proto(request.pooling),
        )

    def attach_stream(self, outputs: OutputStream) -> None:
        """Makes an interruption end ``outputs``, and has them take the direct path where they can."""
        self._outputs = outputs
        outputs.stays_when_silent = self.stays_when_silent
        outputs.stays_until = self._moved_at + MOVE_MEMORY if self._moves else 0.0
        if self.generation.params.prompt_logprobs is None:  # they come in parts, which ``outputs`` gathers
            outputs.sink = self.try_direct_write
            if self._passes_tokens:
                outputs.token_sink = self.try_direct_token

    def interrupt(self, error: QuireError | None) -> None:
        """Ends the request from outside: with ``error``, or as cancelled. The first interruption counts."""
        if self.interrupted.done():
            return
        self.interrupted.set_result(error)
        if self._outputs is not None and error is None:
            self._outputs.abort()
        elif self._outputs is not None and error is not None:
            self._outputs.fail(error)

    def end_for_consumer(self) -> None:
        """Ends the answer because its consumer's deadline has passed; the request is released for others."""
        self.consumer_expired = not self.interrupted.done()
        self.interrupt(consumer_deadline_exceeded())

    @property
    def cancelled(self) -> bool:
        """Whether the request was cancelled, rather than ended with an error."""
        return self.interrupted.done() and self.interrupted.result() is None

    def raise_interruption(self) -> None:
        """Raises the error that the request was interrupted with, unless it was simply cancelled."""
        error = self.interrupted.result()
        if error is not None:
            raise error

    def process_output(self, output: Output) -> list[Delta]:
        """Returns the deltas of an engine's output, and journals them; the end of the last choice finishes the request.
        Raises the error that the output ends with.
        """
        if output.error is not None:
            raise from_engine(output.error)
        if output.deltas is not None:
            return output.deltas
        if self.cached_tokens is None:
            self.cached_tokens = min(output.cached_tokens, len(self.generation.prompt_token_ids))
        if output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        choice, reason = self._choices[output.index], output.finish_reason
        deltas = self._to_deltas(choice, output)
        if deltas[-1].finish_reason is not reason and self._outputs is not None:
            self._outputs.cancel(choice.index)  # at a stop string, which the engine does not see
        return self._emit(deltas)

    def try_direct_write(self, output: Output) -> bool:
        """Processes an output and writes its deltas to the sink at once. Returns False if the task that reads the
        stream has to deliver it, through ``process_output``: there is no open sink, or a choice ends. If a stop string
        in the text ended it, the output carries its deltas already.
        """
        writer = self._direct_path.sink
        if writer is None or not writer.is_open or output.finish_reason is not None:
            return False
        deltas = self.process_output(output)
        if self._choices[output.index].finish_reason is not None:
            output.deltas = deltas  # a stop string
            return False
        for delta in deltas:
            writer.write(delta)
        return True

    @property
    def _passes_tokens(self) -> bool:
        """Whether a token is nothing but its text: no log-probabilities, stop strings or candidates, and no consumer
        that has a part of the answer already.
        """
        request = self.generation
        is_plain = not request.stop and request.params.logprobs is None
        return is_plain and self._selection is None and self._cursor is None

    def try_direct_token(self, index: int, token_id: int) -> bool:
        """As ``try_direct_write``, for an output that is one token and nothing else, where ``_passes_tokens``. Does for
        nearly every token what ``process_output`` and ``DeltaSink.write`` do, without an output or a delta. False for
        a choice's first token.
        """
        writer, choice = self._direct_path.sink, self._choices[index]
        last = choice.last_token
        if writer is None or last is None or choice.finish_reason is not None or not writer.is_open:
            return False
        choice.token_ids.append(token_id)
        text = choice.text.push_token(token_id)
        now = choice.last_token = monotonic()
        self._token_metrics.gaps.append(now - last)
        position = self._recorded[index]
        self._journal.append_token(self._lease, index, position, token_id)
        self._recorded[index] = position + 1
        writer.write_token(index, token_id, text)
        return True

    def finish_open_choices(self, reason: FinishReason) -> list[Delta]:
        """Ends every open choice with ``reason`` where no output of an engine will end it; returns the last deltas."""
        return self._emit([choice.finish(reason) for choice in self._choices if choice.finish_reason is None])

    def finish_complete_choices(self) -> list[Delta]:
        """Finishes choices that have all their tokens and lack only their end; returns their last deltas. The others
        continue where they are, but a beam search starts over: another engine's beams need not be the same.
        """
        params = self.generation.params
        if params.beam_width:
            self._start_choices()
            return []
        complete = [choice for choice in self._choices if choice.is_complete(params.max_tokens)]
        return self._emit([choice.finish(FinishReason.LENGTH) for choice in complete])

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """Closes the record and counts the request; only the first call does. One that was cancelled here ends as
        ABORT: its last output may have been on its way.
        """
        if self.finish_reason is None:
            if self.cancelled:
                reason, error = FinishReason.ABORT, ""
            self._journal.finish(self._lease, reason, error, self._used)
            self._close(reason)

    async def flush_end(self) -> bool:
        """Waits until the end of an answer that is stored is in the journal, for a moment at most; returns whether it
        is.
        """
        return not self.generation.is_stored or await self._journal.flush_end(self._lease)

    def release(self) -> None:
        """Ends the request here and releases its record for others to claim; only the first call does."""
        if self.finish_reason is None:
            self._journal.release(self._lease, self._used)
            if self._reservation is not None:
                self._reservation.commit_all()
            self._close(FinishReason.ABORT)

    @property
    def _used(self) -> Usage:
        """What its tenant pays for: nothing if no engine ever had it, as far as is known here."""
        usage = self.usage
        return NO_USAGE if self.attempt == self._refusals and not usage.completion_tokens else usage

    def _close(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._reservation is not None:
            self._settle(self._reservation)
        if self.shadow is not None:
            self.shadow.on_answer_end(reason)
        request = self.generation
        self._token_metrics.flush()
        metrics.REQUESTS.labels(request.model, request.operation, reason.value).inc()
        metrics.DURATION.labels(request.model).observe(monotonic() - self._began)
        metrics.count_tenant(
            self._tenant_label(request.tenant), request.model, difference(self._used, self._used_before)
        )

    def _settle(self, reservation: Reservation) -> None:
        if self.attempt == self._refusals and not self.restored:
            reservation.cancel()  # no engine ever had it
        else:
            reservation.used = self.generation.cost(self.usage.prompt_tokens, self.usage.completion_tokens)
            reservation.settle()

    def _start_choices(self) -> None:
        """Makes all choices, empty."""
        request, params = self.generation, self.generation.params
        self._choices = create_choices(request, self._tokenizer, params.num_returned)
        self._unfinished = len(self._choices)
        self._selection = BestOfSelection(params) if request.selects_choices else None

    def _emit(self, deltas: list[Delta]) -> list[Delta]:
        """Returns what the client gets for ``deltas``, and journals it."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._unfinished -= 1
        if self._selection is not None:
            deltas = self._select_best(self._selection, deltas)
        if self._prompt_logprobs and deltas:
            deltas[0] = replace(deltas[0], prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = []
        deltas = [self._record(delta) for delta in deltas]
        if self.ended and self.finish_reason is None:
            self.finish(max((reason for reason in self._finish_reasons if reason is not None), key=_BY_SEVERITY.index))
            return with_usage(deltas, self.usage, self._cursor)
        return deltas

    def _to_deltas(self, choice: Choice, output: Output) -> list[Delta]:
        """Returns the delta of an output, or two if the consumer's cursor is within it."""
        cursor = self._cursor if self._selection is None else None
        deltas: list[Delta] = []
        for part in [output] if cursor is None else split_at_cursor(output, cursor):
            if choice.finish_reason is None:
                deltas.append(choice.process(part))
                self._count_tokens(choice, deltas[-1].token_ids)
        return deltas

    def _select_best(self, selection: BestOfSelection, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            selection.add(delta)
        return selection.best() if self.ended else []

    def _record(self, delta: Delta) -> Delta:
        """Journals the delta; returns it, marked as replayed if its consumer has it."""
        index, reason = delta.index, delta.finish_reason
        if delta.token_ids or reason is not None:
            self._journal.append(self._lease, self._recorded[index], delta)
        self._recorded[index] += len(delta.token_ids)
        self._finish_reasons[index] = reason
        return delta if self._cursor is None else mark_replayed(delta, self._recorded[index], self._cursor)

    def _count_tokens(self, choice: Choice, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        now, last = monotonic(), choice.last_token
        self._token_metrics.add(len(token_ids), None if last is None else now - last)
        if not self._first_token_seen:
            metrics.TTFT.labels(self.generation.model).observe(now - self._began)
            self._first_token_seen = True
        choice.last_token = now


def _delivered(choice: Choice) -> engine_pb2.Delivered:
    ended = choice.finish_reason is not None
    return engine_pb2.Delivered(index=choice.index, token_ids=choice.token_ids, finished=ended)


def _attempt_id(request_id: str) -> str:
    """Returns an id for a later attempt, at most 64 characters: the engine may still run an earlier one."""
    return f"{request_id[:31]}-{uuid4().hex}"
