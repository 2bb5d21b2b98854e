"""Runs a request from admission to its end: place, dispatch, stream, recover, finish."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import replace

from opentelemetry import context
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tracing import traceparent

from quire_router.admission.limits import RateLimiter, Reservation
from quire_router.admission.tenants import Tenants
from quire_router.core import metrics
from quire_router.core.generation import (
    Delta,
    DeltaStream,
    GenerationRequest,
    OwnedDeltaStream,
    PromptGroup,
    ResponseConsumer,
    StreamCursor,
)
from quire_router.engines.output_stream import EngineFull, EngineLost
from quire_router.engines.pool import EnginePool
from quire_router.journal.base import Journal, Lease, RequestRecord, encode_error
from quire_router.placement.placer import Placer, route_header
from quire_router.placement.query import PlacementDecision
from quire_router.requests.dispatch import Dispatcher, attempt_span
from quire_router.requests.registry import BackgroundRequests, RequestRegistry, unavailable
from quire_router.requests.resume import RequestResumer
from quire_router.requests.state import RequestState

log = logging.getLogger(__name__)

_TEMPORARY = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)


class RequestRunner:
    """Runs requests that passed the validator.

    The dispatcher finds an engine, and ``limits`` hold what a tenant may use. A request whose engine is lost is
    submitted to another, ``max_attempts`` times in all without a token between them, and its client sees a pause;
    engines that are too full to accept it do not count. ``request_timeout`` seconds, where given, end a request with
    DEADLINE, as its own deadline does. At most ``max_background`` requests run without a client. With
    ``expose_route`` the first delta of an attempt says where it runs.

    Requests outlive this router: a request that ends here without its engine or its client having ended it leaves a
    record that another router, or this one, can continue (``resume``).
    """

    def __init__(
        self,
        fleet: EnginePool,
        placer: Placer,
        routing: Dispatcher,
        journal: Journal,
        texts: Mapping[str, ModelTokenizer],
        *,
        limits: RateLimiter | None = None,
        request_timeout: float | None = None,
        max_attempts: int = 3,
        max_background: int = 4096,
        expose_route: bool = False,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._dispatcher = routing
        self._journal = journal
        self._texts = texts
        self._limits = limits or RateLimiter(Tenants())
        self._max_attempts = max_attempts
        self._expose_route = expose_route
        self._registry = RequestRegistry(request_timeout)
        self._background = BackgroundRequests(max_background)
        self._resumer = RequestResumer(journal, texts, self._registry, self._background, self._resume_claimed)
        journal.set_listener(self._registry)

    @property
    def in_flight(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._registry)

    def load(self, model: str) -> int:
        """Requests of the model that have begun and not ended."""
        return self._registry.of_model(model)

    def on_load_changed(self, changed: Callable[[], None]) -> None:
        """``changed`` is called from now on when some model's ``load`` is another one."""
        self._registry.on_change = changed

    # What the API asks (see ``api.backend.Runner``)

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last piece of each choice has a finish reason, and the last of all the usage.
        Raises ``QuireError``, also after some pieces. Closing the generator, or cancelling who iterates it, cancels the
        request on its engine.
        """
        reader = ResponseConsumer(context.get_current())
        return DeltaStream(self._run(generation, reader), reader.direct_path)

    async def run_once(
        self, generation: GenerationRequest, siblings: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``, but None when there is a record of this id already."""
        self._registry.check_accepting()
        if generation.request_id in self._registry:
            return None  # also where the journal had no room for it
        with ExitStack() as undo:
            bill = undo.enter_context(await self._reserve(generation))
            lease = await self._journal.open_if_absent(generation)
            if lease is None:
                return None
            undo.pop_all()
        reader = ResponseConsumer(context.get_current(), prompt_group=siblings or PromptGroup())
        return self._begin(generation, lease, bill, reader)

    async def start(self, generation: GenerationRequest) -> bool:
        """Runs a request without a listener; False when there is a record of this id already, which is taken up where
        nobody else is at it.
        """
        self._background.check_capacity()
        answer = await self.run_once(generation)
        if answer is None:
            await self._resumer.claim_orphan(generation.request_id)
            return False
        self._background.run(answer)
        return True

    async def record(self, request_id: str) -> RequestRecord | None:
        """What is remembered of a request."""
        return await self._journal.read(request_id, tokens_only=True)

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[RequestRecord | None]:
        """How it is with each; see ``Runner.statuses``."""
        records = await self._journal.statuses(request_ids, confirm_missing=surely)
        for record in records:
            if record is not None and record.generation.background:
                await self._resumer.claim_if_orphaned(record)
        return records

    def resume(self, record: RequestRecord, mark: StreamCursor, deadline: float | None = None) -> AsyncGenerator[Delta]:
        """The answer to an earlier request, with what is before ``mark`` as told; see ``Runner.resume``."""
        reader = ResponseConsumer(context.get_current(), cursor=mark, deadline=deadline)
        return DeltaStream(self._resumer.resume(record.generation, reader, mark), reader.direct_path)

    async def cancel(self, request_id: str) -> bool:
        """Ends what has not ended of a request with ``FinishReason.ABORT``, wherever it runs; False when there is none
        that has not ended.
        """
        if request_id not in self._registry:
            return await self._journal.cancel(request_id)
        self._registry.on_cancelled(request_id)
        return True

    async def delete(self, request_id: str) -> bool:
        """Forgets what has ended, and ends what has not for that; False when nothing is remembered of it."""
        here = request_id in self._registry
        self._registry.on_cancelled(request_id)
        return await self._journal.delete(request_id) or here

    # The router's life

    async def claim_orphans(self) -> int:
        """See ``RequestResumer.claim_orphans``."""
        return await self._resumer.claim_orphans()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Refuses new requests from now on, lets running ones end within ``timeout`` seconds, then ends the rest with
        UNAVAILABLE, for others to go on with; their generators raise it when they are next iterated.
        """
        await self._registry.drain(timeout)
        await self._background.wait()

    # The story

    async def _run(self, generation: GenerationRequest, reader: ResponseConsumer) -> AsyncGenerator[Delta]:
        self._registry.check_accepting()
        self._registry.check_unused(generation.request_id)
        with ExitStack() as undo:
            bill = undo.enter_context(await self._reserve(generation))
            lease = self._journal.open(generation)
            undo.pop_all()
        async with aclosing(self._begin(generation, lease, bill, reader)) as answer:
            async for delta in answer:
                yield delta

    def _resume_claimed(self, record: RequestRecord, lease: Lease, reader: ResponseConsumer) -> OwnedDeltaStream:
        """The rest of a request that was claimed. It was charged where it began. Its deadline was that of another
        reader, unless it runs for none.
        """
        generation = record.generation
        if not generation.background:
            generation = replace(generation, deadline=None)
        bill = self._limits.adopt(generation.tenant, generation.request_id)
        return self._begin(generation, lease, bill, reader, record)

    def _begin(
        self,
        generation: GenerationRequest,
        lease: Lease,
        bill: Reservation,
        reader: ResponseConsumer,
        record: RequestRecord | None = None,
    ) -> OwnedDeltaStream:
        """The answer to a request whose record is held here from now on, and is ended or let go of whatever becomes of
        the answer; so is what it was charged.
        """
        ending = AsyncExitStack()
        try:
            text = self._texts[generation.model]
            progress = RequestState(generation, text, self._journal, lease, reader, record=record, bill=bill)
            ending.enter_context(self._registry.track(progress))
        except Exception:
            log.exception("request %s cannot begin", lease.request_id)
            self._journal.finish(lease, FinishReason.ERROR, encode_error(internal()))
            bill.settle()
            raise internal() from None
        return OwnedDeltaStream(self._answer(progress, ending), ending.aclose, reader.direct_path)

    async def _answer(self, progress: RequestState, ending: AsyncExitStack) -> AsyncGenerator[Delta]:
        """Places the request and streams its deltas, again for each engine that is lost; closes ``ending``."""
        async with ending:
            with self._ending_on_error(progress):
                await progress.replay_record()
                for delta in progress.finish_complete_choices():
                    yield delta
                if progress.finish_reason is not None:
                    return
                decision = await self._dispatcher.first(progress)
                while decision is not None:
                    try:
                        async with aclosing(self._attempt(progress, decision)) as deltas:
                            async for delta in deltas:
                                yield delta
                        return
                    except (EngineFull, EngineLost) as problem:
                        self._record_failure(progress, decision.engine_id, problem)
                    for delta in progress.finish_complete_choices():
                        yield delta
                    if progress.ended:
                        return
                    decision = await self._dispatcher.next(progress)
                for delta in progress.finish_open_choices(FinishReason.ABORT):
                    yield delta

    async def _attempt(self, progress: RequestState, decision: PlacementDecision) -> AsyncGenerator[Delta]:
        """Streams what one engine makes of the request. Raises ``EngineFull`` and ``EngineLost``."""
        route = route_header(decision) if self._expose_route else ""
        progress.attempt += 1
        with attempt_span(progress, decision.engine_id, self._fleet.zone(decision.engine_id)) as span:
            submission = progress.build_submit(traceparent(span) if span.is_recording() else "")
            pending = max(1, len(progress.generation.prompt_token_ids) - decision.cached_tokens)
            with self._fleet.dispatch(decision.engine_id, submission, pending_tokens=pending) as outputs:
                self._placer.record_dispatch(decision, progress.generation)
                progress.attach_stream(outputs)
                async for output in outputs:
                    deltas = progress.process_output(output)
                    if route and deltas:
                        deltas[0], route = replace(deltas[0], route=route), ""
                    if progress.ended:
                        break
                    for delta in deltas:
                        yield delta
        # By now the engine is free and the record is closed: a client need not come back after its last delta.
        for delta in deltas:
            yield delta

    @contextmanager
    def _ending_on_error(self, progress: RequestState) -> Iterator[None]:
        """Ends the request with the error that the block raises; one that is no ``QuireError`` becomes INTERNAL."""
        try:
            yield
        except QuireError as error:
            self._fail(progress, error)
            raise
        except Exception:
            log.exception("request %s failed", progress.id)
            self._fail(progress, internal())
            raise internal() from None

    def _record_failure(self, progress: RequestState, engine_id: str, problem: EngineFull | EngineLost) -> None:
        """What became of an attempt. Raises ``QuireError`` after too many that came to nothing."""
        metrics.ATTEMPTS_LOST.labels(problem.kind).inc()
        if isinstance(problem, EngineFull):
            log.info("engine %s did not take request %s: %s", engine_id, progress.id, problem)
            progress.count_refusal(engine_id)
            return
        log.warning("attempt %d of request %s lost engine %s: %s", progress.attempt, progress.id, engine_id, problem)
        progress.count_loss()
        if progress.losses >= self._max_attempts:
            raise unavailable("The engines that ran this request were lost.")

    # Begin and end

    async def _reserve(self, generation: GenerationRequest) -> Reservation:
        """What the request may use, charged before there is a record of it: who is refused may ask again."""
        return await self._limits.reserve(generation.tenant, generation.request_id, generation.max_cost)

    def _fail(self, progress: RequestState, error: QuireError) -> None:
        """The request ends with an error. One that will pass is not its last word where somebody may come back, and
        that its reader did not wait is not either. Nobody comes back for a request that runs for nobody: it is taken up
        again, but not after it lost too many engines, because it may be what they die of.
        """
        lost = progress.generation.background and progress.losses >= self._max_attempts
        if progress.consumer_expired or (error.code in _TEMPORARY and progress.resumable and not lost):
            progress.release()
        else:
            progress.consumer.prompt_group.failed = True
            progress.finish(FinishReason.ERROR, encode_error(error))
