"""Runs a request from admission to its end: place, dispatch, stream, recover, finish (``RequestRunner``); and the
requests that this router runs now, by their ids: counted, timed and drained (``RequestRegistry``).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

from opentelemetry import context
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tracing import w3c_headers

from quire_router.admission.limits import RateLimiter, Reservation
from quire_router.admission.tenants import Tenants
from quire_router.core import metrics
from quire_router.core.errors import engines_lost, lease_lost, request_timed_out, shutting_down
from quire_router.core.fleet_view import FleetLog
from quire_router.core.generation import (
    Delta,
    DeltaStream,
    GenerationRequest,
    OwnedDeltaStream,
    PromptGroup,
    ResponseConsumer,
    StreamCursor,
)
from quire_router.engines.attempt import AttemptFailed, EngineFull, EngineSilent
from quire_router.engines.pool import EnginePool
from quire_router.journal.base import Journal, Lease, RequestRecord, encode_error
from quire_router.placement.placer import PlacementDecision, Placer, route_header
from quire_router.requests.dispatch import Dispatcher, attempt_span
from quire_router.requests.resume import BackgroundRequests, RequestResumer
from quire_router.requests.shadow import ShadowRunner
from quire_router.requests.state import RequestState

log = logging.getLogger(__name__)

_TEMPORARY = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)


class RequestRunner:
    """Runs requests that passed the validator.

    The dispatcher finds an engine, and ``limits`` hold what a tenant may use. A request whose engine is lost is
    submitted to another, ``max_attempts`` times in all without a token between them, and its client sees a pause;
    engines that are too full to accept it do not count. ``request_timeout`` seconds, where given, end a request with
    DEADLINE, as its own deadline does. At most ``max_background`` requests run without a client. With
    ``expose_route`` the first delta of an attempt says where it runs. Lost attempts are recorded in ``fleet_log``. Some
    requests have ``shadows``, once they were dispatched.

    Requests outlive this router: a request that ends here without its engine or its client having ended it leaves a
    record that another router, or this one, can continue (``resume``). A prompt that is pooled leaves none: its answer
    is one piece, and the same whenever it is made.
    """

    def __init__(
        self,
        pool: EnginePool,
        placer: Placer,
        dispatcher: Dispatcher,
        journal: Journal,
        tokenizers: Mapping[str, ModelTokenizer],
        *,
        limits: RateLimiter | None = None,
        request_timeout: float | None = None,
        max_attempts: int = 3,
        max_background: int = 4096,
        expose_route: bool = False,
        fleet_log: FleetLog | None = None,
        shadows: ShadowRunner | None = None,
    ) -> None:
        self._pool = pool
        self._placer = placer
        self._dispatcher = dispatcher
        self._journal = journal
        self._tokenizers = tokenizers
        self._limits = limits or RateLimiter(Tenants())
        self._max_attempts = max_attempts
        self._expose_route = expose_route
        self._fleet_log = fleet_log or FleetLog()
        self._shadows = shadows
        self._registry = RequestRegistry(request_timeout)
        self._background = BackgroundRequests(max_background)
        self._resumer = RequestResumer(journal, tokenizers, self._registry, self._background, self._resume_claimed)
        journal.set_listener(self._registry)

    @property
    def in_flight(self) -> int:
        """Requests that have started and not ended."""
        return len(self._registry)

    def load(self, model: str) -> int:
        """Requests of the model that have started and not ended."""
        return self._registry.of_model(model)

    def in_progress(self) -> list[RequestState]:
        """Returns the requests that have started and not ended, in the order in which they came."""
        return self._registry.states()

    def on_load_changed(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called whenever the ``load`` of a model has changed."""
        self._registry.on_change = changed

    # What the API calls (``api.prepared_request.Runner``)

    def run(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yields the answer, delta by delta; the last of each choice has a finish reason, the last of all the usage.
        Raises ``QuireError``, also after some deltas. Closing the generator, or cancelling the task that iterates it,
        cancels the request on its engine.
        """
        consumer = ResponseConsumer(context.get_current())
        return DeltaStream(self._run(request, consumer), consumer.direct_path)

    async def run_once(
        self, request: GenerationRequest, prompt_group: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``. Returns None if there is a record of this id already."""
        self._registry.check_accepting()
        if request.request_id in self._registry:
            return None  # also where the journal had no room for it
        with ExitStack() as undo:
            reservation = undo.enter_context(await self._reserve(request))
            if request.pooling is None:
                lease = await self._journal.open_if_absent(request)
            else:
                lease = self._journal.open_unrecorded(request)
            if lease is None:
                return None
            undo.pop_all()
        consumer = ResponseConsumer(context.get_current(), prompt_group=prompt_group or PromptGroup())
        return self._begin(request, lease, reservation, consumer)

    async def start(self, request: GenerationRequest) -> bool:
        """Runs a request in the background. Returns False if there is a record of this id already, which is claimed if
        it is an orphan.
        """
        self._background.check_capacity()
        answer = await self.run_once(request)
        if answer is None:
            await self._resumer.claim_orphan(request.request_id)
            return False
        self._background.run(answer)
        return True

    async def record(self, request_id: str) -> RequestRecord | None:
        """Returns the record of a request; None if there is none."""
        return await self._journal.read(request_id, tokens_only=True)

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """Returns the records without prompts and deltas; see ``Runner.statuses``."""
        records = await self._journal.statuses(request_ids, confirm_missing=confirm_missing)
        for record in records:
            if record is not None and record.generation.background:
                await self._resumer.claim_if_orphaned(record)
        return records

    def resume(
        self, record: RequestRecord, cursor: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        """Yields the answer to an earlier request, replayed up to ``cursor``; see ``Runner.resume``."""
        consumer = ResponseConsumer(context.get_current(), cursor=cursor, deadline=deadline)
        return DeltaStream(self._resumer.resume(record.generation, consumer, cursor), consumer.direct_path)

    async def cancel(self, request_id: str) -> bool:
        """Ends a request with ``FinishReason.ABORT``, wherever it runs. Returns False if none runs."""
        if request_id not in self._registry:
            return await self._journal.cancel(request_id)
        self._registry.on_cancelled(request_id)
        return True

    async def delete(self, request_id: str) -> bool:
        """Removes the record of a request, and ends it first. Returns False if there is none."""
        here = request_id in self._registry
        self._registry.on_cancelled(request_id)
        return await self._journal.delete(request_id) or here

    # What the router's process calls

    async def claim_orphans(self) -> int:
        """See ``RequestResumer.claim_orphans``."""
        return await self._resumer.claim_orphans()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Refuses new requests from now on, lets running ones end within ``timeout`` seconds, then ends the rest with
        UNAVAILABLE, for other routers to continue; their generators raise it when they are next iterated.
        """
        if self._shadows is not None:
            await self._shadows.close()
        await self._registry.drain(timeout)
        await self._background.wait()

    # A request from its admission on

    async def _run(self, request: GenerationRequest, consumer: ResponseConsumer) -> AsyncGenerator[Delta]:
        self._registry.check_accepting()
        self._registry.check_unused(request.request_id)
        with ExitStack() as undo:
            reservation = undo.enter_context(await self._reserve(request))
            journal = self._journal
            lease = journal.open(request) if request.pooling is None else journal.open_unrecorded(request)
            undo.pop_all()
        async with aclosing(self._begin(request, lease, reservation, consumer)) as answer:
            async for delta in answer:
                yield delta

    def _resume_claimed(self, record: RequestRecord, lease: Lease, consumer: ResponseConsumer) -> OwnedDeltaStream:
        """Returns the rest of a request that was claimed. It was charged where it began. Its deadline was that of
        another consumer, unless it is a background request.
        """
        request = record.generation
        if not request.background:
            request = replace(request, deadline=None)
        reservation = self._limits.adopt(request.tenant, request.request_id)
        return self._begin(request, lease, reservation, consumer, record)

    def _begin(
        self,
        request: GenerationRequest,
        lease: Lease,
        reservation: Reservation,
        consumer: ResponseConsumer,
        record: RequestRecord | None = None,
    ) -> OwnedDeltaStream:
        """Returns the answer to a request whose lease is held here from now on. Lease and reservation are ended or
        released on every way out, also if the answer is closed before it is read.
        """
        resources = AsyncExitStack()
        try:
            tokenizer = self._tokenizers[request.model]
            state = RequestState(
                request,
                tokenizer,
                self._journal,
                lease,
                consumer,
                record=record,
                reservation=reservation,
                tenant_label=self._limits.label,
            )
            resources.enter_context(self._registry.track(state))
        except Exception:
            log.exception("cannot start request %s", lease.request_id)
            self._journal.finish(lease, FinishReason.ERROR, encode_error(internal()))
            reservation.settle()
            raise internal() from None
        return OwnedDeltaStream(self._answer(state, resources), resources.aclose, consumer.direct_path)

    async def _answer(self, state: RequestState, resources: AsyncExitStack) -> AsyncGenerator[Delta]:
        """Places the request and streams its deltas, again for each engine that is lost; closes ``resources``."""
        async with resources, self._ending_on_error(state):
            await state.replay_record()
            async for delta in _end_last(state, state.finish_complete_choices()):
                yield delta
            if state.finish_reason is not None:
                return
            decision = await self._dispatcher.first(state)
            while decision is not None:
                try:
                    async with aclosing(self._attempt(state, decision)) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except AttemptFailed as problem:
                    self._record_failure(state, decision.engine_id, problem)
                async for delta in _end_last(state, state.finish_complete_choices()):
                    yield delta
                if state.ended:
                    return
                decision = await self._dispatcher.next(state)
            async for delta in _end_last(state, state.finish_open_choices(FinishReason.ABORT)):
                yield delta

    async def _attempt(self, state: RequestState, decision: PlacementDecision) -> AsyncGenerator[Delta]:
        """Streams what one engine makes of the request. Raises ``AttemptFailed``."""
        route = route_header(decision) if self._expose_route else ""
        state.attempt += 1
        state.engine_id = decision.engine_id
        state.begin_on(self._pool.version(decision.engine_id))
        with attempt_span(state, decision.engine_id, self._pool.zone(decision.engine_id)) as span:
            submission = state.build_submit(w3c_headers(span))
            pending = max(1, len(state.generation.prompt_token_ids) - decision.cached_tokens)
            tenant = state.generation.tenant
            with self._pool.dispatch(decision.engine_id, submission, pending_tokens=pending, tenant=tenant) as outputs:
                self._placer.record_dispatch(decision, state.generation)
                state.attach_stream(outputs)
                if self._shadows is not None and state.attempt == 1 and not state.restored:
                    self._shadows.begin(state)
                async for output in outputs:
                    deltas = state.process_output(output)
                    if deltas and (move := state.take_move(decision.engine_id)) is not None:
                        deltas[0] = replace(deltas[0], move=move)
                    if route and deltas:
                        deltas[0], route = replace(deltas[0], route=route), ""
                    if state.ended:
                        break
                    for delta in deltas:
                        yield delta
        # By now the engine is free and the record is closed: a client need not come back after its last delta.
        async for delta in _end_last(state, deltas):
            yield delta

    @asynccontextmanager
    async def _ending_on_error(self, state: RequestState) -> AsyncGenerator[None]:
        """Ends the request with the error that the block raises; one that is no ``QuireError`` becomes INTERNAL."""
        try:
            yield
        except QuireError as error:
            await self._fail(state, error)
            raise
        except Exception:
            log.exception("request %s failed", state.id)
            await self._fail(state, internal())
            raise internal() from None

    def _record_failure(self, state: RequestState, engine_id: str, problem: AttemptFailed) -> None:
        """Logs and counts a failed attempt. Raises ``QuireError`` after too many engines were lost."""
        metrics.ATTEMPTS_LOST.labels(problem.kind).inc()
        if isinstance(problem, EngineFull):
            log.info("engine %s did not accept request %s: %s", engine_id, state.id, problem)
            state.count_refusal(engine_id, problem)
            self._fleet_log.add("engine_full", engine_id, state.id, reason=str(problem))
            return
        log.info("attempt %d of request %s lost engine %s: %s", state.attempt, state.id, engine_id, problem)
        self._fleet_log.add("attempt_lost", engine_id, state.id, attempt=state.attempt, reason=str(problem))
        state.leave(engine_id, str(problem))
        if isinstance(problem, EngineSilent):  # nothing says that it is the request's fault
            state.count_move(engine_id)
            return
        state.count_loss(engine_id)
        if state.losses >= self._max_attempts:
            raise engines_lost()

    # Begin and end

    async def _reserve(self, request: GenerationRequest) -> Reservation:
        """Charges what the request may use, before there is a record of it: a client that is refused may try again."""
        return await self._limits.reserve(request.tenant, request.request_id, request.max_cost)

    async def _fail(self, state: RequestState, error: QuireError) -> None:
        """Ends the request with an error. It is only released if the error is temporary and the request resumable, or
        if its consumer's deadline has passed. A background request is claimed again by a router, but not after it lost
        too many engines, because it may be what kills them.
        """
        lost = state.generation.background and state.losses >= self._max_attempts
        if state.consumer_expired or (error.code in _TEMPORARY and state.resumable and not lost):
            state.release()
        else:
            state.consumer.prompt_group.failed = True
            state.finish(FinishReason.ERROR, encode_error(error))
            await state.flush_end()


async def _end_last(state: RequestState, deltas: Sequence[Delta]) -> AsyncGenerator[Delta]:
    """Yields some deltas. Of the last ones of an answer that is stored, the usage, which ends it for its client, comes
    by itself, once the journal has the end or cannot be written in time. No token waits for that.
    """
    ends = bool(deltas) and deltas[-1].usage is not None and state.generation.is_stored
    for delta in deltas[:-1] if ends else deltas:
        yield delta
    if not ends:
        return
    last = deltas[-1]
    usage, replayed = last.usage, last.replayed
    if last.token_ids or last.text or last.finish_reason is not None:
        yield replace(last, usage=None)
        replayed = False
    is_stored = await state.flush_end()
    yield Delta("", [], usage=usage, index=last.index, replayed=replayed, pending=not is_stored)


class RequestRegistry:
    """Requests whose record is leased by this router, until it is closed or released; the ``LeaseListener`` of those
    records. ``timeout`` seconds, where given, end a request with DEADLINE, as its own deadline does; that of its
    consumer ends the answer only. ``on_change`` is called when their number has changed.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self.on_change: Callable[[], None] = lambda: None
        self._requests: dict[str, RequestState] = {}
        self._of_model: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._drained = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def states(self) -> list[RequestState]:
        """Returns all of them, in the order in which they came."""
        return list(self._requests.values())

    def of_model(self, model: str) -> int:
        """Returns how many are of this model: those that wait for an engine, and those that run on one."""
        return self._of_model[model]

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Whether the time is over that running requests had to end."""
        return self._drained

    def check_accepting(self) -> None:
        """Raises ``QuireError`` UNAVAILABLE once the router is shutting down."""
        if self._draining:
            metrics.REJECTIONS.labels("unavailable").inc()
            raise shutting_down()

    def check_unused(self, request_id: str) -> None:
        """Raises ``QuireError`` INTERNAL for an id that is in use."""
        if request_id in self._requests:
            log.error("request id %s is in use twice", request_id)
            raise internal()

    @contextmanager
    def track(self, state: RequestState) -> Iterator[None]:
        """Counts the request as in flight until the block ends; an answer that is not complete by then is released, or
        aborted.
        """
        model, timers = state.generation.model, self._start_timers(state)
        self._requests[state.id] = state
        self._idle.clear()
        self._count(model, 1)
        metrics.PROMPT_TOKENS.labels(model).inc(len(state.generation.prompt_token_ids))
        try:
            yield
        finally:
            _release_or_abort(state)
            for timer in timers:
                timer.cancel()
            self._count(model, -1)
            if self._requests.get(state.id) is state:  # else the same came twice, and the journal held neither
                del self._requests[state.id]
            if not self._requests:
                self._idle.set()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Closes the door, lets requests end within ``timeout`` seconds, then ends the rest with UNAVAILABLE, for
        others to continue.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for state in list(self._requests.values()):
                state.interrupt(shutting_down())
        self._drained = True

    def on_cancelled(self, request_id: str) -> None:
        """The request was cancelled, here or at another router."""
        state = self._requests.get(request_id)
        if state is not None:
            state.interrupt(None)

    def on_lease_lost(self, request_id: str) -> None:
        """Interrupts a request that another router continues, as the lease of this one had expired."""
        state = self._requests.get(request_id)
        if state is not None:
            state.interrupt(lease_lost())

    def _count(self, model: str, more: int) -> None:
        self._of_model[model] += more
        metrics.IN_FLIGHT.labels(model).inc(more)
        metrics.LOAD.labels(model).inc(more)
        self.on_change()

    def _start_timers(self, state: RequestState) -> list[asyncio.TimerHandle]:
        """Starts the timers that end the request at its deadline, and only its answer at that of its consumer."""
        ends: list[tuple[float | None, Callable[[], None]]] = [
            (self._timeout_for(state.generation), partial(_time_out, state)),
            (state.consumer.seconds_left, state.end_for_consumer),
        ]
        loop = asyncio.get_running_loop()
        return [loop.call_later(seconds, end) for seconds, end in ends if seconds is not None]

    def _timeout_for(self, request: GenerationRequest) -> float | None:
        """How long a request may take from now on. One that is best effort waits for others, until its deadline."""
        most = None if request.best_effort else self._timeout
        left = request.seconds_left
        return min((each for each in (left, most) if each is not None), default=None)


def _time_out(state: RequestState) -> None:
    state.interrupt(request_timed_out())


def _release_or_abort(state: RequestState) -> None:
    """Ends a request whose client disconnected before the answer was complete: it is released if it can be resumed and
    was not cancelled.
    """
    if state.resumable and not state.cancelled:
        state.release()
    else:
        state.finish(FinishReason.ABORT)
