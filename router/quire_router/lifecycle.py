"""The story of one request: route, dispatch, stream, recover, finish. Knows every room's door and none's inside."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from time import time

from opentelemetry import context
from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.text.model_text import ModelText
from quire_proto.tracing import traceparent

from quire_router import metrics
from quire_router.admission.limits import Bill, Limits
from quire_router.admission.tenant import Tenants
from quire_router.fleet.fleet import Fleet
from quire_router.fleet.output import EngineFull, EngineLost
from quire_router.generation import Delta, Generation
from quire_router.held import Held
from quire_router.journal.base import Journal, Lease, Record
from quire_router.journal.failure import read_failure, write_failure
from quire_router.mark import Mark
from quire_router.placement.explanation import route_header
from quire_router.placement.placer import Placer
from quire_router.placement.query import Decision
from quire_router.progress import RETRY_AFTER, Progress
from quire_router.retelling import Retelling
from quire_router.routing import Routing, waiting
from quire_router.shortcut import Live, Shortcut
from quire_router.spans import attempt_span

log = logging.getLogger(__name__)

MAX_BACKGROUND = 256  # requests without a listener beyond which this router takes up no more of them
FOLLOW_PERIOD = 0.05  # seconds between two looks at a record that another writes
MAX_LOOKS = 400  # in a second, of all that follow records here
_TEMPORARY = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)


class Lifecycle:
    """Runs requests that passed the validator.

    ``routing`` finds an engine, and ``limits`` say what a tenant may ask for. A request whose engine is lost is
    submitted to another, ``max_attempts`` times in all without a token between them, and its client sees a pause;
    engines that are too full to take it do not count. ``request_timeout`` seconds, where given, end a request with
    DEADLINE, as its own deadline does. With ``tell_route`` the first piece of an attempt says where it runs.

    Requests outlive this router: whatever ends one here without a word from its engine or its client leaves a record
    that another router, or this one, can go on with (``resume``).
    """

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        routing: Routing,
        journal: Journal,
        texts: Mapping[str, ModelText],
        *,
        limits: Limits | None = None,
        request_timeout: float | None = None,
        max_attempts: int = 3,
        tell_route: bool = False,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._routing = routing
        self._journal = journal
        self._texts = texts
        self._limits = limits or Limits(Tenants())
        self._request_timeout = request_timeout
        self._max_attempts = max_attempts
        self._tell_route = tell_route
        self._running: dict[str, Progress] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._leaving = False
        self._pausing = 0
        journal.report_to(self)

    @property
    def in_flight(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._running)

    # What the API asks (see ``api.backend.Runner``)

    def run(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last piece of each choice has a finish reason, and the last of all the usage.
        Raises ``QuireError``, also after some pieces. Closing the generator, or cancelling who iterates it, cancels the
        request on its engine.
        """
        shortcut = Shortcut()
        return Live(self._run(generation, context.get_current(), shortcut), shortcut)

    async def run_once(self, generation: Generation) -> AsyncGenerator[Delta] | None:
        """As ``run``, but None when there is a record of this id already."""
        self._check_door()
        if generation.request_id in self._running:
            return None  # also where the journal had no room for it
        shortcut = Shortcut()
        with ExitStack() as undo:
            bill = undo.enter_context(await self._charge(generation))
            lease = await self._journal.open_once(generation)
            if lease is None:
                return None
            progress = self._begin(generation, lease, context.get_current(), bill=bill, shortcut=shortcut)
            undo.pop_all()
        return Held(self._answer(progress), shortcut, progress.leave)

    async def start(self, generation: Generation) -> bool:
        """Runs a request without a listener; False when there is a record of this id already."""
        answer = await self.run_once(generation)
        if answer is not None:
            self._spawn(answer)
        return answer is not None

    async def record(self, request_id: str) -> Record | None:
        """What is remembered of a request."""
        return await self._journal.read(request_id)

    def resume(self, record: Record, mark: Mark) -> AsyncGenerator[Delta]:
        """The answer to an earlier request, with what is before ``mark`` as told."""
        shortcut = Shortcut()
        return Live(self._resume(record.generation, mark, context.get_current(), shortcut), shortcut)

    async def cancel(self, request_id: str) -> bool:
        """Ends what has not ended of a request with ``FinishReason.ABORT``, wherever it runs; False when there is none
        that has not ended.
        """
        if request_id not in self._running:
            return await self._journal.cancel(request_id)
        self.on_cancelled(request_id)
        return True

    # What the journal says (see ``journal.base.Owners``)

    def on_cancelled(self, request_id: str) -> None:
        """Somebody asked for the request to be ended."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.interrupt(None)

    def on_taken(self, request_id: str) -> None:
        """Another router goes on with the request, because this one did not say for long that it does."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.interrupt(_error(ErrorCode.UNAVAILABLE, "Another router goes on with this request."))

    # The router's life

    async def adopt(self) -> int:
        """Takes up background requests that their routers left, some at a time, unless there are many here already;
        returns how many. Raises ``QuireError``.
        """
        adopted, full = 0, len(self._background) >= MAX_BACKGROUND
        for request_id in () if self._draining or full else await self._journal.orphans():
            try:
                adopted += await self._adopt(request_id)
            except QuireError as error:
                if error.code is not ErrorCode.INTERNAL:
                    raise
                log.error("background request %s cannot be taken up", request_id)  # the others can
        return adopted

    async def _adopt(self, request_id: str) -> bool:
        claimed = await self._journal.claim(request_id) if await self._serves(request_id) else None
        if claimed is not None:
            self._spawn(self._go_on(*claimed, None, Context(), Shortcut()))
        return claimed is not None

    async def _serves(self, request_id: str) -> bool:
        """Whether a record's request can run here; routers of other models may share the journal. One that is damaged
        is everybody's: whoever claims it ends it.
        """
        try:
            record = await self._journal.read(request_id)
        except QuireError as error:
            if error.code is ErrorCode.INTERNAL:
                return True
            raise
        return record is not None and record.generation.model in self._texts

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left then is ended, not cancelled
        """Refuses new requests from now on, lets running ones end within ``timeout`` seconds, then ends the rest with
        UNAVAILABLE, for others to go on with; their generators raise it when they are next iterated.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for progress in list(self._running.values()):
                progress.interrupt(_shutting_down())
        self._leaving = True
        if self._background:
            await asyncio.wait(self._background)

    def _spawn(self, answer: AsyncGenerator[Delta]) -> None:
        task = asyncio.create_task(_exhaust(answer), name="background request")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The story

    async def _run(self, generation: Generation, caller: Context, shortcut: Shortcut) -> AsyncGenerator[Delta]:
        self._check_door()
        self._check_id(generation.request_id)
        with ExitStack() as undo:
            bill = undo.enter_context(await self._charge(generation))
            lease = self._journal.open(generation)
            progress = self._begin(generation, lease, caller, bill=bill, shortcut=shortcut)
            undo.pop_all()
        async with aclosing(self._answer(progress)) as answer:
            async for delta in answer:
                yield delta

    async def _resume(
        self, generation: Generation, mark: Mark, caller: Context, shortcut: Shortcut
    ) -> AsyncGenerator[Delta]:
        """Tells what is written, for as long as another writes it; then goes on with it."""
        follower = self._journal.follow(generation.request_id)
        retelling = Retelling(generation, self._texts[generation.model], mark)
        while (tail := await follower.look()) is not None:
            for delta in retelling.follow(tail.pieces):
                yield delta
            if tail.finish_reason is FinishReason.ERROR:
                raise read_failure(tail.error)
            if tail.finish_reason is not None:
                yield retelling.end(tail.usage)
                return
            if self._leaving:
                raise _shutting_down()
            claimed = None if tail.held else await self._claim(generation.request_id)
            if claimed is not None:
                async with aclosing(self._take_up(*claimed, retelling, mark, caller, shortcut=shortcut)) as answer:
                    async for delta in answer:
                        yield delta
                return
            await self._pause()
        raise QuireError(ErrorCode.NOT_FOUND, "What was known of this request was lost.", param="request_id")

    async def _pause(self) -> None:
        """Between two looks at a record: however many follow records here, they look only so often together."""
        self._pausing += 1
        try:
            await asyncio.sleep(max(FOLLOW_PERIOD, self._pausing / MAX_LOOKS))
        finally:
            self._pausing -= 1

    async def _take_up(
        self, record: Record, lease: Lease, retelling: Retelling, mark: Mark, caller: Context, *, shortcut: Shortcut
    ) -> AsyncGenerator[Delta]:
        async with aclosing(self._go_on(record, lease, mark, caller, shortcut)) as answer:
            together = Progress.tells_together(record.generation)
            for delta in () if together else retelling.catch_up(record.pieces):
                yield delta
            async for delta in answer:
                yield delta

    def _go_on(self, record: Record, lease: Lease, mark: Mark | None, caller: Context, shortcut: Shortcut) -> Held:
        """The rest of a request that was claimed, whose record is let go of or ended whatever becomes of this."""
        try:
            progress = self._begin(record.generation, lease, caller, record=record, mark=mark, shortcut=shortcut)
        except Exception:
            log.exception("request %s cannot go on", lease.request_id)
            self._journal.finish(lease, FinishReason.ERROR, write_failure(internal()))
            raise internal() from None
        return Held(self._answer(progress), shortcut, progress.leave)

    async def _answer(self, progress: Progress) -> AsyncGenerator[Delta]:
        with self._running_as(progress):
            try:
                async with aclosing(self._attempts(progress)) as deltas:
                    async for delta in deltas:
                        yield delta
            except QuireError as error:
                self._fail(progress, error)
                raise
            except Exception:
                log.exception("request %s failed", progress.id)
                self._fail(progress, internal())
                raise internal() from None

    async def _attempts(self, progress: Progress) -> AsyncGenerator[Delta]:
        for delta in progress.recover() or progress.end():
            yield delta
        if progress.finish_reason is not None:
            return
        decision = await self._routing.begin(progress)
        while decision is not None:
            try:
                async with aclosing(self._attempt(progress, decision)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except (EngineFull, EngineLost) as problem:
                self._note(progress, decision.engine_id, problem)
            for delta in progress.recover():
                yield delta
            if progress.ended:
                return
            decision = await self._routing.again(progress)
        for delta in progress.conclude(FinishReason.ABORT):
            yield delta

    async def _attempt(self, progress: Progress, decision: Decision) -> AsyncGenerator[Delta]:
        route = route_header(decision) if self._tell_route else ""
        progress.attempt += 1
        with attempt_span(progress, decision.engine_id) as span:
            submission = progress.submission(traceparent(span))
            pending = max(1, len(progress.generation.prompt_token_ids) - decision.cached_tokens)
            with self._fleet.dispatch(decision.engine_id, submission, pending_tokens=pending) as outputs:
                self._placer.placed(decision, progress.generation)
                progress.follow(outputs)
                async for output in outputs:
                    deltas = progress.take(output)
                    if route and deltas:
                        deltas[0], route = replace(deltas[0], route=route), ""
                    if progress.ended:
                        break
                    for delta in deltas:
                        yield delta
        # By now the engine is free and the record is closed: a client need not come back after its last piece.
        for delta in deltas:
            yield delta

    def _note(self, progress: Progress, engine_id: str, problem: EngineFull | EngineLost) -> None:
        """What became of an attempt. Raises ``QuireError`` after too many that came to nothing."""
        if isinstance(problem, EngineFull):
            log.info("engine %s did not take request %s: %s", engine_id, progress.id, problem)
            progress.refused_by.add(engine_id)
            return
        log.warning("attempt %d of request %s lost engine %s: %s", progress.attempt, progress.id, engine_id, problem)
        if progress.count_loss() >= self._max_attempts:
            raise _error(ErrorCode.UNAVAILABLE, "The engines that ran this request were lost.")

    # Begin and end

    async def _charge(self, generation: Generation) -> Bill:
        """What the request may use, charged before there is a record of it: who is refused may ask again. One that goes
        on was charged where it began.
        """
        return await self._limits.enter(generation.tenant, generation.request_id, waiting(generation).tokens)

    async def _claim(self, request_id: str) -> tuple[Record, Lease] | None:
        """The record, if nobody holds it and this router may take it up."""
        self._check_door()
        if request_id in self._running:
            return None  # it is ending here, and about to be let go of
        return await self._journal.claim(request_id)

    def _begin(
        self,
        generation: Generation,
        lease: Lease,
        caller: Context,
        *,
        record: Record | None = None,
        mark: Mark | None = None,
        bill: Bill | None = None,
        shortcut: Shortcut | None = None,
    ) -> Progress:
        text = self._texts[generation.model]
        return Progress(
            generation, text, self._journal, lease, caller, record=record, mark=mark, bill=bill, shortcut=shortcut
        )

    def _check_door(self) -> None:
        if self._draining:
            metrics.REJECTIONS.labels("unavailable").inc()
            raise _shutting_down()

    def _check_id(self, request_id: str) -> None:
        if request_id in self._running:
            log.error("request id %s is in use twice", request_id)
            raise internal()

    @contextmanager
    def _running_as(self, progress: Progress) -> Iterator[None]:
        """A request that runs is known by its id and counted; all of it is undone here, on every way out."""
        model = progress.generation.model
        self._running[progress.id] = progress
        self._idle.clear()
        metrics.IN_FLIGHT.labels(model).inc()
        metrics.PROMPT_TOKENS.labels(model).inc(len(progress.generation.prompt_token_ids))
        deadline = self._start_deadline(progress)
        try:
            yield
        finally:
            _leave(progress)
            if deadline is not None:
                deadline.cancel()
            metrics.IN_FLIGHT.labels(model).dec()
            if self._running.get(progress.id) is progress:  # else the same came twice, and the journal held neither
                del self._running[progress.id]
            if not self._running:
                self._idle.set()

    def _fail(self, progress: Progress, error: QuireError) -> None:
        """The request ends with an error; one that will pass is not its last word where somebody may come back."""
        if error.code in _TEMPORARY and progress.resumable:
            progress.leave()
        else:
            progress.finish(FinishReason.ERROR, write_failure(error))

    def _start_deadline(self, progress: Progress) -> asyncio.TimerHandle | None:
        until = progress.generation.deadline
        seconds = [] if until is None else [max(0.0, until - time())]
        seconds += [] if self._request_timeout is None else [self._request_timeout]
        if not seconds:
            return None
        error = QuireError(ErrorCode.DEADLINE, f"The request took longer than {min(seconds):.3g} seconds.")
        return asyncio.get_running_loop().call_later(min(seconds), progress.interrupt, error)


def _leave(progress: Progress) -> None:
    """The client left before the answer was complete: it may come back for the rest of some requests."""
    if progress.resumable:
        progress.leave()
    else:
        progress.finish(FinishReason.ABORT)


async def _exhaust(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)


def _error(code: ErrorCode, message: str) -> QuireError:
    return QuireError(code, message, retry_after=RETRY_AFTER[code])


def _shutting_down() -> QuireError:
    return _error(ErrorCode.UNAVAILABLE, "This router is shutting down.")
