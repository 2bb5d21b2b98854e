"""Finds an engine for a request: it waits in the queue, or for an engine to be ready, and is placed."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic, time, time_ns
from typing import Any

import numpy as np
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from quire_proto import telemetry
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.telemetry import PROVIDER_NAME, Attribute

from quire_router.admission.fair_queue import QueuedRequest
from quire_router.admission.queue import AdmissionQueue
from quire_router.core import metrics
from quire_router.core.errors import RefusalReason
from quire_router.core.generation import GenerationRequest
from quire_router.engines.output_stream import EngineFull, EngineLost
from quire_router.engines.pool import EnginePool
from quire_router.placement.engine_table import Rows
from quire_router.placement.placer import Placer, route_attributes
from quire_router.placement.query import PlacementDecision
from quire_router.requests.state import RETRY_AFTER, RequestState

# The spans of one request behind the API: where it waited, where it was sent, and each attempt.


tracer = trace.get_tracer("quire.router")


def record_wait_span(caller: Context, began: int, reason: str) -> None:
    """The request was held from ``began`` (nanoseconds since 1970) until now."""
    attributes = {Attribute.QUEUE_REASON: reason}
    tracer.start_span(telemetry.Span.QUEUE, caller, attributes=attributes, start_time=began).end()


def route_span(progress: RequestState) -> Span:
    """The span of one choice of an engine, to be ended."""
    return tracer.start_span(telemetry.Span.ROUTE, progress.trace_context)


@contextmanager
def attempt_span(progress: RequestState, engine_id: str, zone: str | None = None) -> Iterator[Span]:
    """The span of one attempt, which tells how it ended. ``zone`` is the engine's, where it is known."""
    generation = progress.generation
    name = f"{generation.operation} {generation.model}"
    attributes = _attributes(generation, engine_id, progress.attempt)
    if zone is not None:
        attributes[Attribute.ZONE] = zone
    span = tracer.start_span(name, progress.trace_context, SpanKind.CLIENT, attributes)
    try:
        yield span
    except (EngineFull, EngineLost, QuireError) as error:
        kind = error.code.name.lower() if isinstance(error, QuireError) else error.kind
        span.set_attribute(Attribute.ERROR_TYPE, kind)
        span.set_status(StatusCode.ERROR, kind)
        raise
    finally:
        _describe_end(span, progress)
        span.end()


def _attributes(generation: GenerationRequest, engine_id: str, attempt: int) -> dict[str, str | int | float]:
    return {
        Attribute.OPERATION: generation.operation,
        Attribute.PROVIDER: PROVIDER_NAME,
        Attribute.REQUEST_MODEL: generation.model,
        Attribute.REQUEST_MAX_TOKENS: generation.params.max_tokens,
        Attribute.REQUEST_TEMPERATURE: generation.params.temperature,
        Attribute.REQUEST_TOP_P: generation.params.top_p,
        Attribute.REQUEST_TOP_K: generation.params.top_k,
        Attribute.REQUEST_STREAM: generation.stream,
        Attribute.SERVER_ADDRESS: engine_id,
        Attribute.ENGINE: engine_id,
        Attribute.REQUEST_ID: generation.request_id,
        Attribute.ATTEMPT: attempt,
    }


def _describe_end(span: Span, progress: RequestState) -> None:
    if not span.is_recording():
        return
    usage = progress.usage
    span.set_attribute(Attribute.INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(Attribute.OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(Attribute.CACHED_TOKENS, usage.cached_tokens)
    if progress.finish_reason is not None:
        span.set_attribute(Attribute.FINISH_REASONS, [reason.value for reason in progress.finish_reasons])


_TOKEN_BYTES = 12  # of a prompt that is parked: its tokens, its blocks' names, and its text while the API holds it
_MIN_REPORTED_WAIT_NS = 1_000_000  # nanoseconds of waiting
_RETRY_FULL_SECONDS = 0.2  # seconds


class Dispatcher:
    """Finds an engine for a request. A new one waits for its turn among all that want to run; one that has begun was
    admitted, and only waits, at most ``hold_timeout`` seconds, until some engine is there that takes it.
    """

    def __init__(
        self,
        fleet: EnginePool,
        placer: Placer,
        turns: AdmissionQueue,
        *,
        policy: str,
        hold_timeout: float,
        explain: bool = False,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._turns = turns
        self._hold_timeout = hold_timeout
        self._policy = policy
        self._explain = explain

    async def first(self, progress: RequestState) -> PlacementDecision | None:
        """Where a request begins; None when it was cancelled meanwhile. Raises ``QuireError``."""
        if progress.has_output:
            return await self.next(progress)
        await self._hash_blocks(progress)  # before its turn, as nothing may be waited for after it
        await self._wait_turn(progress)
        return None if _is_cancelled(progress) else self._place(progress) or await self.next(progress)

    async def next(self, progress: RequestState) -> PlacementDecision | None:
        """Where a request goes on that lost its engine, or was refused by one; as ``begin``."""
        until = monotonic() + self._hold_timeout
        while await self._hash_blocks(progress):
            decision = self._place(progress)
            if decision is not None:
                return decision
            if monotonic() >= until or (progress.refused_by and not progress.has_output):
                raise self._no_engine_error(progress)
            await self._wait_for_engine(progress, until - monotonic())
        return None

    async def _hash_blocks(self, progress: RequestState) -> bool:
        """Names the blocks of a long prompt, and lets others run after each piece; False when the request was cancelled
        by then. Raises the error that it was interrupted with.
        """
        for _ in self._placer.compute_hashes(progress.generation, self._rows(progress), progress.names):
            await asyncio.sleep(0)
            if progress.interrupted.done():
                break
        return not _is_cancelled(progress)

    async def _wait_turn(self, progress: RequestState) -> None:
        """Waits for the request's turn, in the task that is going to dispatch it, or until it is interrupted."""
        began, request_id = time_ns(), progress.id

        def leave(_: object) -> None:
            self._turns.abandon(request_id)

        progress.interrupted.add_done_callback(leave)
        try:
            await self._turns.acquire(queued_request(progress.generation))
        finally:
            progress.interrupted.remove_done_callback(leave)
            _record_wait(progress, began, "turn")

    async def _wait_for_engine(self, progress: RequestState, seconds: float) -> None:
        """Waits for an engine to be ready, or a moment for the ones that are full."""
        full, model = bool(progress.refused_by), progress.generation.model
        pause = asyncio.sleep(_RETRY_FULL_SECONDS) if full else self._fleet.wait_ready(seconds, model)
        await self._wait(progress, pause, "full" if full else "none_ready")
        progress.refused_by.clear()

    async def _wait(self, progress: RequestState, what: Coroutine[Any, Any, object], reason: str) -> None:
        """Waits for it unless the request is interrupted first. Raises what it raises."""
        began = time_ns()
        task = asyncio.ensure_future(what)
        news: set[asyncio.Future[Any]] = {task, progress.interrupted}
        try:
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            _record_wait(progress, began, reason)

    def _place(self, progress: RequestState) -> PlacementDecision | None:
        span = route_span(progress)
        rows = self._rows(progress)
        explained = self._explain or span.is_recording()
        decision = self._placer.place(progress.generation, rows, progress.names, explained=explained)
        span.set_attribute(Attribute.POLICY, self._policy)
        _describe(span, decision, len(rows))
        span.end()
        result = "none_ready" if decision is None else "placed"
        metrics.ROUTE_DECISIONS.labels(self._policy, result).inc()
        return decision

    def _rows(self, progress: RequestState) -> Rows:
        rows, ids = self._fleet.rows(progress.generation.model), self._fleet.table.ids
        if not progress.refused_by:
            return rows
        return np.array([row for row in rows.tolist() if ids[row] not in progress.refused_by], np.intp)

    def _no_engine_error(self, progress: RequestState) -> QuireError:
        code, reason = ErrorCode.UNAVAILABLE, str(RefusalReason.NONE_READY)
        message = "No engine is ready to run this model."
        if progress.refused_by:
            code, reason = ErrorCode.OVERLOADED, "engines_full"
            message = "Every engine that is ready has as many requests waiting as it takes."
        metrics.REJECTIONS.labels(code.name.lower()).inc()
        return QuireError(code, message, retry_after=RETRY_AFTER[code], reason=reason)


def queued_request(generation: GenerationRequest) -> QueuedRequest:
    """The request as the queue sees it."""
    deadline = None if generation.deadline is None else monotonic() + generation.deadline - time()
    return QueuedRequest(
        request_id=generation.request_id,
        model=generation.model,
        tenant=generation.tenant,
        tokens=generation.max_cost,
        bytes=len(generation.prompt_token_ids) * _TOKEN_BYTES + len(generation.shape),
        priority=generation.priority,
        deadline=deadline,
    )


def _record_wait(progress: RequestState, began: int, reason: str) -> None:
    if time_ns() - began > _MIN_REPORTED_WAIT_NS:
        record_wait_span(progress.trace_context, began, reason)


def _is_cancelled(progress: RequestState) -> bool:
    """Whether the request was cancelled. Raises the error that it was interrupted with."""
    if progress.interrupted.done():
        progress.raise_interruption()
    return progress.interrupted.done()


def _describe(span: Span, decision: PlacementDecision | None, candidates: int) -> None:
    if not span.is_recording():
        return
    span.set_attribute(Attribute.CANDIDATES, candidates)
    if decision is not None:
        span.set_attribute(Attribute.ENGINE, decision.engine_id)
        span.set_attributes(route_attributes(decision))
