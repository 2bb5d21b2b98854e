"""Data-parallel engines make their forward passes together, as each holds experts that the others' tokens need. Here is
what they tell each other for it (``DPMessage``), who decides when a pass begins (``DPCoordinator``), an engine's part
in it (``Lockstep``), and the loop of an engine that takes part without work (``DPEngineCore``). The names are vLLM's.

Passes are numbered. An engine that has work for the next one says so, and the coordinator then has all engines make it:
those without work as a dummy. While none has work all sleep. So a pass is begun once, by its number. What arrives late
is of a pass that was begun already, in which its sender takes part anyway: messages may arrive in any order.

An engine that has loaded its model, or has served all requests, takes part until all engines are as far.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition
from time import perf_counter
from typing import Protocol

from quire_engine.core.engine_core import DISK_WAIT_SECONDS, EngineCore, EngineCoreOutputs, Wake
from quire_engine.core.executor import Executor, ExecutorError
from quire_engine.core.kv_disk import TransferResult
from quire_engine.core.scheduler import Scheduler


# How late an engine that waits for a pass or for its disk hears of the disk.
DISK_POLL_SECONDS = 0.001


class DPMessageKind(IntEnum):
    """What engines and coordinator say."""

    WORK = 1  # an engine: it has work for this pass
    PASS = 2  # the coordinator: all make this pass
    LEAVING = 3  # an engine: it was told to stop; the coordinator: so are all
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
        self._loss: str | None = None
        self.on_due: Callable[[], object] = lambda: None
        """Called when a pass is due, on the thread of the messages."""
        self.on_leave: Callable[[], object] = lambda: None
        """Called when another engine was told to stop, on the thread of the messages."""

    @property
    def number(self) -> int:
        """The pass that this engine makes next."""
        return self._number

    @property
    def is_due(self) -> bool:
        """Whether all make the next pass now."""
        with self._changed:
            return self._number < self._num_due

    def wait_until_due(self, seconds: float) -> bool:
        """Waits for at most ``seconds``. Returns whether the next pass is due, or an engine lost."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_due or self._loss is not None, seconds)

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
        """Says that this engine was told to stop. May be called from any thread."""
        self._send(DPMessage(DPMessageKind.LEAVING))

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
                case DPMessageKind.LOST:
                    self._loss = self._loss or message.reason
            self._changed.notify_all()
        if message.kind == DPMessageKind.PASS:
            self.on_due()
        elif message.kind == DPMessageKind.LEAVING:
            self.on_leave()


class DPExecutor(Executor, Protocol):
    """An executor whose forward passes are those of a group: ``execute_model`` waits for the others where it computes
    something.
    """

    def execute_dummy_batch(self) -> None:
        """Takes part in a pass that is due, without tokens. Raises ``ExecutorError``."""
        ...


class DPEngineCore(EngineCore):
    """The core of one engine of a group. In a round of the loop in which the others make a pass and this engine has no
    tokens, it makes that pass as a dummy.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: DPExecutor,
        publish: Callable[[EngineCoreOutputs], None],
        lockstep: Lockstep,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(scheduler, executor, publish, clock)
        self._dp_executor = executor
        self._lockstep = lockstep
        lockstep.on_due = lambda: self.send(Wake())

    def run(self) -> None:
        """See ``EngineCore.run``. After ``Shutdown``, takes part in passes until no engine has work."""
        while not self._stopped:
            number = self._lockstep.number
            self._process_commands()
            if self._has_work:
                self.step()
            if self._lockstep.is_due and self._lockstep.number == number:
                self._dp_executor.execute_dummy_batch()
        self._finish_all_steps()
        self._lockstep.finish(self._dp_executor.execute_dummy_batch)

    @property
    def _may_wait(self) -> bool:
        """See ``EngineCore._may_wait``. A pass is due before the command that wakes the loop is queued."""
        return super()._may_wait and not self._lockstep.is_due

    def _wait_for_transfers(self) -> Sequence[TransferResult]:
        """As ``EngineCore`` does, but for a pass that becomes due: the others wait for this engine in it."""
        results: Sequence[TransferResult] = ()
        for _ in range(round(DISK_WAIT_SECONDS / DISK_POLL_SECONDS)):
            results = self._executor.take_transfers(0.0)
            if results or self._lockstep.wait_until_due(DISK_POLL_SECONDS):
                break
        return results
