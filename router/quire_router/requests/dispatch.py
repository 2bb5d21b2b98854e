"""``Dispatcher``: finds an engine for a request, which waits in the queue, or for an engine to be ready, and is placed.
And the spans of a request behind the API: where it waited, where it was placed, and each attempt.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time, time_ns
from typing import Any

import numpy as np
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from quire_proto import telemetry
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.telemetry import PROVIDER_NAME, Attribute
from quire_proto.tracing import is_recording

from quire_router.admission.fair_queue import QueuedRequest
from quire_router.admission.queue import AdmissionQueue
from quire_router.core import metrics
from quire_router.core.errors import engines_full, from_engine, no_engine_ready, unknown_model, version_gone
from quire_router.core.fleet_view import FleetLog
from quire_router.core.generation import GenerationRequest
from quire_router.core.model_version import UNKNOWN_VERSION
from quire_router.engines.attempt import AttemptFailed, LoRAMissing, RequestUnsupported
from quire_router.engines.pool import EnginePool
from quire_router.placement.engine_table import Rows
from quire_router.placement.placer import PlacementDecision, Placer, route_attributes
from quire_router.placement.prefix_index import HashesByNamespace
from quire_router.requests.state import RequestState

tracer = trace.get_tracer("quire.router")
_MIN_REPORTED_WAIT_NS = 1_000_000  # nanoseconds of waiting


def record_wait(caller: Context, began: int, reason: str) -> None:
    """Records that the request waited from ``began`` (nanoseconds since 1970) until now, if that was a while."""
    if time_ns() - began <= _MIN_REPORTED_WAIT_NS:
        return
    attributes = {Attribute.QUEUE_REASON: reason}
    tracer.start_span(telemetry.Span.QUEUE, caller, attributes=attributes, start_time=began).end()


def route_span(caller: Context) -> Span:
    """Starts the span of one placement, which the caller ends."""
    return tracer.start_span(telemetry.Span.ROUTE, caller) if is_recording(tracer) else trace.INVALID_SPAN


@contextmanager
def attempt_span(state: RequestState, engine_id: str, zone: str | None = None) -> Iterator[Span]:
    """The span of one attempt, with how it ended, or that of the caller if nothing is recorded here. ``zone`` is the
    engine's, None if unknown.
    """
    if not is_recording(tracer):
        yield trace.get_current_span(state.trace_context)
        return
    request = state.generation
    name = f"{request.operation} {request.model_name}"
    attributes = _attributes(request, engine_id, state.attempt)
    if zone is not None:
        attributes[Attribute.ZONE] = zone
    span = tracer.start_span(name, state.trace_context, SpanKind.CLIENT, attributes)
    try:
        yield span
    except (AttemptFailed, QuireError) as error:
        kind = error.code.name.lower() if isinstance(error, QuireError) else error.kind
        span.set_attribute(Attribute.ERROR_TYPE, kind)
        span.set_status(StatusCode.ERROR, kind)
        raise
    finally:
        _describe_end(span, state)
        span.end()


def _attributes(request: GenerationRequest, engine_id: str, attempt: int) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        Attribute.OPERATION: request.operation,
        Attribute.PROVIDER: PROVIDER_NAME,
        Attribute.REQUEST_MODEL: request.model_name,
        Attribute.SERVER_ADDRESS: engine_id,
        Attribute.ENGINE: engine_id,
        Attribute.REQUEST_ID: request.request_id,
        Attribute.ATTEMPT: attempt,
    }
    if request.pooling is None:
        attributes |= {
            Attribute.REQUEST_MAX_TOKENS: request.params.max_tokens,
            Attribute.REQUEST_TEMPERATURE: request.params.temperature,
            Attribute.REQUEST_TOP_P: request.params.top_p,
            Attribute.REQUEST_TOP_K: request.params.top_k,
            Attribute.REQUEST_STREAM: request.stream,
        }
    return attributes


def _describe_end(span: Span, state: RequestState) -> None:
    if not span.is_recording():
        return
    usage = state.usage
    span.set_attribute(Attribute.INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(Attribute.OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(Attribute.CACHED_TOKENS, usage.cached_tokens)
    if state.finish_reason is not None:
        span.set_attribute(Attribute.FINISH_REASONS, [reason.value for reason in state.finish_reasons])


_TOKEN_BYTES = 12  # of a prompt that is parked: its tokens, its blocks' names, and its text while the API holds it
_RETRY_FULL_SECONDS = 0.2  # seconds


class Dispatcher:
    """Finds an engine for a request. A new one waits for its turn in the queue; one that has output was admitted
    before, and waits only, at most ``hold_timeout`` seconds, until an engine is ready that takes it. While somebody
    looks at the fleet, placements are recorded in ``fleet_log``.
    """

    def __init__(
        self,
        pool: EnginePool,
        placer: Placer,
        queue: AdmissionQueue,
        *,
        policy: str,
        hold_timeout: float,
        explain: bool = False,
        fleet_log: FleetLog | None = None,
    ) -> None:
        self._pool = pool
        self._placer = placer
        self._queue = queue
        self._hold_timeout = hold_timeout
        self._policy = policy
        self._explain = explain
        self._fleet_log = fleet_log or FleetLog()

    async def first(self, state: RequestState) -> PlacementDecision | None:
        """Places a new request, after its turn in the queue. Returns None if it was cancelled meanwhile. Raises
        ``QuireError``.
        """
        if state.has_output:
            return await self.next(state)
        await self._hash_blocks(state)  # before its turn, as nothing may be waited for after it
        await self._wait_turn(state)
        return None if _is_cancelled(state) else self._place(state) or await self.next(state)

    async def next(self, state: RequestState) -> PlacementDecision | None:
        """Places a request that lost its engine or was refused by one. Returns and raises as ``first``."""
        until = monotonic() + self._hold_timeout
        while await self._hash_blocks(state):
            decision = self._place(state)
            if decision is not None:
                return decision
            in_vain = (bool(state.refused_by) and not _all_miss_lora(state)) or self._lora_is_gone(state)
            if monotonic() >= until or (in_vain and not state.has_output) or _unsupported(state) is not None:
                raise self._no_engine_error(state)
            await self._wait_for_engine(state, until - monotonic())
        return None

    async def _hash_blocks(self, state: RequestState) -> bool:
        """Hashes the blocks of a prompt, and lets the event loop run after each part of a long one. Returns False if
        the request was cancelled by then. Raises the error that it was interrupted with.
        """
        for _ in self._placer.compute_hashes(state.generation, self._rows(state), state.block_hashes):
            await asyncio.sleep(0)
            if state.interrupted.done():
                break
        return not _is_cancelled(state)

    async def _wait_turn(self, state: RequestState) -> None:
        """Waits for the request's turn, in the task that is going to dispatch it, or until it is interrupted."""
        began, request_id = time_ns(), state.id

        def abandon(_: object) -> None:
            self._queue.abandon(request_id)

        state.interrupted.add_done_callback(abandon)
        try:
            await self._queue.acquire(queued_request(state.generation))
        finally:
            state.interrupted.remove_done_callback(abandon)
            record_wait(state.trace_context, began, "turn")

    async def _wait_for_engine(self, state: RequestState, seconds: float) -> None:
        """Waits for an engine to be ready, or a moment for the ones that are full."""
        request = state.generation
        if state.refused_by:
            await self._wait(state, asyncio.sleep(_RETRY_FULL_SECONDS), "full")
        else:
            ready = self._pool.wait_ready(seconds, request.model, request.lora, state.version)
            await self._wait(state, ready, "none_ready")
        state.refused_by.clear()

    async def _wait(self, state: RequestState, what: Coroutine[Any, Any, object], reason: str) -> None:
        """Waits for ``what`` unless the request is interrupted first. Raises what it raises."""
        began = time_ns()
        task = asyncio.ensure_future(what)
        futures: set[asyncio.Future[Any]] = {task, state.interrupted}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            record_wait(state.trace_context, began, reason)

    def _place(self, state: RequestState) -> PlacementDecision | None:
        rows, attempt = self._rows(state), state.attempt + 1
        return self.place(state.generation, rows, state.block_hashes, state.trace_context, attempt=attempt)

    def place(
        self,
        generation: GenerationRequest,
        rows: Rows,
        hashes: HashesByNamespace,
        caller: Context,
        *,
        attempt: int = 1,
        explained: bool = False,
    ) -> PlacementDecision | None:
        """Places a request on one of the rows, with a span and in metrics; see ``Placer.place``."""
        span, began = route_span(caller), thread_time()
        watched = self._fleet_log.watched
        explained = explained or self._explain or span.is_recording() or self._fleet_log.explain > 0
        decision = self._placer.place(generation, rows, hashes, explained=explained)
        span.set_attribute(Attribute.POLICY, self._policy)
        _describe(span, decision, len(rows))
        span.end()
        metrics.ROUTE_SECONDS.observe(thread_time() - began)
        result = "none_ready" if decision is None else "placed"
        metrics.ROUTE_DECISIONS.labels(self._policy, result).inc()
        if decision is not None and (watched or attempt > 1):
            record_placement(self._fleet_log, generation, decision, attempt)
        return decision

    def _rows(self, state: RequestState) -> Rows:
        rows, ids = self._pool.rows(state.generation.model, state.generation.lora), self._pool.table.ids
        if (version := state.version) != UNKNOWN_VERSION:
            rows = self._pool.rows_of_version(rows, version)
        if state.generation.best_effort:
            rows = self._pool.with_best_effort_capacity(rows)
        if not (state.refused_by or state.lost_by):
            return rows
        willing = [row for row in rows.tolist() if ids[row] not in state.refused_by]
        # One that lost the request may do so again, at once, and would look idle each time.
        others = [row for row in willing if ids[row] not in state.lost_by]
        alive = [row for row in others if self._pool.is_alive(ids[row])] if state.has_moved else others
        return np.array(alive or others or willing, np.intp)

    def _lora_is_gone(self, state: RequestState) -> bool:
        """Whether the request's adapter was unloaded. Where engines merely lack it, as those do that begin again, they
        may get it: the request waits.
        """
        request = state.generation
        return request.lora is not None and not self._pool.has_lora(request.model, request.lora)

    def _no_engine_error(self, state: RequestState) -> QuireError:
        refusals = [*state.refused_by.values()]
        missing = [each.error for each in refusals if isinstance(each, LoRAMissing)]
        unreadable = [error for error in missing if error.code is not ErrorCode.NOT_FOUND]
        unsupported = _unsupported(state)
        if unsupported is not None:
            error = unsupported
        elif self._lora_is_gone(state):
            error = unknown_model(state.generation.model_name)
        elif unreadable and len(missing) == len(refusals):
            error = from_engine(unreadable[-1])
        elif len(missing) < len(refusals):
            error = engines_full()
        else:
            others = state.version != UNKNOWN_VERSION and self._pool.ready(state.generation.model)
            error = version_gone() if others else no_engine_ready()
        metrics.REJECTIONS.labels(error.code.name.lower()).inc()
        return error


def _unsupported(state: RequestState) -> QuireError | None:
    """Why none of the engines can run the request, if that is so of each of them."""
    errors = [each.error for each in state.refused_by.values() if isinstance(each, RequestUnsupported)]
    return errors[-1] if len(errors) == len(state.refused_by) > 0 else None


def _all_miss_lora(state: RequestState) -> bool:
    """Whether each engine that refused the request lacks its adapter, and may get it."""
    refusals = state.refused_by.values()
    return all(isinstance(each, LoRAMissing) and each.error.code is ErrorCode.NOT_FOUND for each in refusals)


def record_placement(log: FleetLog, request: GenerationRequest, decision: PlacementDecision, attempt: int) -> None:
    """Records for those who look at the fleet where a request goes, and why."""
    log.explain = max(0, log.explain - 1)
    log.add(
        "placed",
        decision.engine_id,
        request.request_id,
        model=request.model_name,
        attempt=attempt,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=decision.cached_tokens,
        policy=decision.policy,
        scores=decision.scores,
    )


def queued_request(request: GenerationRequest) -> QueuedRequest:
    """Returns the request as the queue needs it."""
    return QueuedRequest(
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        tokens=request.max_cost,
        bytes=len(request.prompt_token_ids) * _TOKEN_BYTES + len(request.response_options),
        priority=request.priority,
        deadline=request.ends_by,
        served_name=request.served_name,
    )


def _is_cancelled(state: RequestState) -> bool:
    """Whether the request was cancelled. Raises the error that it was interrupted with."""
    if state.interrupted.done():
        state.raise_interruption()
    return state.interrupted.done()


def _describe(span: Span, decision: PlacementDecision | None, candidates: int) -> None:
    if not span.is_recording():
        return
    span.set_attribute(Attribute.CANDIDATES, candidates)
    if decision is not None:
        span.set_attribute(Attribute.ENGINE, decision.engine_id)
        span.set_attributes(route_attributes(decision))
