"""``CoreThread``: runs an engine core on a thread of this process."""

import logging
from collections.abc import Callable
from threading import Thread

from quire_engine.core.data_parallel import DataParallel, DPEngineCore
from quire_engine.core.engine_core import Command, EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Executor, Sleeper, WeightStats
from quire_engine.core.lora import LoRARequest, no_loras
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step_recording import StepRecorder
from quire_engine.core_client.client import CoreListener, CoreStats

log = logging.getLogger(__name__)


class CoreThread:
    """Runs a core on a thread of this process. Implements ``CoreRunner``.

    ``check_lora`` reads an adapter's folder. ``weights`` are the statistics of layers on disk or in host memory; None
    without such layers. ``data_parallel`` is set for an engine of a group: after ``Shutdown`` it takes part in the
    others' steps until all have finished their requests. ``sleeper`` frees memory while the engine sleeps; without one
    it never sleeps. ``recorder`` gets all steps; None if they are not recorded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        check_lora: Callable[[LoRARequest], LoRARequest] = no_loras,
        weights: WeightStats | None = None,
        data_parallel: DataParallel | None = None,
        sleeper: Sleeper | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.check_lora = check_lora
        self._executor = executor
        self._lockstep = None if data_parallel is None else data_parallel.lockstep
        self._core = (
            EngineCore(scheduler, executor, self._publish, sleeper=sleeper, recorder=recorder)
            if data_parallel is None
            else DPEngineCore(scheduler, executor, self._publish, data_parallel, recorder=recorder)
        )
        self.stats = CoreStats(scheduler.stats, weights, None if data_parallel is None else data_parallel.stats)
        self._listener: CoreListener | None = None
        self._has_left = False
        self._thread = Thread(target=self._run, name="engine-core", daemon=True)

    @property
    def is_sleeping(self) -> bool:
        """See ``EngineCore.is_sleeping``."""
        return self._core.is_sleeping

    @property
    def seconds_since_progress(self) -> float:
        """See ``EngineCore.seconds_since_progress``."""
        return self._core.seconds_since_progress

    def send(self, command: Command) -> None:
        """See ``EngineCoreClient.send``."""
        self._core.send(command)

    def start(self, listener: CoreListener) -> None:
        """Starts the thread, on which ``listener`` is called."""
        self._listener = listener
        self._thread.start()
        if self._lockstep is not None:
            Thread(target=self._watch_group, name="group-watch", daemon=True).start()

    def leave(self) -> None:
        """See ``CoreRunner.leave``."""
        self._has_left = True
        if self._lockstep is not None:
            self._lockstep.leave()

    def join(self, timeout: float) -> None:
        """See ``CoreRunner.join``."""
        self._thread.join(timeout)

    def close(self) -> None:
        """See ``CoreRunner.close``."""
        self._executor.close()

    @property
    def _started(self) -> CoreListener:
        assert self._listener is not None, "start comes first"
        return self._listener

    def _publish(self, outputs: EngineCoreOutputs) -> None:
        self._started.on_outputs(outputs)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._core.run()
        except BaseException as error:  # noqa: BLE001 - the listener decides what to do
            failure = error
        self._started.on_end(failure)

    def _watch_group(self) -> None:
        """Waits until another engine of the group was asked to stop. If one is lost instead, the core fails."""
        assert self._lockstep is not None
        self._lockstep.wait_until_leaving()
        if self._has_left or self._lockstep.wait_for_loss(0) is not None:
            return
        log.info("another engine of the group is stopping: this one stops with it")
        self._started.on_leaving()
