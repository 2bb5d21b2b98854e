"""``Workers``: all ranks but 0, as rank 0 sees them. It tells them what to do and hears what became of it, and when one
is lost it ends all of them and says so. Knows no tensors.

A thread of its own starts the processes and listens to them, so that a loss is noticed while rank 0 computes, waits
in a collective, or has nothing to do.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

from quire_engine.executor.base import ExecutorError
from quire_engine.executor.torch.ranks.accord import Accord, Failure
from quire_engine.executor.torch.ranks.calls import Call, Report
from quire_engine.executor.torch.ranks.process import SECONDS_TO_END, RankProcess
from quire_engine.executor.torch.ranks.wire import Array, Message, WireError, from_json, receive, send
from quire_engine.models.errors import ModelError

# How far ranks may be apart in noticing the same failure. They compute the same at the same time.
SECONDS_TO_AGREE = 3.0
SECONDS_TO_NOTICE = 10.0
ENDED = "The ranks of this model have ended."


class RankError(ExecutorError):
    """A rank is lost, or has failed alone."""


class Workers:
    """The ranks 1 to ``size`` - 1. Calls are made by one thread, one after the other; a loss may be told on another.

    ``on_lost`` is called once with the sentence, on the listening thread, and never after ``close``.
    """

    def __init__(self, size: int, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._accord = Accord(size - 1)
        self._changed = Condition()
        self._asked: set[int] = set()
        self._answers: dict[tuple[int, int], Any] = {}
        self._lost: str | None = None
        self._closing = False
        self._started = False
        self._error: OSError | None = None
        self._wake, self._woken = socket.socketpair()
        self._processes: list[RankProcess] = []
        self._thread = Thread(target=self._listen, args=(size,), name="rank-watch", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started)
        self._check_started()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, in the order of the ranks."""
        return [process.pid for process in self._processes]

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return not self._over

    def begin(self, call: Call, arrays: Sequence[Array] = ()) -> int:
        """Tells all ranks to make a call that rank 0 makes at the same time; its number. Rank 0 says afterwards whether
        it has ``succeeded`` or ``failed``. Raises ``RankError``.
        """
        with self._changed:
            self._check()
            number = self._accord.begin()
        self._send(Message(call, number, arrays))
        return number

    def ask(self, call: Call, arrays: Sequence[Array] = ()) -> int:
        """Tells the other ranks to do something that rank 0 is not bound to; its number, for ``answers``. Raises
        ``RankError``.
        """
        with self._changed:
            self._check()
            number = self._accord.begin()
            self._accord.succeed()
            self._asked.add(number)
        self._send(Message(call, number, arrays))
        return number

    def _send(self, message: Message) -> None:
        try:
            for process in self._processes:
                send(process.link, message)
        except OSError:
            self._wait_for_loss()

    def succeeded(self) -> None:
        """The call has succeeded here."""
        with self._changed:
            self._accord.succeed()

    def failed(self, collectives: int, error: Exception) -> None:
        """The call has failed here, after so many collectives. Returns where it has failed on all ranks alike, and
        raises ``RankError`` where not.
        """
        with self._changed:
            self._accord.fail(collectives, describe(error))
            self._wake_up()
            settled = self._changed.wait_for(lambda: self._over or self._accord.is_settled, SECONDS_TO_NOTICE)
            self._check()
        if not settled:
            raise RankError("Not all ranks have failed in the same step.")

    def answers(self, number: int) -> list[Any]:
        """What the ranks answered to that call, in their order. Raises ``ModelError`` with the sentence of one that
        could not do it or is lost.
        """
        wanted = [(number, process.rank) for process in self._processes]
        with self._changed:
            self._changed.wait_for(lambda: self._over or all(key in self._answers for key in wanted))
            if self._over:
                raise ModelError(self._lost or ENDED)
            answers = [self._answers.pop(key) for key in wanted]
        for process, answer in zip(self._processes, answers, strict=True):
            if isinstance(answer, Failure):
                raise ModelError(_sentence(process.rank, answer))
        return answers

    def close(self) -> None:
        """Ends all processes. Nothing can be called any more."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake_up()
        self._thread.join()

    def _check_started(self) -> None:
        if self._error is not None:
            self.close()
            raise ModelError(f"The processes of the other ranks cannot be started: {self._error.strerror}.")

    @property
    def _over(self) -> bool:
        return self._lost is not None or self._closing

    def _check(self) -> None:
        if self._over:
            raise RankError(self._lost or ENDED)

    def _wait_for_loss(self) -> None:
        """Raises what the listening thread finds out about a rank that cannot be spoken to."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, SECONDS_TO_NOTICE)
            self._check()
        raise RankError("A rank does not listen any more.")

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is closed already
            self._wake.send(b"\0")

    # On the listening thread

    def _listen(self, size: int) -> None:
        try:
            self._start(size)
            self._watch()
        except Exception as error:  # noqa: BLE001 - whoever cannot listen does not notice a loss
            self._lose(f"Rank 0 cannot listen to the others any more: {describe(error)}.")
        finally:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.hang_up()
        deadline = time.monotonic() + SECONDS_TO_END
        for process in self._processes:
            process.end(deadline)
        self._wake.close()
        self._woken.close()

    def _start(self, size: int) -> None:
        try:
            self._processes.extend(RankProcess(rank) for rank in range(1, size))
        except OSError as error:
            self._error = error
        with self._changed:
            self._started = True
            self._changed.notify_all()

    def _watch(self) -> None:
        heard = {process.link.fileno(): process for process in self._processes}
        poll = select.poll()
        woken = self._woken.fileno()
        for descriptor in (*heard, woken):
            poll.register(descriptor, select.POLLIN)
        since: float | None = None
        while not self._closing:
            for descriptor, _ in poll.poll(None if since is None else 100):
                if descriptor == woken:
                    self._woken.recv(4096)
                else:
                    self._hear(heard[descriptor])
            if self._lost is not None:  # there is nothing more to hear
                poll = select.poll()
                poll.register(woken, select.POLLIN)
            since = self._judge(since)

    def _hear(self, process: RankProcess) -> None:
        try:
            message = receive(process.link)
            if message is None:
                self._lose(process.epitaph())
            else:
                self._take(process.rank, message)
        except (OSError, WireError):
            self._lose(process.epitaph())

    def _take(self, rank: int, message: Message) -> None:
        value = from_json(message.arrays[0])
        with self._changed:
            if message.kind == Report.FAILED:
                value = Failure(message.number, **value)
            if message.kind == Report.DONE or message.number in self._asked:
                self._answers[message.number, rank] = value
            else:
                self._accord.report(rank, value)
            self._changed.notify_all()

    def _judge(self, since: float | None) -> float | None:
        """Ends everything where the ranks have parted; since when it is in doubt whether they have."""
        with self._changed:
            certain, doubt = self._accord.disagreement, self._accord.doubt
        if self._over or not (certain or doubt):
            return None
        since = since or time.monotonic()
        if certain or time.monotonic() - since > SECONDS_TO_AGREE:
            self._lose(certain or doubt or "")
        return since

    def _lose(self, sentence: str) -> None:
        with self._changed:
            if self._lost is not None or self._closing:
                return
            self._lost = sentence
        for process in self._processes:
            process.kill()
        with self._changed:
            self._changed.notify_all()
        self._on_lost(sentence)


def _sentence(rank: int, failure: Failure) -> str:
    return failure.text if failure.user_error else f"Rank {rank} cannot be used: {failure.text}."


def describe(error: BaseException) -> str:
    """An error on one short line, without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
