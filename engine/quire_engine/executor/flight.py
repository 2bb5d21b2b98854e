"""``InFlightStep``: a scheduler output on its way through an executor, from its launch to its model output."""

import logging
from typing import cast

from quire_engine.executor.base import AsyncExecutor, AsyncModelOutput, Executor, ExecutorError
from quire_engine.scheduling.plan import ModelOutput, SchedulerOutput

log = logging.getLogger(__name__)


class InFlightStep:
    """Launches ``scheduler_output``. Exceptions of the launch and of the sampling are re-raised by ``get_output``, so
    that failures surface in the order of the steps. Only an ``ExecutorError`` of a step that is discarded is raised at
    once: nothing can follow it.

    An executor of depth 1 runs the whole step in ``get_output``. ``started`` (nanoseconds since 1970) and ``begun`` (on
    ``perf_counter``) are when scheduling began, and ``schedule`` the seconds that it took.
    """

    def __init__(
        self, executor: Executor, scheduler_output: SchedulerOutput, started: int, begun: float, schedule: float
    ) -> None:
        self.scheduler_output = scheduler_output
        self.started = started
        self.begun = begun
        self.schedule = schedule
        self._executor = executor
        self._failure: Exception | None = None
        self._async_output: AsyncModelOutput | None = None
        if executor.depth > 1 and not scheduler_output.is_empty:
            try:
                self._async_output = cast("AsyncExecutor", executor).execute_model_async(scheduler_output)
            except Exception as failure:  # noqa: BLE001 - ``get_output`` raises it
                self._failure = failure

    @property
    def has_failed(self) -> bool:
        """Whether ``get_output`` can only raise. Then nothing of the step is in flight any more."""
        return self._failure is not None

    def sample_tokens(self) -> None:
        """Samples the step's tokens; all tokens before them are known by now."""
        if self._async_output is None or self.has_failed:
            return
        try:
            self._async_output.sample_tokens()
        except Exception as failure:  # noqa: BLE001 - ``get_output`` raises it
            self._fail(failure)

    def discard(self) -> None:
        """Waits for the end of a step that computes from garbage, because the step before it has failed."""
        self.sample_tokens()
        if not self.has_failed:
            self._fail(RuntimeError("the step before it failed"))

    def get_output(self) -> ModelOutput:
        """Waits until the step is done. Raises as ``Executor.execute_model``."""
        if self._failure is not None:
            raise self._failure
        if self._async_output is not None:
            return self._async_output.get_output()
        return ModelOutput() if self.scheduler_output.is_empty else self._executor.execute_model(self.scheduler_output)

    def _fail(self, failure: Exception) -> None:
        """Waits for the end of a step whose output is not used. Raises ``ExecutorError``."""
        self._failure = failure
        if self._async_output is None:
            return
        try:
            self._async_output.get_output()
        except ExecutorError:
            raise
        except Exception:
            log.debug("step %d was given up and has failed", self.scheduler_output.step, exc_info=True)
