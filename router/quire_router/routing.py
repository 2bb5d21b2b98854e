"""Finds an engine for a request: it waits in the queue, or for an engine to be ready, and is placed."""

import asyncio
from collections.abc import Coroutine
from time import monotonic, time, time_ns
from typing import Any

import numpy as np
from opentelemetry.trace import Span
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.telemetry import Attribute

from quire_router import metrics
from quire_router.admission.queue import AdmissionQueue
from quire_router.admission.reason import RefusalReason
from quire_router.admission.turn import QueuedRequest
from quire_router.fleet.fleet import EnginePool
from quire_router.generation import GenerationRequest
from quire_router.placement.explanation import route_attributes
from quire_router.placement.placer import Placer
from quire_router.placement.query import PlacementDecision
from quire_router.placement.table import Rows
from quire_router.progress import RETRY_AFTER, RequestState
from quire_router.spans import record_wait_span, route_span

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
        for _ in self._placer.name(progress.generation, self._rows(progress), progress.names):
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
