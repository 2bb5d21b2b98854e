"""Data-parallel engines, which run their forward passes together because each holds experts for the tokens of all.

Here are their messages (``DPMessage``), the coordinator that decides when a pass starts (``DPCoordinator``), an
engine's side of it (``Lockstep``), and the loop of an engine that takes part even without work (``DPEngineCore``). The
coordinator and ``execute_dummy_batch`` have vLLM's names. vLLM's waves (the time between two pauses of all engines) are
not needed here, because each pass has a number.

An engine with work for the next pass tells the coordinator, which then starts the pass on all engines. Engines without
work run it as a dummy batch. While no engine has work, all sleep. Messages may arrive in any order: a pass number
starts a pass once, and a late message is about a pass that has already started, with its sender in it.

An engine that has loaded its model, or has served all its requests, keeps taking part until all engines have.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Condition
from time import perf_counter

from quire_engine.core.engine_core import DISK_WAIT_SECONDS, Command, EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Executor, ExecutorError
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step_recording import StepRecorder

# Interval at which an engine that waits for a pass, or for its disk, looks for disk results.
DISK_POLL_SECONDS = 0.001


class DPMessageKind(IntEnum):
    """The messages of engines and coordinator."""

    WORK = 1  # from an engine: it has work for this pass
    PASS = 2  # from the coordinator: all engines run this pass
    LEAVING = 3  # from an engine: it was asked to stop; from the coordinator: so are all
    FINISHED = 4  # from an engine: no more work in this phase; from the coordinator: no engine has any
    LOST = 5  # from the coordinator: the group ends


LOADING, SERVING = range(2)
"""The phases of an engine."""


@dataclass(frozen=True, slots=True)
class DPMessage:
    """``number`` is a pass for WORK and PASS, and a phase for FINISHED. ``reason`` is a sentence that says why the
    group ends.
    """

    kind: DPMessageKind
    number: int = 0
    reason: str = ""


class DPCoordinator:
    """Decides for the ``size`` engines of a group when the next pass starts, and when a phase ends."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0  # of the next pass
        self._finished = Counter[int]()

    def receive(self, message: DPMessage) -> DPMessage | None:
        """Handles ``message`` of an engine. Returns the message to send to all engines now; None if there is none."""
        match message.kind:
            case DPMessageKind.WORK if message.number == self._number:
                self._number += 1
                return DPMessage(DPMessageKind.PASS, message.number)
            case DPMessageKind.LEAVING:
                return message
            case DPMessageKind.FINISHED:
                self._finished[message.number] += 1  # each engine sends it once
                if self._finished[message.number] == self._size:
                    return message
        return None


class Lockstep:
    """One engine's side of the passes of its group. ``send`` sends a message to the coordinator, from any thread.

    The engine's core runs passes on one thread; messages arrive on another.
    """

    def __init__(self, send: Callable[[DPMessage], object]) -> None:
        self._send = send
        self._changed = Condition()
        self._number = 0  # of the pass that this engine runs next
        self._num_due = 0  # passes below this number have started on all engines
        self._num_asked = 0
        self._phase, self._num_ended = LOADING, 0  # this engine's phase, and how many phases all engines have ended
        self._is_leaving = False  # whether any engine was asked to stop
        self._loss: str | None = None

    @property
    def number(self) -> int:
        """The number of the pass that this engine runs next."""
        return self._number

    @property
    def is_due(self) -> bool:
        """Whether the next pass has started on all engines."""
        with self._changed:
            return self._number < self._num_due

    def wait(self, has_work: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits for at most ``seconds`` until the next pass is due or this engine has work. ``has_work`` is checked
        again after ``notify``. Raises ``ExecutorError`` if another engine is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_due or has_work() or self._loss is not None, seconds)
            self._raise_if_lost()

    def notify(self) -> None:
        """Wakes a waiting engine, because it may have work. Thread-safe."""
        with self._changed:
            self._changed.notify_all()

    def ask(self) -> None:
        """Tells the coordinator that this engine has work for its next pass, unless that pass is due already."""
        with self._changed:
            if self._number >= max(self._num_due, self._num_asked):
                self._num_asked = self._number + 1
                self._send(DPMessage(DPMessageKind.WORK, self._number))

    def begin(self) -> None:
        """Waits until all engines run the next pass. Raises ``ExecutorError`` if one of them is lost."""
        self.ask()
        with self._changed:
            self._changed.wait_for(lambda: self.is_due or self._loss is not None)
            self._raise_if_lost()

    def end(self) -> None:
        """Marks the pass as completed by this engine."""
        with self._changed:
            self._number += 1

    def leave(self) -> None:
        """Tells the group that this engine was asked to stop, unless another was already. Thread-safe."""
        with self._changed:
            was_leaving, self._is_leaving = self._is_leaving, True
            self._changed.notify_all()
        if not was_leaving:
            self._send(DPMessage(DPMessageKind.LEAVING))

    def wait_until_leaving(self) -> None:
        """Waits until any engine of the group was asked to stop or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_leaving or self._loss is not None)

    def finish(self, execute_dummy_batch: Callable[[], object]) -> None:
        """Reports that this engine has no more work in its phase, and runs dummy batches in the passes of other engines
        until none has work. Raises ``ExecutorError`` if one of them is lost.
        """
        phase, self._phase = self._phase, self._phase + 1
        self._send(DPMessage(DPMessageKind.FINISHED, phase))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_due or self._num_ended > phase or self._loss is not None)
                self._raise_if_lost()
                if not self.is_due:
                    return
            execute_dummy_batch()

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise ExecutorError(self._loss)

    def wait_for_loss(self, seconds: float) -> str | None:
        """Returns why the group has ended or ends within ``seconds``; None if it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, seconds)
            return self._loss

    def receive(self, message: DPMessage) -> None:
        """Handles a message from the coordinator."""
        with self._changed:
            match message.kind:
                case DPMessageKind.PASS:
                    self._num_due = max(self._num_due, message.number + 1)
                case DPMessageKind.FINISHED:
                    self._num_ended = message.number + 1
                case DPMessageKind.LEAVING:
                    self._is_leaving = True
                case DPMessageKind.LOST:
                    self._loss = self._loss or message.reason
            self._changed.notify_all()


@dataclass(slots=True)
class DPStats:
    """Counts of an engine in a group. ``dummy_passes`` are passes that it ran without tokens."""

    dummy_passes: int = 0


@dataclass(frozen=True, slots=True)
class DataParallel:
    """What the core of an engine in a group needs in addition to an executor. The executor's ``execute_model`` waits
    for the other engines if it computes something. ``execute_dummy_batch`` takes part in a due pass without tokens, and
    raises ``ExecutorError``.
    """

    lockstep: Lockstep
    execute_dummy_batch: Callable[[], None]
    stats: DPStats = field(default_factory=DPStats)


class DPEngineCore(EngineCore):
    """The core of one engine of a group. If the others run a pass in a round in which this engine has no tokens, it
    runs a dummy batch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[EngineCoreOutputs], None],
        data_parallel: DataParallel,
        clock: Callable[[], float] = perf_counter,
        *,
        recorder: StepRecorder | None = None,
    ) -> None:
        super().__init__(scheduler, executor, publish, clock, recorder=recorder)
        self._data_parallel, self._lockstep = data_parallel, data_parallel.lockstep

    def send(self, command: Command) -> None:
        """See ``EngineCore.send``."""
        super().send(command)
        self._lockstep.notify()

    def _run(self) -> None:
        """After ``Shutdown``, takes part in passes until no engine has work."""
        while not self._stopped:
            number = self._lockstep.number
            self._process_commands()
            if self.scheduler.has_work:
                self.step()
            if self._lockstep.is_due and self._lockstep.number == number:
                self._execute_dummy_batch()
        self._finish_all_steps()
        self._lockstep.finish(self._execute_dummy_batch)

    def _execute_dummy_batch(self) -> None:
        self._data_parallel.stats.dummy_passes += 1
        self._data_parallel.execute_dummy_batch()

    @property
    def _has_commands(self) -> bool:
        return not self._commands.empty()

    def _wait_for_work(self) -> None:
        self._lockstep.wait(lambda: self._has_commands)

    def _wait_for_transfers(self) -> Sequence[TransferResult]:
        """Waits for transfers like ``EngineCore``, but stops when a pass is due, because the other engines wait for
        this one.
        """
        for _ in range(round(DISK_WAIT_SECONDS / DISK_POLL_SECONDS)):
            if results := self._executor.take_transfers(0.0):
                return results
            self._lockstep.wait(lambda: self._has_commands, DISK_POLL_SECONDS)
            if self._lockstep.is_due or self._has_commands:
                break
        return ()
