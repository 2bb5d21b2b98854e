"""Data-parallel engines make their forward passes together, as each holds experts that the others' tokens need. Here is
what they tell each other for it (``DPMessage``), who decides when a pass begins (``DPCoordinator``), an engine's part
in it (``Lockstep``), and the loop of an engine that takes part without work (``DPEngineCore``). The coordinator and
``execute_dummy_batch`` have vLLM's names. Its waves, which last from one pause of all engines to the next, are not
needed here, as each pass has a number.

Passes are numbered. An engine that has work for the next one says so, and the coordinator then has all engines make it:
those without work as a dummy. While none has work all sleep. So a pass is begun once, by its number. What arrives late
is of a pass that was begun already, in which its sender takes part anyway: messages may arrive in any order.

An engine that has loaded its model, or has served all requests, takes part until all engines are as far.
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

# How late an engine that waits for a pass or for its disk hears of the disk.
DISK_POLL_SECONDS = 0.001


class DPMessageKind(IntEnum):
    """What engines and coordinator say."""

    WORK = 1  # an engine: it has work for this pass
    PASS = 2  # the coordinator: all make this pass
    LEAVING = 3  # an engine: it was asked to stop; the coordinator: so are all
    FINISHED = 4  # an engine: it has no more work in this phase; the coordinator: nobody has
    LOST = 5  # the coordinator: the group ends


LOADING, SERVING = range(2)
"""The phases of an engine."""


@dataclass(frozen=True, slots=True)
class DPMessage:
    """``number`` is that of a pass or a phase, of those kinds that are about one; ``reason`` says as a sentence why the
    group ends.
    """

    kind: DPMessageKind
    number: int = 0
    reason: str = ""


class DPCoordinator:
    """Decides for the ``size`` engines of a group when they make their next pass, and when a phase ends."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0  # of the next pass
        self._finished = Counter[int]()

    def receive(self, message: DPMessage) -> DPMessage | None:
        """An engine has sent ``message``. Returns what all engines are to be sent now, None if nothing is."""
        match message.kind:
            case DPMessageKind.WORK if message.number == self._number:
                self._number += 1
                return DPMessage(DPMessageKind.PASS, message.number)
            case DPMessageKind.LEAVING:
                return message
            case DPMessageKind.FINISHED:
                self._finished[message.number] += 1  # each engine says it once
                if self._finished[message.number] == self._size:
                    return message
        return None


class Lockstep:
    """One engine's part in the passes of its group. ``send`` gives a message to the coordinator, from any thread.

    The engine's core makes passes, on one thread; messages come in on another.
    """

    def __init__(self, send: Callable[[DPMessage], object]) -> None:
        self._send = send
        self._changed = Condition()
        self._number = 0  # of the pass that this engine makes next
        self._num_due = 0  # all passes below this number are made by all
        self._num_asked = 0
        self._phase, self._num_ended = LOADING, 0  # this engine's, and how many all have ended
        self._is_leaving = False  # one of all was asked to stop
        self._loss: str | None = None

    @property
    def number(self) -> int:
        """The pass that this engine makes next."""
        return self._number

    @property
    def is_due(self) -> bool:
        """Whether all make the next pass now."""
        with self._changed:
            return self._number < self._num_due

    def wait(self, has_work: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits until the next pass is due or, which is looked at after ``notify``, this engine has work; for at most
        ``seconds``. Raises ``ExecutorError`` when another engine is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_due or has_work() or self._loss is not None, seconds)
            self._raise_if_lost()

    def notify(self) -> None:
        """This engine may have work. May be called from any thread."""
        with self._changed:
            self._changed.notify_all()

    def ask(self) -> None:
        """Says that this engine has work for its next pass, unless that is due already."""
        with self._changed:
            if self._number >= max(self._num_due, self._num_asked):
                self._num_asked = self._number + 1
                self._send(DPMessage(DPMessageKind.WORK, self._number))

    def begin(self) -> None:
        """Waits until all engines make the next pass. Raises ``ExecutorError`` when one of them is lost."""
        self.ask()
        with self._changed:
            self._changed.wait_for(lambda: self.is_due or self._loss is not None)
            self._raise_if_lost()

    def end(self) -> None:
        """This engine has made the pass."""
        with self._changed:
            self._number += 1

    def leave(self) -> None:
        """Says that this engine was asked to stop, unless another was. May be called from any thread."""
        with self._changed:
            was_leaving, self._is_leaving = self._is_leaving, True
            self._changed.notify_all()
        if not was_leaving:
            self._send(DPMessage(DPMessageKind.LEAVING))

    def wait_until_leaving(self) -> None:
        """Returns when an engine of the group was asked to stop, this one included, or is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_leaving or self._loss is not None)

    def finish(self, execute_dummy_batch: Callable[[], object]) -> None:
        """Says that this engine has no more work in its phase, and takes part in the passes of the others until none
        has. Raises ``ExecutorError`` when one of them is lost.
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
        """Why the group has ended, or does within ``seconds``; None if it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, seconds)
            return self._loss

    def receive(self, message: DPMessage) -> None:
        """The coordinator has sent ``message``."""
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
    """``dummy_passes`` of the others were made without tokens."""

    dummy_passes: int = 0


@dataclass(frozen=True, slots=True)
class DataParallel:
    """What the core of one engine of a group needs besides an executor, whose ``execute_model`` waits for the others
    where it computes something. ``execute_dummy_batch`` takes part in a pass that is due, without tokens, and raises
    ``ExecutorError``.
    """

    lockstep: Lockstep
    execute_dummy_batch: Callable[[], None]
    stats: DPStats = field(default_factory=DPStats)


class DPEngineCore(EngineCore):
    """The core of one engine of a group. In a round of the loop in which the others make a pass and this engine has no
    tokens, it makes that pass as a dummy.
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
            if self._has_work:
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
        """As ``EngineCore`` does, but not behind a pass that becomes due: the others wait for this engine in it."""
        for _ in range(round(DISK_WAIT_SECONDS / DISK_POLL_SECONDS)):
            if results := self._executor.take_transfers(0.0):
                return results
            self._lockstep.wait(lambda: self._has_commands, DISK_POLL_SECONDS)
            if self._lockstep.is_due or self._has_commands:
                break
        return ()
