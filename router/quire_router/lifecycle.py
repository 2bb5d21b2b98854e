"""The story of one request: route, dispatch, stream, recover, finish. Knows every room's door and none's inside."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from quire_proto import telemetry
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.telemetry import PROVIDER_NAME, Attribute
from quire_proto.text.model_text import ModelText
from quire_proto.tracing import traceparent

from quire_router import metrics
from quire_router.fleet.fleet import Fleet
from quire_router.fleet.output import EngineFull, EngineLost
from quire_router.generation import Delta, Generation
from quire_router.journal.base import Journal
from quire_router.placement.choose import choose
from quire_router.placement.view import EngineView
from quire_router.progress import RETRY_AFTER, Progress

log = logging.getLogger(__name__)
tracer = trace.get_tracer("quire.router")

POLICY = "least_in_flight"


class Lifecycle:
    """Runs requests that passed the validator.

    A request that finds no engine ready is held for ``hold_timeout`` seconds. One whose engine is lost is submitted to
    another, ``max_attempts`` times in all, and its client sees a pause; engines that are too full to take it do not
    count, and only when all of them are does it end with OVERLOADED. ``request_timeout`` seconds, where given, end
    a request with DEADLINE.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        texts: Mapping[str, ModelText],
        *,
        hold_timeout: float = 10.0,
        request_timeout: float | None = None,
        max_attempts: int = 3,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._texts = texts
        self._hold_timeout = hold_timeout
        self._request_timeout = request_timeout
        self._max_attempts = max_attempts
        self._running: dict[str, Progress] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._running)

    def run(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last piece of each choice has a finish reason, and the last of all the usage.
        Raises ``QuireError``, also after some pieces. Closing the generator, or cancelling who iterates it, cancels the
        request on its engine.
        """
        return self._tell(generation, context.get_current())

    def cancel(self, request_id: str) -> bool:
        """Ends a running request: what has not ended of it ends with ``FinishReason.ABORT``. False when there is
        none.
        """
        progress = self._running.get(request_id)
        if progress is not None:
            progress.interrupt(None)
        return progress is not None

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Refuses new requests from now on, lets running ones end within ``timeout`` seconds, then ends the rest with
        UNAVAILABLE; their generators raise it when they are next iterated.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for progress in list(self._running.values()):
                progress.interrupt(_shutting_down())

    # The story

    async def _tell(self, generation: Generation, caller: Context) -> AsyncGenerator[Delta]:
        with self._running_as(self._begin(generation, caller)) as progress:
            try:
                async with aclosing(self._answer(progress)) as answer:
                    async for delta in answer:
                        yield delta
            except QuireError as error:
                progress.finish(FinishReason.ERROR, error.message)
                raise
            except Exception:
                log.exception("request %s failed", progress.id)
                progress.finish(FinishReason.ERROR, internal().message)
                raise internal() from None

    async def _answer(self, progress: Progress) -> AsyncGenerator[Delta]:
        losses = 0
        for attempt in count(1):
            engine = await self._route(progress)
            if engine is None:
                for delta in progress.conclude(FinishReason.ABORT):
                    yield delta
                return
            try:
                async with aclosing(self._attempt(progress, engine, attempt)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except EngineFull as refusal:
                log.info("engine %s did not take request %s: %s", engine.engine_id, progress.id, refusal)
                progress.refused_by.add(engine.engine_id)
            except EngineLost as loss:
                log.warning("attempt %d of request %s lost engine %s: %s", attempt, progress.id, engine.engine_id, loss)
                losses += 1
            for delta in progress.recover():
                yield delta
            if progress.ended:
                return
            if losses == self._max_attempts:
                raise _error(ErrorCode.UNAVAILABLE, "The engines that ran this request were lost.")

    async def _attempt(self, progress: Progress, engine: EngineView, attempt: int) -> AsyncGenerator[Delta]:
        with _attempt_span(progress, engine, attempt) as span:
            submission = progress.submission(attempt, traceparent(span))
            with self._fleet.dispatch(engine.engine_id, submission) as outputs:
                progress.follow(outputs)
                async for output in outputs:
                    deltas = progress.take(output)
                    if progress.ended:
                        break
                    for delta in deltas:
                        yield delta
        # By now the engine is free and the record is closed: a client need not come back after its last piece.
        for delta in deltas:
            yield delta

    # Route

    async def _route(self, progress: Progress) -> EngineView | None:
        """The engine to run on; None when the request was cancelled while it was held."""
        engine = self._choose(progress)
        if engine is None and not progress.refused_by and not progress.interrupted.done():
            await self._hold(progress)
            engine = self._choose(progress)
        if progress.interrupted.done():
            progress.raise_interruption()
            return None
        if engine is None:
            error = _nowhere(progress)
            metrics.REJECTIONS.labels(error.code.name.lower()).inc()
            raise error
        return engine

    def _choose(self, progress: Progress) -> EngineView | None:
        ready = self._fleet.candidates(progress.generation.model)
        candidates = [engine for engine in ready if engine.engine_id not in progress.refused_by]
        attributes: dict[str, str | int] = {Attribute.POLICY: POLICY, Attribute.CANDIDATES: len(candidates)}
        span = tracer.start_span(telemetry.Span.ROUTE, progress.caller, attributes=attributes)
        engine = choose(progress.generation, candidates)
        if engine is not None:
            span.set_attribute(Attribute.ENGINE, engine.engine_id)
        span.end()
        metrics.ROUTE_DECISIONS.labels(POLICY, "none_ready" if engine is None else "placed").inc()
        return engine

    async def _hold(self, progress: Progress) -> None:
        """Waits until an engine is ready, the request is interrupted, or it has waited long enough."""
        attributes = {Attribute.QUEUE_REASON: "none_ready"}
        span = tracer.start_span(telemetry.Span.QUEUE, progress.caller, attributes=attributes)
        ready = asyncio.ensure_future(self._fleet.wait_ready(self._hold_timeout, progress.generation.model))
        news: set[asyncio.Future[Any]] = {ready, progress.interrupted}
        try:
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            span.end()

    # Begin and end

    def _begin(self, generation: Generation, caller: Context) -> Progress:
        if self._draining:
            metrics.REJECTIONS.labels("unavailable").inc()
            raise _shutting_down()
        if generation.request_id in self._running:
            log.error("request id %s is in use twice", generation.request_id)
            raise internal()
        return Progress(generation, self._texts[generation.model], self._journal, caller)

    @contextmanager
    def _running_as(self, progress: Progress) -> Iterator[Progress]:
        """A request that runs is known by its id and counted; all of it is undone here, on every way out."""
        model = progress.generation.model
        self._running[progress.id] = progress
        self._idle.clear()
        metrics.IN_FLIGHT.labels(model).inc()
        metrics.PROMPT_TOKENS.labels(model).inc(len(progress.generation.prompt_token_ids))
        deadline = self._start_deadline(progress)
        try:
            yield progress
        finally:
            progress.finish(FinishReason.ABORT)
            if deadline is not None:
                deadline.cancel()
            metrics.IN_FLIGHT.labels(model).dec()
            del self._running[progress.id]
            if not self._running:
                self._idle.set()

    def _start_deadline(self, progress: Progress) -> asyncio.TimerHandle | None:
        if self._request_timeout is None:
            return None
        error = QuireError(ErrorCode.DEADLINE, f"The request took longer than {self._request_timeout:g} seconds.")
        return asyncio.get_running_loop().call_later(self._request_timeout, progress.interrupt, error)


def _error(code: ErrorCode, message: str) -> QuireError:
    return QuireError(code, message, retry_after=RETRY_AFTER[code])


def _nowhere(progress: Progress) -> QuireError:
    if progress.refused_by:
        return _error(ErrorCode.OVERLOADED, "Every engine that is ready has as many requests waiting as it takes.")
    return _error(ErrorCode.UNAVAILABLE, "No engine is ready to run this model.")


def _shutting_down() -> QuireError:
    return _error(ErrorCode.UNAVAILABLE, "This router is shutting down.")


# Spans


@contextmanager
def _attempt_span(progress: Progress, engine: EngineView, attempt: int) -> Iterator[Span]:
    """The span of one attempt, which tells how it ended."""
    generation = progress.generation
    name = f"{generation.operation} {generation.model}"
    attributes = _attempt_attributes(generation, engine, attempt)
    span = tracer.start_span(name, progress.caller, SpanKind.CLIENT, attributes)
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


def _attempt_attributes(generation: Generation, engine: EngineView, attempt: int) -> dict[str, str | int | float]:
    return {
        Attribute.OPERATION: generation.operation,
        Attribute.PROVIDER: PROVIDER_NAME,
        Attribute.REQUEST_MODEL: generation.model,
        Attribute.REQUEST_MAX_TOKENS: generation.params.max_tokens,
        Attribute.REQUEST_TEMPERATURE: generation.params.temperature,
        Attribute.REQUEST_TOP_P: generation.params.top_p,
        Attribute.REQUEST_TOP_K: generation.params.top_k,
        Attribute.REQUEST_STREAM: generation.stream,
        Attribute.SERVER_ADDRESS: engine.engine_id,
        Attribute.ENGINE: engine.engine_id,
        Attribute.REQUEST_ID: generation.request_id,
        Attribute.ATTEMPT: attempt,
    }


def _describe_end(span: Span, progress: Progress) -> None:
    if not span.is_recording():
        return
    usage = progress.usage
    span.set_attribute(Attribute.INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(Attribute.OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(Attribute.CACHED_TOKENS, usage.cached_tokens)
    if progress.finish_reason is not None:
        span.set_attribute(Attribute.FINISH_REASONS, [reason.value for reason in progress.finish_reasons])
