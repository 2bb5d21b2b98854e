"""``RankWorkers``: rank 0's handle on the processes of all other ranks. It sends them calls, receives replies and
failures, and when one rank is lost it kills all of them and reports why.

A watcher thread starts the processes and reads from them, so that a loss is noticed while rank 0 computes, waits in a
collective, or is idle.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.executor.rpc import (
    MessageError,
    RpcArray,
    RpcMessage,
    RpcMethod,
    RpcReply,
    json_from_array,
    receive,
    send,
)

# One other rank's process, as rank 0 sees it: started, spoken to, and ended. Knows no calls.


EXIT_TIMEOUT_SECONDS = 2.0
# What runs a rank's process; its number, that of its end of the link, and that of rank 0's process follow.
COMMAND = (sys.executable, "-P", "-m", "quire_engine.executor.rank_main")


class RankProcess:
    """The process of ``rank``. Start it on a thread that lives as long as it should: the system ends it with that."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link, theirs = socket.socketpair()
        with theirs:
            # A group of its own: Ctrl-C is for rank 0, which ends the others when it has finished its work.
            self._popen = subprocess.Popen(  # noqa: S603 - our own module
                [*COMMAND, str(rank), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._popen.pid

    def exit_reason(self) -> str:
        """How it ended, as a sentence; to be asked for once its link was closed."""
        return f"Rank {self.rank} (process {self.pid}) {self._exit_status()}, and the engine cannot go on without it."

    def kill(self) -> None:
        """Ends it at once, even where it is stopped."""
        with suppress(ProcessLookupError):
            self._popen.kill()

    def close_link(self) -> None:
        """Ends the link, at which the process ends."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        """Waits for its end, which is forced at ``deadline``, by the monotonic clock. It is gone afterwards."""
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()
        self.link.close()

    def _exit_status(self) -> str:
        try:
            code = self._popen.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# Whether all ranks come to the same end of a call. Knows neither what a call is nor how it is made.
#
# All ranks make the same calls, each of which fails on all of them in the same place or on none: a batch that is wrong
# is refused by every rank before anything is exchanged, and the next call finds all of them ready. Whatever else
# happens, one rank waits for what another will never send, and the engine has to end.


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's failure in the call ``number``, after it had begun so many ``collectives``; ``text`` says why. It is
    ``user_error`` where the text is a whole sentence for whoever chose the settings.
    """

    call_number: int
    collectives: int
    reason: str
    user_error: bool = False


class RankFailureTracker:
    """Rank 0's latest call, and what the ``others`` (their number) reported. Not thread-safe."""

    def __init__(self, others: int) -> None:
        self._num_other_ranks = others
        self._call_number = 0
        self._own_failure: RankFailure | None = None
        self._succeeded = True
        self._reported_failures: dict[int, RankFailure] = {}

    def begin_call(self) -> int:
        """Begins the next call; its number."""
        self._call_number += 1
        self._own_failure, self._succeeded = None, False
        self._reported_failures.clear()
        return self._call_number

    def record_success(self) -> None:
        """The call has succeeded on rank 0."""
        self._succeeded = True

    def record_failure(self, collectives: int, text: str) -> None:
        """The call has failed on rank 0."""
        self._own_failure = RankFailure(self._call_number, collectives, text)

    def record_remote_failure(self, rank: int, failure: RankFailure) -> None:
        """The call has failed on another rank."""
        self._reported_failures[rank] = failure

    @property
    def all_failed_alike(self) -> bool:
        """Whether all ranks have failed in the same place."""
        return (
            self._own_failure is not None
            and len(self._reported_failures) == self._num_other_ranks
            and self.divergence is None
        )

    @property
    def divergence(self) -> str | None:
        """What is certain to leave the ranks in different places, as a sentence."""
        for rank, failure in sorted(self._reported_failures.items()):
            if failure.user_error and self._own_failure is None:
                return failure.reason
            if self._succeeded or failure.call_number < self._call_number:
                return f"Rank {rank} failed in a step that rank 0 computed: {failure.reason}."
            if self._own_failure is not None and failure.collectives != self._own_failure.collectives:
                return f"Rank {rank} failed in another place than rank 0: {failure.reason}."
        return None

    @property
    def suspected_failure(self) -> str | None:
        """What is wrong, as a sentence, unless the ranks that have not failed yet are about to."""
        if self.all_failed_alike:
            return None
        failed = {rank: each.reason for rank, each in self._reported_failures.items()}
        if self._own_failure is not None:
            failed[0] = self._own_failure.reason
        if not failed:
            return None
        rank = min(failed)
        return f"Rank {rank} failed in a step in which other ranks did not: {failed[rank]}."


# How far ranks may be apart in noticing the same failure. They compute the same at the same time.
DIVERGENCE_GRACE_SECONDS = 3.0
FAILURE_TIMEOUT_SECONDS = 10.0
RANKS_CLOSED = "The ranks of this model have ended."


class RankError(ExecutorError):
    """A rank is lost, or has failed alone."""


class RankWorkers:
    """The ranks 1 to ``size`` - 1. Calls are made by one thread, one after the other; a loss may be told on another.

    ``on_lost`` is called once with the sentence, on the listening thread, and never after ``close``.
    """

    def __init__(self, size: int, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._failures = RankFailureTracker(size - 1)
        self._changed = Condition()
        self._requested: set[int] = set()
        self._replies: dict[tuple[int, int], Any] = {}
        self._lost_reason: str | None = None
        self._closing = False
        self._started = False
        self._start_error: OSError | None = None
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._processes: list[RankProcess] = []
        self._thread = Thread(target=self._run_watcher, args=(size,), name="rank-watch", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started)
        self._check_started()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, in the order of the ranks."""
        return [process.pid for process in self._processes]

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made."""
        return not self._is_over

    def begin_call(self, method: RpcMethod, arrays: Sequence[RpcArray] = ()) -> int:
        """Tells all ranks to make a call that rank 0 makes at the same time; its number. Rank 0 says afterwards whether
        it has ``succeeded`` or ``failed``. Raises ``RankError``.
        """
        with self._changed:
            self._check_usable()
            number = self._failures.begin_call()
        self._send(RpcMessage(method, number, arrays))
        return number

    def request(self, method: RpcMethod, arrays: Sequence[RpcArray] = ()) -> int:
        """Sends a call that only the other ranks make; returns its number, for ``wait_for_replies``. Raises
        ``RankError``.
        """
        with self._changed:
            self._check_usable()
            number = self._failures.begin_call()
            self._failures.record_success()
            self._requested.add(number)
        self._send(RpcMessage(method, number, arrays))
        return number

    def _send(self, message: RpcMessage) -> None:
        try:
            for process in self._processes:
                send(process.link, message)
        except OSError:
            self._wait_for_loss()

    def call_succeeded(self) -> None:
        """The call has succeeded here."""
        with self._changed:
            self._failures.record_success()

    def call_failed(self, collectives: int, error: Exception) -> None:
        """The call has failed here, after so many collectives. Returns where it has failed on all ranks alike, and
        raises ``RankError`` where not.
        """
        with self._changed:
            self._failures.record_failure(collectives, describe_error(error))
            self._wake_up()
            settled = self._changed.wait_for(
                lambda: self._is_over or self._failures.all_failed_alike, FAILURE_TIMEOUT_SECONDS
            )
            self._check_usable()
        if not settled:
            raise RankError("Not all ranks have failed in the same step.")

    def wait_for_replies(self, number: int) -> list[Any]:
        """What the ranks answered to that call, in their order. Raises ``ModelError`` with the sentence of one that
        could not do it or is lost.
        """
        wanted = [(number, process.rank) for process in self._processes]
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or all(key in self._replies for key in wanted))
            if self._is_over:
                raise ModelError(self._lost_reason or RANKS_CLOSED)
            answers = [self._replies.pop(key) for key in wanted]
        for process, answer in zip(self._processes, answers, strict=True):
            if isinstance(answer, RankFailure):
                raise ModelError(_rank_failure_message(process.rank, answer))
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
        if self._start_error is not None:
            self.close()
            raise ModelError(f"The processes of the other ranks cannot be started: {self._start_error.strerror}.")

    @property
    def _is_over(self) -> bool:
        return self._lost_reason is not None or self._closing

    def _check_usable(self) -> None:
        if self._is_over:
            raise RankError(self._lost_reason or RANKS_CLOSED)

    def _wait_for_loss(self) -> None:
        """Raises what the listening thread finds out about a rank that cannot be spoken to."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, FAILURE_TIMEOUT_SECONDS)
            self._check_usable()
        raise RankError("A rank does not listen any more.")

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is closed already
            self._wake_writer.send(b"\0")

    # On the listening thread

    def _run_watcher(self, size: int) -> None:
        try:
            self._start_processes(size)
            self._watch()
        except Exception as error:  # noqa: BLE001 - whoever cannot listen does not notice a loss
            self._mark_lost(f"Rank 0 cannot listen to the others any more: {describe_error(error)}.")
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        for process in self._processes:
            process.close_link()
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        for process in self._processes:
            process.wait_or_kill(deadline)
        self._wake_writer.close()
        self._wake_reader.close()

    def _start_processes(self, size: int) -> None:
        try:
            self._processes.extend(RankProcess(rank) for rank in range(1, size))
        except OSError as error:
            self._start_error = error
        with self._changed:
            self._started = True
            self._changed.notify_all()

    def _watch(self) -> None:
        by_descriptor = {process.link.fileno(): process for process in self._processes}
        poll = select.poll()
        wake = self._wake_reader.fileno()
        for descriptor in (*by_descriptor, wake):
            poll.register(descriptor, select.POLLIN)
        suspected_since: float | None = None
        while not self._closing:
            for descriptor, _ in poll.poll(None if suspected_since is None else 100):
                if descriptor == wake:
                    self._wake_reader.recv(4096)
                else:
                    self._on_readable(by_descriptor[descriptor])
            if self._lost_reason is not None:  # there is nothing more to hear
                poll = select.poll()
                poll.register(wake, select.POLLIN)
            suspected_since = self._check_divergence(suspected_since)

    def _on_readable(self, process: RankProcess) -> None:
        try:
            message = receive(process.link)
            if message is None:
                self._mark_lost(process.exit_reason())
            else:
                self._on_message(process.rank, message)
        except (OSError, MessageError):
            self._mark_lost(process.exit_reason())

    def _on_message(self, rank: int, message: RpcMessage) -> None:
        value = json_from_array(message.arrays[0])
        with self._changed:
            if message.code == RpcReply.FAILED:
                value = RankFailure(message.call_number, **value)
            if message.code == RpcReply.DONE or message.call_number in self._requested:
                self._replies[message.call_number, rank] = value
            else:
                self._failures.record_remote_failure(rank, value)
            self._changed.notify_all()

    def _check_divergence(self, suspected_since: float | None) -> float | None:
        """Ends everything where the ranks have parted; since when it is in doubt whether they have."""
        with self._changed:
            certain, doubt = self._failures.divergence, self._failures.suspected_failure
        if self._is_over or not (certain or doubt):
            return None
        suspected_since = suspected_since or time.monotonic()
        if certain or time.monotonic() - suspected_since > DIVERGENCE_GRACE_SECONDS:
            self._mark_lost(certain or doubt or "")
        return suspected_since

    def _mark_lost(self, sentence: str) -> None:
        with self._changed:
            if self._lost_reason is not None or self._closing:
                return
            self._lost_reason = sentence
        for process in self._processes:
            process.kill()
        with self._changed:
            self._changed.notify_all()
        self._on_lost(sentence)


def _rank_failure_message(rank: int, failure: RankFailure) -> str:
    return failure.reason if failure.user_error else f"Rank {rank} cannot be used: {failure.reason}."


def describe_error(error: BaseException) -> str:
    """An error on one short line, without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
