"""``InFlightStep``: a plan on its way through an executor, from its launch to its result. Knows no scheduler."""

import logging
from typing import cast

from quire_engine.executor.base import AsyncExecutor, AsyncModelOutput, Executor, ExecutorError
from quire_engine.scheduling.plan import ModelOutput, SchedulerOutput

log = logging.getLogger(__name__)


class InFlightStep:
    """Launches ``plan``. Whatever goes wrong, and whenever, is raised by ``get_output``, so that it is dealt with in
    the order of the steps. Only an ``ExecutorError`` of a step that is given up is raised at once: nothing can follow
    it.

    An executor that runs step by step begins when the result is asked for. ``started`` (nanoseconds since 1970) and
    ``begun`` (on ``perf_counter``) are the moment when the planning began, and ``schedule`` the seconds that it took.
    """

    def __init__(self, executor: Executor, plan: SchedulerOutput, started: int, begun: float, schedule: float) -> None:
        self.plan = plan
        self.started = started
        self.begun = begun
        self.schedule = schedule
        self._failure: Exception | None = None
        self._step: AsyncModelOutput = _NotBegun(executor, plan)
        if executor.depth > 1 and not plan.is_empty:
            try:
                self._step = cast("AsyncExecutor", executor).execute_model_async(plan)
            except Exception as failure:  # noqa: BLE001 - ``get_output`` raises it
                self._failure = failure

    @property
    def has_failed(self) -> bool:
        """Whether ``get_output`` can only raise. Then nothing of the plan is under way any more."""
        return self._failure is not None

    def sample_tokens(self) -> None:
        """Has the tokens drawn, those before them being known by now."""
        if self.has_failed:
            return
        try:
            self._step.sample_tokens()
        except Exception as failure:  # noqa: BLE001 - ``get_output`` raises it
            self._abandon(failure)

    def give_up(self) -> None:
        """The step before has failed, so this one computes from garbage: waits for its end."""
        self.sample_tokens()
        if not self.has_failed:
            self._abandon(RuntimeError("the step before it failed"))

    def get_output(self) -> ModelOutput:
        """Waits until the step is done. Raises as ``Executor.execute_model``."""
        if self._failure is not None:
            raise self._failure
        return self._step.get_output()

    def _abandon(self, failure: Exception) -> None:
        """Waits for the end of a step that nothing is used of."""
        self._failure = failure
        try:
            self._step.get_output()
        except ExecutorError:
            raise
        except Exception:
            log.debug("step %d was given up and has failed", self.plan.step, exc_info=True)


class _NotBegun:
    """A step of an executor that can only run it as a whole, or one that there is nothing to run of."""

    def __init__(self, executor: Executor, plan: SchedulerOutput) -> None:
        self._executor = executor
        self._plan = plan

    def sample_tokens(self) -> None:
        """Comes with the run."""

    def get_output(self) -> ModelOutput:
        """Runs the plan."""
        return ModelOutput() if self._plan.is_empty else self._executor.execute_model(self._plan)
