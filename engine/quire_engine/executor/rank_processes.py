"""``RankWorkers``: rank 0's handle on all other ranks, on this node and on others. It sends calls to them and receives
replies and failures. When one rank is lost, it kills all of them and reports why.

A watcher thread starts the processes and reads from them, so it notices a lost rank while rank 0 computes, waits in a
collective, or is idle.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any

from quire_engine.core.executor import ExecutorError
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import ModelOutput
from quire_engine.distributed.rank_group import RankStore
from quire_engine.errors import ModelError
from quire_engine.executor.child_process import EXIT_TIMEOUT_SECONDS, ChildProcess
from quire_engine.executor.rpc import (
    MessageError,
    RpcArray,
    RpcMessage,
    RpcMethod,
    RpcReply,
    json_from_array,
    output_from_arrays,
    receive,
    result_from_array,
    send,
    stored_from_arrays,
    stored_to_arrays,
)

if TYPE_CHECKING:
    from quire_engine.executor.node_hub import NodeHub, RemoteRank

# How long after each other ranks may report the same failure. They compute the same at the same time.
DIVERGENCE_GRACE_SECONDS = 3.0
# How much later the end of a rank may be noticed than the failures of the ranks that wait for it.
END_GRACE_SECONDS = 0.3
FAILURE_TIMEOUT_SECONDS = 10.0
RANKS_CLOSED = "The ranks of this model have ended."


class RankError(ExecutorError):
    """A rank is lost, or it failed where other ranks did not."""


class RankWorkers:
    """The processes of ranks 1 to ``size`` - 1 on this node, and all ranks of the other nodes of ``hub``. The
    constructor waits for those nodes to join. Calls must come from one thread, one at a time. ``store`` gets the values
    that the ranks set, and sends them those of others.

    ``on_lost`` is called once, with the reason, when a rank is lost, but never after ``close``. ``on_transfer`` is
    called with each rank's result of a disk transfer. Both run on the watcher thread. ``failures`` decides which
    failures end the engine. Raises ``ModelError``.
    """

    def __init__(
        self,
        size: int,
        failures: "RankFailureTracker",
        store: RankStore,
        on_lost: Callable[[str], None],
        hub: "NodeHub | None" = None,
    ) -> None:
        self._store = store
        self._on_lost = on_lost
        self.on_transfer: Callable[[TransferResult], object] | None = None
        self._failures = failures
        self._changed = Condition()
        self._replies: dict[tuple[int, int], Any] = {}
        self._outputs: deque[RpcMessage] = deque()
        self._ended: str | None = None  # why no call can be made any more
        self._sending = Lock()
        self._wake = socket.socketpair()
        self._processes: list[RankProcess | RemoteRank] = []
        started = Future[None]()
        self._thread = Thread(target=self._run_watcher, args=(size, hub, started), name="rank-watch", daemon=True)
        self._thread.start()
        try:
            started.result()
        except Exception:
            self._thread.join()
            raise

    @property
    def places(self) -> list[str]:
        """Where each of the other ranks runs, in rank order, for the log."""
        return [process.place for process in self._processes]

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made."""
        return self._ended is None

    def begin_call(self, method: RpcMethod, arrays: Sequence[RpcArray] = ()) -> int:
        """Sends a call that rank 0 makes too. Returns its number. Rank 0 then reports its own outcome with
        ``call_succeeded`` or ``call_failed``. Raises ``RankError``.
        """
        with self._changed:
            self._check_usable()
            number = self._failures.begin_call()
        self._send(RpcMessage(method, number, arrays))
        return number

    def request(self, method: RpcMethod, arrays: Sequence[RpcArray] = ()) -> int:
        """Sends a call that only the other ranks make. Returns its number, for ``wait_for_replies``. Raises
        ``RankError``.
        """
        with self._changed:
            self._check_usable()
            number = self._failures.begin_request()
        self._send(RpcMessage(method, number, arrays))
        return number

    def send(self, method: RpcMethod, arrays: Sequence[RpcArray]) -> None:
        """Sends another message of the current call. Raises ``RankError``."""
        self._send(RpcMessage(method, 0, arrays))

    def wait_for_output(self) -> ModelOutput:
        """Waits for the output of the oldest step whose output has not been taken. Raises ``RankError``, and
        ``RuntimeError`` if that step has no output.

        While it is open whether the ranks of the last stage are in step, an output may be of what two steps have mixed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended is not None or (self._outputs and not self._failures.logits_failures)
            )
            self._check_usable()
            message = self._outputs.popleft()
        if message.code == RpcReply.OUTPUT:
            return output_from_arrays(message.arrays)
        raise RuntimeError(json_from_array(message.arrays[0])["reason"])

    def call_succeeded(self) -> None:
        """Records that the current call succeeded on rank 0."""
        with self._changed:
            self._failures.record_success()

    def call_failed(self, collectives: int, error: Exception) -> None:
        """Records that the current call failed on rank 0 after it had started ``collectives`` collectives. Returns once
        the call has failed on all ranks alike. Raises ``RankError`` if it has not.
        """
        with self._changed:
            self._failures.record_failure(collectives, describe_error(error))
            self._wake_up()
            settled = self._changed.wait_for(
                lambda: self._ended is not None or self._failures.all_failed_alike, FAILURE_TIMEOUT_SECONDS
            )
            self._check_usable()
        if not settled:
            raise RankError("Not all ranks have failed in the same step.")

    def wait_for_replies(self, number: int) -> list[Any]:
        """Waits for the replies to call ``number``. Returns them in rank order. Raises ``ModelError`` with the reason
        of a rank that failed or is lost.
        """
        wanted = [(number, process.rank) for process in self._processes]
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or all(key in self._replies for key in wanted))
            if self._ended is not None:
                raise ModelError(self._ended)
            answers = [self._replies.pop(key) for key in wanted]
        for process, answer in zip(self._processes, answers, strict=True):
            if isinstance(answer, RankFailure):
                raise ModelError(_rank_failure_message(process.rank, answer))
        return answers

    def close(self) -> None:
        """Ends all processes. No call can be made afterwards."""
        with self._changed:
            self._ended = self._ended or RANKS_CLOSED
            self._changed.notify_all()
            self._wake_up()
        self._thread.join()

    def _send(self, message: RpcMessage) -> None:
        try:
            for process in self._processes:
                self._send_to(process, message)
        except OSError:
            self._wait_for_loss()

    def _send_to(self, process: "RankProcess | RemoteRank", message: RpcMessage) -> None:
        with self._sending:
            send(process.link, message)

    def _send_stored(self, process: "RankProcess | RemoteRank", key: str, value: bytes) -> None:
        with suppress(OSError):  # the rank is lost, which the watcher reports
            self._send_to(process, RpcMessage(RpcMethod.STORE, 0, stored_to_arrays(key, value)))

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise RankError(self._ended)

    def _wait_for_loss(self) -> None:
        """Handles a broken link: waits until the watcher thread knows the reason, and raises ``RankError`` with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, FAILURE_TIMEOUT_SECONDS)
            self._check_usable()
        raise RankError("A rank does not listen any more.")

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is closed already
            self._wake[1].send(b"\0")

    # On the watcher thread

    def _run_watcher(self, size: int, hub: "NodeHub | None", started: "Future[None]") -> None:
        try:
            self._start_processes(size, hub)
            started.set_result(None)
            self._watch()
        except Exception as error:  # noqa: BLE001 - without the watcher a loss goes unnoticed
            if started.done():
                self._mark_lost(f"Rank 0 cannot listen to the others any more: {describe_error(error)}.")
            else:
                started.set_exception(error)
        finally:
            self._end_processes()

    def _start_processes(self, size: int, hub: "NodeHub | None") -> None:
        """Starts the processes and waits for the other nodes. Raises ``ModelError``."""
        try:
            self._processes.extend(RankProcess(rank) for rank in range(1, size))
        except OSError as error:
            raise ModelError(f"The processes of the other ranks cannot be started: {error.strerror}.") from error
        if hub is not None:
            self._processes.extend(hub.wait_for_ranks())
        for process in self._processes:
            self._store.attach(process, partial(self._send_stored, process))

    def _end_processes(self) -> None:
        for process in self._processes:
            process.close_link()
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        for process in self._processes:
            process.wait_or_kill(deadline)
        for end in self._wake:
            end.close()

    def _watch(self) -> None:
        """Handles what the ranks send until one is lost or ``close`` is called."""
        by_descriptor = {process.link.fileno(): process for process in self._processes}
        poll = select.poll()
        wake, _ = self._wake
        for descriptor in (*by_descriptor, wake.fileno()):
            poll.register(descriptor, select.POLLIN)
        suspected_since: float | None = None
        while self._ended is None:
            for descriptor, _ in poll.poll(None if suspected_since is None else 100):
                if descriptor == wake.fileno():
                    wake.recv(4096)
                else:
                    self._on_readable(by_descriptor[descriptor])
            suspected_since = self._check_divergence(suspected_since)

    def _on_readable(self, process: "RankProcess | RemoteRank") -> None:
        try:
            message = receive(process.link)
            if message is None:
                self._mark_lost(process.exit_reason())
            else:
                self._on_message(process, message)
        except (OSError, MessageError):
            self._mark_lost(process.exit_reason())

    def _on_message(self, process: "RankProcess | RemoteRank", message: RpcMessage) -> None:
        if message.code == RpcReply.STORED:
            self._store.put(*stored_from_arrays(message.arrays), process)
            return
        if message.code == RpcReply.TRANSFERRED:
            if self.on_transfer is not None:
                self.on_transfer(result_from_array(message.arrays[0]))
            return
        with self._changed:
            if message.code in (RpcReply.OUTPUT, RpcReply.NO_OUTPUT, RpcReply.NO_LOGITS):
                self._on_output(process.rank, message)
            else:
                self._on_reply(process.rank, message)
            self._changed.notify_all()

    def _on_output(self, rank: int, message: RpcMessage) -> None:
        if message.code == RpcReply.NO_LOGITS:
            failure = RankFailure(message.call_number, **json_from_array(message.arrays[0]))
            self._failures.record_logits_failure(rank, failure)
        if rank == self._failures.last_stage.start:
            self._outputs.append(message)

    def _on_reply(self, rank: int, message: RpcMessage) -> None:
        value, number = json_from_array(message.arrays[0]), message.call_number
        if message.code == RpcReply.FAILED:
            value = RankFailure(number, **value)
        if message.code == RpcReply.DONE or self._failures.is_request(number):
            self._replies[number, rank] = value
        else:
            self._failures.record_remote_failure(rank, value)

    def _check_divergence(self, suspected_since: float | None) -> float | None:
        """Marks the ranks lost if their outcomes differ. Returns the time since which that has been suspected, or None.

        Waits briefly even if the difference is certain, because the end of a rank would be the better reason. Waits
        longer if it is only suspected.
        """
        with self._changed:
            certain, suspected = self._failures.divergence, self._failures.suspected_failure
        if not (certain or suspected):
            return None
        suspected_since = suspected_since or time.monotonic()
        if time.monotonic() - suspected_since > (END_GRACE_SECONDS if certain else DIVERGENCE_GRACE_SECONDS):
            self._mark_lost(certain or suspected or "")
        return suspected_since

    def _mark_lost(self, sentence: str) -> None:
        with self._changed:
            if self._ended is not None:
                return
            self._ended = sentence
        for process in self._processes:
            process.kill()
        self._store.fail(RankError(sentence))
        with self._changed:
            self._changed.notify_all()
        self._on_lost(sentence)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A failure of a rank in call ``call_number``, after it had started ``collectives`` collectives. With
    ``user_error``, ``reason`` is a complete sentence for the user who chose the settings.
    """

    call_number: int
    collectives: int
    reason: str
    user_error: bool = False


class RankFailureTracker:
    """Decides whether all ranks ended the current call alike. ``num_other_ranks`` ranks report to rank 0. The ranks of
    a pipeline's ``last_stage`` compute logits after the call. Not thread-safe.

    All ranks make the same calls. A call may fail on all ranks in the same place: every rank rejects a wrong batch
    before it exchanges anything, and is ready for the next call. After any other failure one rank waits for what
    another will never send, and the engine must end. Later pipeline stages make a call later, so a failure may belong
    to an earlier call.

    Logits may fail in the same place on all ranks of the last stage. The step alone has failed then.
    """

    def __init__(self, num_other_ranks: int, last_stage: range = range(0)) -> None:
        self.last_stage = last_stage
        self.logits_failures: dict[int, dict[int, RankFailure]] = {}  # of calls in which some ranks have failed so far
        self._num_other_ranks = num_other_ranks
        self._call_number = 0
        self._requests: set[int] = set()
        self._own_failure: RankFailure | None = None
        self._succeeded = True
        self._reported_failures: dict[int, RankFailure] = {}

    def begin_call(self) -> int:
        """Begins the next call. Returns its number."""
        if self._own_failure is not None:  # all ranks failed alike; a failure of one rank alone is kept
            self._reported_failures.clear()
        self._call_number += 1
        self._own_failure, self._succeeded = None, False
        return self._call_number

    def begin_request(self) -> int:
        """Begins a call that only the other ranks make: a failure is its reply. Returns its number."""
        number = self.begin_call()
        self.record_success()
        self._requests.add(number)
        return number

    def is_request(self, call_number: int) -> bool:
        """Whether only the other ranks made this call."""
        return call_number in self._requests

    def record_success(self) -> None:
        """Records that the current call succeeded on rank 0."""
        self._succeeded = True

    def record_failure(self, collectives: int, reason: str) -> None:
        """Records that the current call failed on rank 0."""
        self._own_failure = RankFailure(self._call_number, collectives, reason)

    def record_remote_failure(self, rank: int, failure: RankFailure) -> None:
        """Records that a call failed on another rank."""
        self._reported_failures[rank] = failure

    def record_logits_failure(self, rank: int, failure: RankFailure) -> None:
        """Records that the logits of a call failed on a rank of the last stage."""
        failed = self.logits_failures.setdefault(failure.call_number, {})
        failed[rank] = failure
        if len(failed) == len(self.last_stage) and _difference(failed) is None:
            del self.logits_failures[failure.call_number]

    @property
    def all_failed_alike(self) -> bool:
        """Whether all ranks failed in the same place."""
        return (
            self._own_failure is not None
            and len(self._reported_failures) == self._num_other_ranks
            and self.divergence is None
        )

    @property
    def divergence(self) -> str | None:
        """A sentence about a failure after which the ranks are certainly out of step, or None."""
        for rank, failure in sorted(self._reported_failures.items()):
            if failure.user_error and self._own_failure is None:
                return failure.reason
            if self._succeeded or failure.call_number < self._call_number:
                return f"Rank {rank} failed in a step that rank 0 computed: {failure.reason}."
            if self._own_failure is not None and failure.collectives != self._own_failure.collectives:
                return f"Rank {rank} failed in another place than rank 0: {failure.reason}."
        return next(filter(None, map(_difference, self.logits_failures.values())), None)

    @property
    def suspected_failure(self) -> str | None:
        """A sentence about a failure that leaves the ranks out of step unless the others report it too. None if no rank
        has failed or all failed alike.
        """
        failed = {rank: each for call in self.logits_failures.values() for rank, each in call.items()}
        if not self.all_failed_alike:
            failed |= self._reported_failures
            if self._own_failure is not None:
                failed[0] = self._own_failure
        if not failed:
            return None
        rank = min(failed)
        return f"Rank {rank} failed in a step in which other ranks did not: {failed[rank].reason}."


def _difference(failures: Mapping[int, RankFailure]) -> str | None:
    """Returns a sentence about two ranks that failed in different places; None if all failed in the same."""
    first = min(failures)
    others = (rank for rank in sorted(failures) if failures[rank].collectives != failures[first].collectives)
    rank = next(others, None)
    return None if rank is None else f"Rank {rank} failed in another place than rank {first}: {failures[rank].reason}."


class RankProcess(ChildProcess):
    """The process of ``rank``. See ``ChildProcess``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__("quire_engine.executor.rank_main", str(rank))

    @property
    def place(self) -> str:
        """Where the process runs, for the log."""
        return f"process {self.pid}"

    def exit_reason(self) -> str:
        """Returns how the process ended, as a sentence. Call it after the link has closed."""
        return f"Rank {self.rank} (process {self.pid}) {self.exit_status()}, and the engine cannot go on without it."


def _rank_failure_message(rank: int, failure: RankFailure) -> str:
    return failure.reason if failure.user_error else f"Rank {rank} cannot be used: {failure.reason}."


def describe_error(error: BaseException) -> str:
    """Returns ``error`` as one short line without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
