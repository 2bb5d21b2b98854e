"""Shadows: requests that are sent once more, to another model, to compare what it makes of them. Nobody reads the
answer of a shadow, and nothing is kept of it. It takes what all others leave: it is begun only where an engine has room
at once and nothing waits, is behind the lines of batches in the engine, and is neither queued nor sent again.

``ShadowRunner`` begins them, beside the requests of a router, and ``Shadow`` is one; ``TokenComparison`` compares.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from uuid import uuid4

from quire.v1 import engine_pb2
from quire_proto.convert import sampling_to_proto
from quire_proto.errors import QuireError
from quire_proto.priority import BEST_EFFORT, SHADOW
from quire_proto.sampling import FinishReason

from quire_router.admission.model_targets import ShadowTarget, TargetGroup, is_shadowed
from quire_router.admission.queue import AdmissionQueue
from quire_router.core import metrics
from quire_router.core.generation import PROMPT_SEPARATOR, GenerationRequest
from quire_router.engines.attempt import AttemptFailed, Output
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.pool import EnginePool
from quire_router.placement.placer import PlacementDecision, Placer
from quire_router.requests.choice import Choice
from quire_router.requests.state import RequestState

log = logging.getLogger(__name__)

MAX_SHADOWS = 256  # of one router process
MAX_SHADOW_SECONDS = 600.0  # that one may take


class ShadowResult(StrEnum):
    """What became of a shadow: its tokens are those of the answer, or others; its engine failed; or it was dropped, as
    there was no room for it, or no whole answer to compare it with.
    """

    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(slots=True)
class _ComparedChoice:
    """One choice of a shadow. The first ``equal`` tokens are those of the answer, which is known to differ behind them
    if ``differs``.
    """

    token_ids: list[int] = field(default_factory=list)
    equal: int = 0
    differs: bool = False
    reason: FinishReason | None = None


class TokenComparison:
    """Compares the choices of an answer, which grow, with those of its shadow, as both go on. Where a stop string has
    ended a choice, which no engine knows of, what the shadow has behind its tokens does not count.
    """

    def __init__(self, answer: Sequence[Choice]) -> None:
        self._answer = answer
        self._choices = [_ComparedChoice() for _ in answer]
        self.is_whole = False  # the answer has ended

    def add(self, index: int, token_ids: Sequence[int], reason: FinishReason | None = None) -> None:
        """Adds what the shadow made of a choice."""
        choice = self._choices[index]
        choice.token_ids += token_ids
        choice.reason = reason
        self._advance(index)

    def end_answer(self) -> None:
        """The answer has all its tokens."""
        self.is_whole = True
        for index in range(len(self._choices)):
            self._advance(index)

    @property
    def is_different(self) -> bool:
        """Whether any choice is known to differ."""
        return any(choice.differs for choice in self._choices)

    @property
    def needs_no_more(self) -> bool:
        """Whether more tokens of the shadow would change nothing."""
        return self.is_different or all(map(self._is_complete, range(len(self._choices))))

    @property
    def equal_share(self) -> float:
        """The part of the answer's tokens that the shadow has, from the beginning of each choice on."""
        made = sum(len(choice.token_ids) for choice in self._answer)
        return sum(choice.equal for choice in self._choices) / made if made else float(not self.is_different)

    def _is_complete(self, index: int) -> bool:
        choice, answer = self._choices[index], self._answer[index]
        return choice.reason is not None or (answer.stop_string is not None and choice.equal == len(answer.token_ids))

    def _advance(self, index: int) -> None:
        choice, answer = self._choices[index], self._answer[index]
        made, wanted = len(choice.token_ids), len(answer.token_ids)
        known = min(made, wanted)
        while choice.equal < known and choice.token_ids[choice.equal] == answer.token_ids[choice.equal]:
            choice.equal += 1
        if choice.differs or choice.equal < known:
            choice.differs = True
        elif made < wanted:
            choice.differs = choice.reason is not None
        elif answer.finish_reason is not None and answer.stop_string is None:
            choice.differs = made > wanted or choice.reason not in (None, answer.finish_reason)


class Shadow:
    """One shadow: of the request ``state``, at the model ``target``. It is over once both have ended, and counted then,
    once.
    """

    def __init__(self, state: RequestState, target: str) -> None:
        self.request_id = uuid4().hex
        self.target = target
        self._request = state.generation
        self._comparison = TokenComparison(state.choices)
        self._outputs: OutputStream | None = None
        self._counted = False
        self._has_ended = False

    def attach_stream(self, outputs: OutputStream) -> None:
        """Takes what the engine makes, without a task switch for each token."""
        self._outputs = outputs
        outputs.sink, outputs.token_sink = self._take, self._take_token

    def on_answer_end(self, reason: FinishReason) -> None:
        """The request has ended. Without a whole answer there is nothing to compare."""
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.count(ShadowResult.DROPPED)
            self._stop()
            return
        self._comparison.end_answer()
        self._conclude()

    def on_end(self) -> None:
        """The engine has ended it, as far as it was wanted."""
        self._has_ended = True
        self._conclude()

    def count(self, result: ShadowResult) -> None:
        """Counts what became of it; only the first call does."""
        if self._counted:
            return
        self._counted = True
        name, comparison = self._request.served_name, self._comparison
        count_shadow(name, self.target, result)
        if result in (ShadowResult.EQUAL, ShadowResult.DIFFERENT):
            metrics.SHADOW_EQUAL_SHARE.labels(name, self.target).observe(comparison.equal_share)
        if result is ShadowResult.DIFFERENT:
            log.debug(
                "shadow %s at %s differs from request %s at %s: %.0f %% of its tokens are the same",
                self.request_id,
                self.target,
                self._request.request_id,
                self._request.model,
                100 * comparison.equal_share,
            )

    def take(self, output: Output) -> None:
        """Takes an output. Raises the error that it ends with."""
        if output.error is not None:
            raise output.error
        self._comparison.add(output.index, output.token_ids, output.finish_reason)
        self._stop_if_decided()

    def _take(self, output: Output) -> bool:
        if output.finish_reason is not None or output.error is not None:
            return False
        self.take(output)
        return True

    def _take_token(self, index: int, token_id: int) -> bool:
        self._comparison.add(index, (token_id,))
        self._stop_if_decided()
        return True

    def _conclude(self) -> None:
        if self._comparison.needs_no_more:
            self._stop()
        if self._comparison.is_whole and (self._has_ended or self._comparison.needs_no_more):
            different = self._comparison.is_different
            self.count(ShadowResult.DIFFERENT if different else ShadowResult.EQUAL)

    def _stop_if_decided(self) -> None:
        if self._comparison.needs_no_more:
            self._stop()

    def _stop(self) -> None:
        """Ends it at the engine, after the output that is being taken."""
        if self._outputs is not None:
            asyncio.get_running_loop().call_soon(self._outputs.abort)


class ShadowRunner:
    """Begins the shadows of requests for names of ``targets``, at most ``max_shadows`` at once."""

    def __init__(
        self,
        pool: EnginePool,
        placer: Placer,
        queue: AdmissionQueue,
        targets: Mapping[str, TargetGroup],
        max_shadows: int = MAX_SHADOWS,
    ) -> None:
        self._pool = pool
        self._placer = placer
        self._queue = queue
        self._targets = targets
        self._max_shadows = max_shadows
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, state: RequestState) -> None:
        """Begins the shadow of a request that was just dispatched, if it is to have one and there is room. Whatever
        goes wrong with that is not the request's fault.
        """
        request = state.generation
        group = self._targets.get(request.served_name)
        shadow = None if group is None else group.shadow
        if shadow is None or not _is_comparable(request):
            return
        if not is_shadowed(shadow, request.request_id.partition(PROMPT_SEPARATOR)[0]):
            return
        try:
            self._begin(state, shadow)
        except Exception:
            log.exception("cannot start the shadow of request %s at %s", request.request_id, shadow.model)
            count_shadow(request.served_name, shadow.model, ShadowResult.FAILED)

    def _begin(self, state: RequestState, shadow: ShadowTarget) -> None:
        request = state.generation
        shadow_request = _shadow_request(request, shadow.model)
        decision = self._place(shadow_request) if self._has_room(shadow.model) else None
        if decision is None:
            count_shadow(request.served_name, shadow.model, ShadowResult.DROPPED)
            return
        state.shadow = Shadow(state, shadow.model)
        task = asyncio.create_task(self._run(state.shadow, shadow_request, decision), name="shadow")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all shadows, and begins no more."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_room(self, model: str) -> bool:
        is_full = self._closed or len(self._tasks) >= self._max_shadows
        if is_full or self._queue.waiting_of_all_classes(model):
            return False
        return self._pool.has_best_effort_capacity(model)

    def _place(self, request: GenerationRequest) -> PlacementDecision | None:
        rows = self._pool.with_best_effort_capacity(self._pool.rows(request.model))
        return self._placer.place(request, rows, {})

    async def _run(self, shadow: Shadow, request: GenerationRequest, decision: PlacementDecision) -> None:
        submit = _submit(shadow.request_id, request)
        pending = max(1, len(request.prompt_token_ids) - decision.cached_tokens)
        try:
            async with asyncio.timeout(MAX_SHADOW_SECONDS):
                with self._pool.dispatch(
                    decision.engine_id, submit, pending_tokens=pending, tenant=request.tenant
                ) as outputs:
                    self._placer.record_dispatch(decision, request)
                    shadow.attach_stream(outputs)
                    async for output in outputs:
                        shadow.take(output)
            shadow.on_end()
        except asyncio.CancelledError:
            shadow.count(ShadowResult.DROPPED)
            raise
        except (AttemptFailed, QuireError, TimeoutError) as problem:
            log.debug("shadow %s at %s failed: %s", shadow.request_id, shadow.target, problem)
            shadow.count(ShadowResult.FAILED)


def count_shadow(name: str, target: str, result: ShadowResult) -> None:
    """Counts what became of a shadow of a request for the name."""
    metrics.SHADOWS.labels(name, target, result).inc()


def _is_comparable(request: GenerationRequest) -> bool:
    """Whether a shadow's tokens can be compared with an answer's, token by token. Adapters are of one target; choices
    that are selected are known at their end only; and what is best effort itself has no shadow behind it.
    """
    selected = request.selects_choices or request.pooling is not None
    return not selected and request.lora is None and not request.best_effort


def _shadow_request(request: GenerationRequest, model: str) -> GenerationRequest:
    """Returns the request as the shadow's engine gets it."""
    params = replace(request.params, logprobs=None, prompt_logprobs=None)
    return replace(request, model=model, params=params, priority=SHADOW, session="")


def _submit(request_id: str, request: GenerationRequest) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.params),
        cache_salt=request.cache_salt,
        priority=BEST_EFFORT,
        shadow=True,
    )
