"""What one request has come to: its choices, its record and how it ends. Does no I/O and chooses no engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from uuid import uuid4

from opentelemetry.context import Context
from quire.v1 import engine_pb2
from quire_proto.convert import sampling_to_proto
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason
from quire_proto.text.model_text import ModelText

from quire_router import metrics
from quire_router.choice import Choice
from quire_router.fleet.output import Output
from quire_router.fleet.stream import OutputStream
from quire_router.generation import Delta, Generation, Usage
from quire_router.journal.base import Journal
from quire_router.selection import Selection

RETRY_AFTER = {ErrorCode.OVERLOADED: 1.0, ErrorCode.UNAVAILABLE: 5.0}
"""Seconds that a client should wait before it tries again."""

_GRAVITY = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class Progress:
    """A request between its first and its last piece.

    ``caller`` is the trace context it came with. ``interrupted`` is done once somebody else than the engine ends the
    request: with an error, or with None when it was cancelled. ``refused_by`` are the engines that were too full.
    ``finish_reason`` is None until the record is closed; of several choices the gravest reason counts.
    """

    def __init__(self, generation: Generation, text: ModelText, journal: Journal, caller: Context) -> None:
        self.generation = generation
        self.caller = caller
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.refused_by: set[str] = set()
        self.interrupted: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        self._text = text
        self._journal = journal
        self._lease = journal.open(generation)
        self._outputs: OutputStream | None = None
        self._told = [0] * generation.params.n
        self._reasons: list[FinishReason | None] = [None] * generation.params.n
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._start_choices()
        self._began = monotonic()
        self._heard = False
        # Observed for every token, so looked up once.
        self._inter_token_latency = metrics.ITL.labels(generation.model)
        self._generation_tokens = metrics.GENERATION_TOKENS.labels(generation.model)

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
        """Tokens so far: the prompt once, and the outputs of all choices, also of those that are not told."""
        made = sum(len(choice.token_ids) for choice in self._choices)
        return Usage(len(self.generation.prompt_token_ids), made, self.cached_tokens or 0)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why each choice has ended; none before the request has."""
        end = self.finish_reason
        return [] if end is None else [reason or end for reason in self._reasons]

    def submission(self, attempt: int, traceparent: str) -> engine_pb2.Submit:
        """The request from where it stands: its prompt, and what came of each choice."""
        generation, params = self.generation, self.generation.params
        if self._prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they have come
        alone = len(self._choices) == 1
        return engine_pb2.Submit(
            request_id=self.id if attempt == 1 else _attempt_id(self.id),
            prompt_token_ids=generation.prompt_token_ids,
            output_token_ids=self._choices[0].token_ids if alone else (),
            sampling=sampling_to_proto(params),
            cache_salt=generation.cache_salt,
            traceparent=traceparent,
            delivered=() if alone else map(_delivered, filter(_has_begun, self._choices)),
            priority=generation.priority,
        )

    def follow(self, outputs: OutputStream) -> None:
        """From now on an interruption ends ``outputs``."""
        self._outputs = outputs

    def interrupt(self, error: QuireError | None) -> None:
        """Ends the request from outside: with ``error``, or as cancelled. The first interruption counts."""
        if self.interrupted.done():
            return
        self.interrupted.set_result(error)
        if self._outputs is not None and error is None:
            self._outputs.abort()
        elif self._outputs is not None and error is not None:
            self._outputs.fail(error)

    def raise_interruption(self) -> None:
        """Raises the error that the request was interrupted with, unless it was simply cancelled."""
        error = self.interrupted.result()
        if error is not None:
            raise error

    def take(self, output: Output) -> list[Delta]:
        """The pieces that an engine's output makes, journalled; the end of the last choice finishes the request. Raises
        the error that the output ends with.
        """
        if output.error is not None:
            raise _as_told(output.error)
        if self.cached_tokens is None:
            self.cached_tokens = min(output.cached_tokens, len(self.generation.prompt_token_ids))
        if output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        choice = self._choices[output.index]
        delta = choice.take(output)
        if delta.token_ids:
            self._count(choice, delta.token_ids)
        if delta.finish_reason is not output.finish_reason and self._outputs is not None:
            self._outputs.cancel(choice.index)  # a stop string, of which the engine knows nothing
        return self._tell([delta])

    def conclude(self, reason: FinishReason) -> list[Delta]:
        """The last pieces of a request whose choices end without an engine's word, finished."""
        return self._tell([choice.conclude(reason) for choice in self._choices if choice.finish_reason is None])

    def recover(self) -> list[Delta]:
        """What remains to be told when an engine was lost: the ends of choices that lack nothing but its word. The
        others go on from where they are, but a beam search begins anew: another engine's beams need not be the same.
        """
        params = self.generation.params
        if params.beam_width:
            self._start_choices()
            return []
        complete = [choice for choice in self._choices if _is_complete(choice, params.max_tokens)]
        return self._tell([choice.conclude(FinishReason.LENGTH) for choice in complete])

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """Closes the record and counts the request; the first end counts."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self._journal.finish(self._lease, reason, error)
        generation = self.generation
        metrics.REQUESTS.labels(generation.model, generation.operation, reason.value).inc()
        metrics.DURATION.labels(generation.model).observe(monotonic() - self._began)

    def _start_choices(self) -> None:
        """Makes all choices, with nothing in them yet."""
        generation, params = self.generation, self.generation.params
        self._choices = [
            Choice(
                index,
                self._text.open_output(
                    generation.prompt_token_ids,
                    generation.stop,
                    include_stop=generation.include_stop,
                    skip_special_tokens=generation.skip_special_tokens,
                ),
            )
            for index in range(params.num_told)
        ]
        self._unfinished = len(self._choices)
        self._selection = Selection(params) if Selection.needed(params) else None

    def _tell(self, pieces: list[Delta]) -> list[Delta]:
        """What the client gets when ``pieces`` have come, written down."""
        for piece in pieces:
            if piece.finish_reason is not None:
                self._unfinished -= 1
        if self._selection is not None:
            pieces = self._select(self._selection, pieces)
        if self._prompt_logprobs and pieces:
            pieces[0] = replace(pieces[0], prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = []
        for piece in pieces:
            self._deliver(piece)
        if pieces and self.ended:
            self.finish(max((reason for reason in self._reasons if reason is not None), key=_GRAVITY.index))
            pieces[-1] = replace(pieces[-1], usage=self.usage)
        return pieces

    def _select(self, selection: Selection, pieces: list[Delta]) -> list[Delta]:
        for piece in pieces:
            selection.add(piece)
        return selection.best() if self.ended else []

    def _deliver(self, piece: Delta) -> None:
        index, reason = piece.index, piece.finish_reason
        if piece.token_ids or reason is not None:
            self._journal.append(self._lease, self._told[index], piece.token_ids, index, reason)
        self._told[index] += len(piece.token_ids)
        self._reasons[index] = reason

    def _count(self, choice: Choice, token_ids: Sequence[int]) -> None:
        now = monotonic()
        if choice.last_token is not None:
            self._inter_token_latency.observe((now - choice.last_token) / len(token_ids))
        elif not self._heard:
            metrics.TTFT.labels(self.generation.model).observe(now - self._began)
        self._generation_tokens.inc(len(token_ids))
        choice.last_token, self._heard = now, True


def _is_complete(choice: Choice, max_tokens: int) -> bool:
    """Whether every token that was asked for is there, so that no engine is needed to say so."""
    return choice.finish_reason is None and len(choice.token_ids) >= max_tokens


def _has_begun(choice: Choice) -> bool:
    return bool(choice.token_ids) or choice.finish_reason is not None


def _delivered(choice: Choice) -> engine_pb2.Delivered:
    ended = choice.finish_reason is not None
    return engine_pb2.Delivered(index=choice.index, token_ids=choice.token_ids, finished=ended)


def _attempt_id(request_id: str) -> str:
    """A name for a later attempt, at most 64 characters: the engine may still be busy with an earlier one."""
    return f"{request_id[:31]}-{uuid4().hex}"


def _as_told(error: QuireError) -> QuireError:
    """The engine's error as the client sees it: that an id is in use there is no client's fault, and an error that will
    pass says when.
    """
    if error.code is ErrorCode.CONFLICT:
        return internal()
    return QuireError(error.code, error.message, param=error.param, retry_after=RETRY_AFTER.get(error.code))
