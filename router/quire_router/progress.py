"""What one request has come to: its tokens, its text, its record and how it ends. Does no I/O and chooses no engine."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from uuid import uuid4

from opentelemetry.context import Context
from quire.v1 import engine_pb2
from quire_proto.convert import sampling_to_proto
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.model_text import ModelText

from quire_router import metrics
from quire_router.fleet.output import Output, OutputStream
from quire_router.generation import Delta, Generation, Usage
from quire_router.journal.base import Journal

RETRY_AFTER = {ErrorCode.OVERLOADED: 1.0, ErrorCode.UNAVAILABLE: 5.0}
"""Seconds that a client should wait before it tries again."""


class Progress:
    """A request between its first and its last piece.

    ``caller`` is the trace context it came with. ``interrupted`` is done once somebody else than the engine ends the
    request: with an error, or with None when it was cancelled. ``refused_by`` are the engines that were too full.
    """

    def __init__(self, generation: Generation, text: ModelText, journal: Journal, caller: Context) -> None:
        self.generation = generation
        self.caller = caller
        self.token_ids: list[int] = []
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.refused_by: set[str] = set()
        self.interrupted: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        self._text = text.open_output(generation.prompt_token_ids, generation.stop)
        self._journal = journal
        self._lease = journal.open(generation)
        self._outputs: OutputStream | None = None
        self._began = self._last_token = monotonic()
        # Observed for every token, so looked up once.
        self._inter_token_latency = metrics.ITL.labels(generation.model)
        self._generation_tokens = metrics.GENERATION_TOKENS.labels(generation.model)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.generation.request_id

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(len(self.generation.prompt_token_ids), len(self.token_ids), self.cached_tokens or 0)

    def submission(self, attempt: int, traceparent: str) -> engine_pb2.Submit:
        """The request from where it stands: its prompt, and as output what was delivered already."""
        generation = self.generation
        return engine_pb2.Submit(
            request_id=self.id if attempt == 1 else _attempt_id(self.id),
            prompt_token_ids=generation.prompt_token_ids,
            output_token_ids=self.token_ids,
            sampling=sampling_to_proto(generation.params),
            cache_salt=generation.cache_salt,
            traceparent=traceparent,
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

    def take(self, output: Output) -> Delta:
        """The piece that an engine's output makes, journalled; the last one finishes the request. Raises the error that
        the output ends with.
        """
        if output.error is not None:
            raise _as_told(output.error)
        if self.cached_tokens is None:
            self.cached_tokens = min(output.cached_tokens, len(self.generation.prompt_token_ids))
        text, reason = self._read(output)
        if self._text.stopped:
            reason = FinishReason.STOP
        kept = output.token_ids[: self._text.stop_token_count - len(self.token_ids)]
        self._deliver(kept)
        return self._delta(text, kept, reason)

    def conclude(self, reason: FinishReason) -> Delta:
        """The last piece of a request that ends without an engine's word, finished."""
        return self._delta("" if self._text.stopped else self._text.finish(), [], reason)

    def complete(self) -> bool:
        """Whether every token that was asked for is there, so that no engine is needed to say so."""
        return len(self.token_ids) >= self.generation.params.max_tokens

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """Closes the record and counts the request; the first end counts."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self._journal.finish(self._lease, reason, error)
        generation = self.generation
        metrics.REQUESTS.labels(generation.model, generation.operation, reason.value).inc()
        metrics.DURATION.labels(generation.model).observe(monotonic() - self._began)

    def _read(self, output: Output) -> tuple[str, FinishReason | None]:
        text = self._text.push(output.token_ids)
        if output.finish_reason is not None and not self._text.stopped:
            text += self._text.finish()
        return text, output.finish_reason

    def _delta(self, text: str, token_ids: list[int], reason: FinishReason | None) -> Delta:
        if reason is None:
            return Delta(text, token_ids)
        self.finish(reason)
        return Delta(text, token_ids, reason, self.usage)

    def _deliver(self, token_ids: list[int]) -> None:
        if not token_ids:
            return
        self._journal.append(self._lease, len(self.token_ids), token_ids)
        self._count(token_ids)
        self.token_ids.extend(token_ids)

    def _count(self, token_ids: Sequence[int]) -> None:
        now = monotonic()
        if self.token_ids:
            self._inter_token_latency.observe((now - self._last_token) / len(token_ids))
        else:
            metrics.TTFT.labels(self.generation.model).observe(now - self._began)
        self._generation_tokens.inc(len(token_ids))
        self._last_token = now


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
