"""The paged executor as a device with a stream: what is launched is done in its order, but as late as is allowed.

What a step is given is queued when it is given, and done whenever ``pace`` says, at the latest when its result is
asked for. So whatever relies on a step being done when it was only launched, or reads what a later step has changed
since, is found. Breaches of the protocol end the test as ``Misuse``, which no loop takes for a failed step.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.executor import CopyError
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import BeamCandidates, ModelOutput, SchedulerOutput

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.steps import PENDING, KnownChunk, drawn_tokens

GARBAGE = VOCAB_SIZE + 1


class Misuse(BaseException):
    """The loop or the scheduler did what an executor must not be asked for."""


class FailureError(Exception):
    """A step fails, as kernels do."""


def require(condition: bool, breach: str) -> None:
    if not condition:
        raise Misuse(breach)


@contextmanager
def misuse() -> Iterator[None]:
    """What an assertion finds is no failure of the step."""
    try:
        yield
    except AssertionError as breach:
        raise Misuse(str(breach)) from breach


class OverlappingPagedExecutor(PagedExecutor):
    """``pace`` is given how many pieces of work are queued and returns how many of them are done now.

    ``fails`` is asked whether a step fails: at its "launch", in its "forward" pass (then its pending tokens are known),
    at its "draw", or in a "run". A failing forward pass spoils what it should have filled, and so does a step that was
    launched on top of it or of a failing draw.

    With ``num_stages`` above 1 it is a pipeline, in which as many steps are in flight, and drawn late.
    """

    def __init__(self, capacity: KVCacheConfig, num_stages: int = 1) -> None:
        super().__init__(capacity)
        self.is_pipeline = num_stages > 1
        self.depth = max(2, num_stages)
        self.pace: Callable[[int], int] = lambda queued: 0
        self.fails: Callable[[str, SchedulerOutput], bool] = lambda where, scheduler_output: False
        self.in_flight: deque[PagedStep] = deque()
        self.events: list[tuple[str, int]] = []
        self.wasted = 0
        self.spoilt = False
        self.drawn: tuple[PagedStep | None, dict[int, list[int]]] = None, {}
        self._stream: deque[Callable[[], None]] = deque()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        require(not self.in_flight, "run while a step is in flight")
        require(
            not any(chunk.awaits_token for chunk in scheduler_output.chunks),
            "run with a pending token",
        )
        self.events.append(("run", scheduler_output.step))
        self._start_over()
        self._check_rows(scheduler_output)
        with misuse():
            self.take_rows(scheduler_output)
        self.check("run", scheduler_output)
        with misuse():
            return super().execute_model(scheduler_output)

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> "PagedStep":
        require(len(self.in_flight) < self.depth, "too many steps are in flight")
        if self.is_pipeline:
            pending = [chunk for chunk in scheduler_output.chunks if chunk.awaits_token]
            require(not pending, "a token is pending in a pipeline")
        else:
            require(all(step.is_drawn for step in self.in_flight), "launched before the draws of the step before")
        require(not scheduler_output.is_empty, "there is nothing to launch")
        self.events.append(("launch", scheduler_output.step))
        if not self.in_flight:
            self._start_over()
        self._check_rows(scheduler_output)
        with misuse():
            self.take_rows(scheduler_output)
        before = self.in_flight[-1] if self.in_flight else None
        step = PagedStep(self, as_given(scheduler_output), self.given, before)
        self.queue(step.copy)
        self.check("launch", scheduler_output)
        self.in_flight.append(step)
        self.queue(step.compute)
        return step

    def take_transfers(self, timeout: float) -> list[TransferResult]:
        while timeout and self._stream:  # while the loop waits, the device goes on
            self.advance()
        return super().take_transfers(timeout)

    def queue(self, work: Callable[[], None]) -> None:
        self._stream.append(work)
        for _ in range(self.pace(len(self._stream))):
            self.advance()

    def advance(self) -> None:
        if self._stream:
            with misuse():
                self._stream.popleft()()

    def finish(self, step: "PagedStep") -> None:
        """Does what is queued of the step and of all before it."""
        while not step.is_done:
            require(bool(self._stream), "the result of a step that was never drawn")
            self.advance()

    def check(self, where: str, scheduler_output: SchedulerOutput) -> None:
        if self.fails(where, scheduler_output):
            self.events.append((f"failed {where}", scheduler_output.step))
            raise FailureError(f"step {scheduler_output.step} failed: {where}")

    def _check_rows(self, scheduler_output: SchedulerOutput) -> None:
        computed = {row for step in self.in_flight for row in step.scheduler_output.rows}
        for row in scheduler_output.freed_rows:
            require(row not in computed, "a row was freed while a step computes it")
            require(row in self.rows.requests, "a row was freed twice")
        for new in scheduler_output.new:
            require(new.row not in computed, "a row was given to a sequence while a step computes it")

    def _start_over(self) -> None:
        while self._stream:
            self.advance()
        self.spoilt = False


class PagedStep:
    """A step in flight: what it was given when, and what came of it."""

    def __init__(
        self,
        executor: OverlappingPagedExecutor,
        scheduler_output: SchedulerOutput,
        chunks: list[KnownChunk],
        before: "PagedStep | None",
    ) -> None:
        self.scheduler_output = scheduler_output
        self.chunks = chunks
        self.is_drawn = False
        self.is_done = False
        self.copy_fails = False
        self._executor = executor
        self._before = before
        self._model_output = ModelOutput([0] * scheduler_output.total_num_draws)
        self._prefixes: dict[int, bytes] = {}
        self._failure: Exception | None = None

    def sample_tokens(self) -> None:
        require(not self.is_drawn, "drawn twice")
        require(self._executor.in_flight[0] is self, "drawn before the result of the step before was taken")
        self.is_drawn = True
        self._executor.events.append(("draw", self.scheduler_output.step))
        rows = self._executor.rows.tokens
        known = [rows[chunk.row][: chunk.end] for chunk in self.scheduler_output.chunks]
        self._executor.queue(partial(self.sample, known))
        try:
            self._executor.check("draw", self.scheduler_output)
        except FailureError as failure:
            self._executor.spoilt, self._failure = True, failure

    def get_output(self) -> ModelOutput:
        require(self._executor.in_flight[0] is self, "steps are taken out of order, or twice")
        self._executor.finish(self)
        self._executor.in_flight.popleft()
        self._executor.events.append(("result", self.scheduler_output.step))
        if self.copy_fails:
            raise CopyError(f"step {self.scheduler_output.step} could not copy")
        if self._failure is not None:
            raise self._failure
        self._executor.append_drawn(self.scheduler_output, self._model_output)
        return self._model_output

    def copy(self) -> None:
        self._executor.copy(self.scheduler_output)
        self._executor.copy_ahead(self.scheduler_output)

    def compute(self) -> None:
        try:
            if not self._executor.spoilt:
                chunks = [self._with_drawn_token(chunk) for chunk in self.chunks]
                self._executor.given = chunks
                self._executor.check("forward", self.scheduler_output)
                for number, chunk in enumerate(chunks):
                    self._prefixes[number] = self._executor.compute(number, chunk, self._model_output)
                return
        except FailureError as failure:
            self._executor.spoilt, self._failure = True, failure
        for chunk in self.chunks:
            self._executor.spoil(chunk)

    def sample(self, known: list[list[int]]) -> None:
        draw = 0
        for number, chunk in enumerate(self.chunks):
            if number not in self._prefixes:
                self._executor.wasted += chunk.draws
                self._model_output.token_ids[draw : draw + chunk.draws] = [GARBAGE] * chunk.draws
                if any(request.num_candidates for request in chunk.sample_requests):
                    self._model_output.candidates[draw] = BeamCandidates([GARBAGE], [0.0])
                draw += chunk.draws
                continue
            for request, token_ids, prefix in self._executor.draws_of(chunk, known[number], self._prefixes[number]):
                self._executor.draw(request, token_ids, prefix, draw, self._model_output)
                draw += 1
        self._executor.drawn = self, drawn_tokens(self.scheduler_output, self._model_output)
        self.is_done = True

    def _with_drawn_token(self, chunk: KnownChunk) -> KnownChunk:
        if chunk.token_ids[-1] != PENDING:
            return chunk
        step, token_ids = self._executor.drawn
        assert self._before is not None, "a token is pending, and nothing is in flight"
        assert step is self._before, "a pending token is of another step than the one before"
        return replace(chunk, token_ids=[*chunk.token_ids[:-1], token_ids[chunk.sequence_id][0]])


def as_given(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """What a device is given at the launch."""
    return deepcopy(scheduler_output)
