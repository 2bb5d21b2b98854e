"""``OutputStream``: the queue of one request's outputs between the session with an engine, which pushes them, and the
task that runs the request, which iterates over them. What they are validated against is ``ExpectedOutput``.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from quire.v1 import engine_pb2, types_pb2
from quire_proto.errors import QuireError, internal
from quire_proto.pooling import FLOAT_BYTES, MAX_DIMENSIONS
from quire_proto.sampling import FinishReason, TokenLogprobs

from quire_router.core.errors import output_unread
from quire_router.engines.attempt import AttemptFailed, EngineFull, EngineLost, Output, StreamEnd

log = logging.getLogger(__name__)


class PromptLogprobsBuffer:
    """Collects the log-probabilities of ``expected`` tokens of one prompt, which an engine sends in parts, from the
    second token on: the first has none.
    """

    __slots__ = ("_gathered", "_next", "missing")

    def __init__(self, expected: int) -> None:
        self.missing = expected
        self._next = 1
        self._gathered: list[TokenLogprobs] = []

    def add(self, position: int, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Takes those of the prompt's tokens from ``position`` on, without what came before or was not expected. False
        where some before them have not come.
        """
        if position > self._next:
            return False
        new = logprobs[self._next - position :][: self.missing]
        self._gathered += new
        self._next += len(new)
        self.missing -= len(new)
        return True

    def take(self) -> list[TokenLogprobs]:
        """All of them, once: nothing while some are missing, and nothing afterwards."""
        if self.missing or not self._gathered:
            return []
        taken, self._gathered = self._gathered, []
        return taken


_ANY = 1 << 31


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """What the engine's outputs are validated against: the choices that run and the position of each; each has at most
    ``max_tokens``, each below ``vocabulary``. ``logprobs`` is whether tokens come with log-probabilities, and
    ``prompt_logprobs`` for how many of the prompt's tokens they come: all but the first, or none. A prompt that is
    ``pooled`` ends with its numbers, or early, and has no tokens.
    """

    positions: dict[int, int]
    max_tokens: int
    logprobs: bool = False
    prompt_logprobs: int = 0
    vocabulary: int = _ANY
    pooled: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether another engine has made a part of it already."""
        return any(self.positions.values())

    @classmethod
    def of(cls, message: engine_pb2.Submit, vocabulary: int = 0) -> Self:
        """What the engine will answer to ``message``; 0 tokens are a vocabulary that is not known."""
        sampling = message.sampling
        return cls(
            positions=positions_of(message),
            max_tokens=0 if message.HasField("pooling") else sampling.max_tokens,
            logprobs=sampling.HasField("logprobs") or sampling.best_of > max(1, sampling.n),
            prompt_logprobs=len(message.prompt_token_ids) - 1 if sampling.HasField("prompt_logprobs") else 0,
            vocabulary=vocabulary or _ANY,
            pooled=message.HasField("pooling"),
        )


def max_sequences(message: engine_pb2.Submit) -> int:
    """How many sequences the engine decodes for the request at once."""
    return message.sampling.beam_width or len(positions_of(message))


def positions_of(message: engine_pb2.Submit) -> dict[int, int]:
    """The choices that are to be run, and how many tokens of each an earlier engine has written."""
    positions = dict.fromkeys(range(_num_choices(message.sampling)), 0)
    positions[0] = len(message.output_token_ids)
    for delivered in message.delivered:
        if delivered.finished:
            positions.pop(delivered.index, None)
        else:
            positions[delivered.index] = len(delivered.token_ids)
    return positions


def _num_choices(sampling: types_pb2.SamplingParams) -> int:
    """Returns how many choices the engine sends: of a beam search only the best, of draws every one."""
    return max(1, sampling.n) if sampling.beam_width else sampling.best_of or max(1, sampling.n)


MAX_POOLED_BYTES = FLOAT_BYTES * MAX_DIMENSIONS


def _is_pooled(pooled: bytes) -> bool:
    """Whether these are the numbers of a prompt that was pooled."""
    return 0 < len(pooled) <= MAX_POOLED_BYTES and len(pooled) % FLOAT_BYTES == 0


OnCancel = Callable[[str, int | None], None]
"""Is called with a request id, and a choice's index or None for all, that the engine is to cancel."""


class _ChoiceQueue:
    """What was not read yet of one choice. ``position`` is that of the next token to come. Nothing more is expected
    once it is ``closed``: it has ended, or was cancelled. The engine is at work on it while it is ``running``.
    """

    __slots__ = ("closed", "position", "running", "unread")

    def __init__(self, position: int) -> None:
        self.position = position
        self.unread: Output | None = None
        self.closed = False
        self.running = True


class OutputStream:
    """The queue of one request, and the async iterator that empties it.

    Outputs of a choice are merged while they are not read, so a slow reader costs ``max_tokens`` tokens a choice at
    most, and never holds up the other requests of its engine. The iterator ends after the output that ends the last
    choice, or the one with an error, and raises ``AttemptFailed`` after the tokens that came before. ``end`` is how the
    stream has ended, None until it has. ``on_cancel`` is called when the request ends before the engine ended it, maybe
    twice, and for each choice that is cancelled alone. ``on_first`` is called once, with the first tokens of all or the
    first end: the prompt has been computed. ``handle`` plus a choice's index
    is its name in ``TokenColumns``. ``sink`` is called with each output that comes while the reader waits, and returns
    whether it has processed it; ``token_sink`` likewise with each output that is one token and nothing else, as choice
    and token, where the request asks for nothing else. One that ``stays_when_silent`` does not leave an engine because
    that is silent: it has left others; and before ``stays_until`` (monotonic) it does not leave one that stalls.
    """

    __slots__ = (
        "_cached_tokens",
        "_choices",
        "_delivered",
        "_last",
        "_loop",
        "_on_cancel",
        "_open_choices",
        "_prompt",
        "_ready",
        "_slow_client_timeout",
        "_timer",
        "_unread_since",
        "_waiter",
        "confirmed",
        "end",
        "expected",
        "handle",
        "num_running_choices",
        "on_first",
        "request_id",
        "sink",
        "stays_until",
        "stays_when_silent",
        "token_sink",
    )

    def __init__(
        self, request_id: str, expected: ExpectedOutput, *, on_cancel: OnCancel, slow_client_timeout: float
    ) -> None:
        self.request_id = request_id
        self.handle = 0
        self.expected = expected
        self.confirmed = False
        self.end: StreamEnd | None = None
        self.stays_when_silent = False
        self.stays_until = 0.0
        self.num_running_choices = len(expected.positions)
        self.on_first: Callable[[], None] | None = None
        self.sink: Callable[[Output], bool] | None = None
        self.token_sink: Callable[[int, int], bool] | None = None
        self._on_cancel = on_cancel
        self._slow_client_timeout = slow_client_timeout
        self._loop = asyncio.get_running_loop()
        self._choices = {index: _ChoiceQueue(position) for index, position in expected.positions.items()}
        self._open_choices = len(self._choices)
        self._ready: deque[_ChoiceQueue] = deque()
        self._unread_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cached_tokens = 0
        self._prompt = PromptLogprobsBuffer(expected.prompt_logprobs)
        self._last: Output | AttemptFailed | None = None
        self._delivered = False
        self._waiter: asyncio.Future[None] | None = None

    # Called by the session

    def push(self, output: Output) -> None:
        """Takes an output of the engine. Tokens that came before are dropped; missing ones lose the request."""
        if self.end is not None:
            return
        if not self.confirmed:
            self.confirmed, self._cached_tokens = True, output.cached_tokens
        if output.error is not None:
            self._finish(StreamEnd.REJECTED, output)
            return
        if self._prompt.missing:
            self._add_prompt_logprobs(output)
        choice = self._choices.get(output.index)
        if choice is None or choice.closed or not self._validate(choice, output):
            return
        if output.token_ids or output.finish_reason is not None:
            choice.position += len(output.token_ids)
            if self.on_first is not None:
                self._notify_first()
            if self.sink is None or not self._try_sink(self.sink, output):
                self._queue(choice, output)

    def push_token(self, index: int, token_id: int, position: int) -> None:
        """As ``push`` of an output that is one token. Most tokens are what was expected, behind an earlier one, and
        come while the reader waits: these go to ``token_sink``, without an object being made.
        """
        waiter, choice, expected = self._waiter, self._choices.get(index), self.expected
        if (
            waiter is not None
            and not waiter.done()  # so nothing is unread, and the stream has not ended
            and self.token_sink is not None
            and self.confirmed
            and self.on_first is None
            and choice is not None
            and not choice.closed
            and position == choice.position < expected.max_tokens
            and 0 <= token_id < expected.vocabulary
        ):
            try:
                if self.token_sink(index, token_id):
                    choice.position = position + 1
                    return
            except Exception:
                log.exception("request %s failed", self.request_id)
                self.fail(internal())
                return
        self.push(Output([token_id], position, index=index))

    def on_engine_end(self, index: int, reason: FinishReason) -> None:
        """Records that the engine has ended a choice, or with ERROR all of them; ``running`` are left."""
        choice = self._choices.get(index)
        if reason is FinishReason.ERROR:
            self.num_running_choices = 0
        elif choice is not None and choice.running:
            choice.running = False
            self.num_running_choices -= 1

    def is_open(self, index: int) -> bool:
        """Whether more of a choice is expected."""
        choice = self._choices.get(index)
        return choice is not None and not choice.closed

    @property
    def cancelled(self) -> list[int]:
        """The choices that were cancelled, and that the engine has not ended."""
        return [index for index, choice in self._choices.items() if choice.closed and choice.running]

    def lose(self, loss: EngineLost) -> None:
        """Ends the attempt: the engine does not run the request any more."""
        self._finish(StreamEnd.LOST, loss)

    def withdraw(self, loss: EngineLost) -> None:
        """Ends the attempt at an engine that may still run the request."""
        self._finish(StreamEnd.WITHDRAWN, loss)

    def refuse(self, refusal: EngineFull) -> None:
        """Ends the attempt: the engine did not accept the request."""
        self._finish(StreamEnd.REFUSED, refusal)

    # Called by the request

    def cancel(self, index: int) -> None:
        """Ends one choice, and drops what was not read of it. The others continue."""
        if self.end is not None or not self.is_open(index):
            return
        choice = self._choices[index]
        if choice.unread is not None:
            self._ready.remove(choice)
            choice.unread = None
        self._close_choice(choice, StreamEnd.STOPPED)
        self._on_cancel(self.request_id, index if self.end is None else None)

    def abort(self) -> None:
        """Ends every choice after what has come so far, with ``FinishReason.ABORT``."""
        self._abort(StreamEnd.ABORTED)

    def _abort(self, end: StreamEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        for index, choice in self._choices.items():
            if not choice.closed:
                self._queue(choice, Output([], choice.position, FinishReason.ABORT, index=index))
        self._on_cancel(self.request_id, None)

    def fail(self, error: QuireError) -> None:
        """Ends the request with an error of this router."""
        self._finish(StreamEnd.FAILED, Output([], 0, FinishReason.ERROR, error))

    def close(self) -> None:
        """Ends the stream for its reader. Cancels the request on the engine, unless it has ended there."""
        self._abort(StreamEnd.CLOSED)
        self._ready.clear()
        self._delivered = True
        self.sink = self.token_sink = None  # the request refers to this stream: the cycle would wait for the collector
        if self.num_running_choices:
            self._on_cancel(self.request_id, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._ready and self.end is None:
            await self._wait_ready()
        if self._ready:
            return self._pop()
        if self._last is None or self._delivered:
            raise StopAsyncIteration
        self._delivered = True
        if isinstance(self._last, Output):
            return self._last
        raise self._last

    def _validate(self, choice: _ChoiceQueue, output: Output) -> bool:
        """Drops what is not new of the output. Ends the request if the output does not follow what came before. Returns
        False if nothing is to be delivered.
        """
        if output.position != choice.position:
            self._align(choice, output)
        if self.expected.logprobs and len(output.logprobs) != len(output.token_ids):
            self.fail(internal())
        if choice.position + len(output.token_ids) > self.expected.max_tokens:
            self.fail(internal())
        if output.token_ids and not (min(output.token_ids) >= 0 and max(output.token_ids) < self.expected.vocabulary):
            self.fail(internal())  # a text would just lack it
        if output.stop_token is not None and not 0 <= output.stop_token.token_id < self.expected.vocabulary:
            self.fail(internal())
        if self.expected.pooled and output.finish_reason is FinishReason.STOP and not _is_pooled(output.pooled):
            self.fail(internal())
        return self.end is None

    def _align(self, choice: _ChoiceQueue, output: Output) -> None:
        if output.position < choice.position:
            output.drop(choice.position - output.position)
        elif output.token_ids:
            self.withdraw(EngineLost(f"tokens before position {output.position} are missing"))

    def _add_prompt_logprobs(self, output: Output) -> None:
        """Collects the prompt's log-probabilities, with whichever choice they come; all must come before any token."""
        follows = not output.prompt_logprobs or self._prompt.add(output.prompt_position, output.prompt_logprobs)
        begins = bool(output.token_ids) or output.finish_reason is not None
        if not follows or (begins and self._prompt.missing):
            self.withdraw(EngineLost("log-probabilities of the prompt are missing"))

    def _try_sink(self, sink: Callable[[Output], bool], output: Output) -> bool:
        """Returns whether the sink has processed it. While the reader waits nothing is unread, so the order is kept."""
        if self._waiter is None or self._waiter.done():
            return False
        try:
            return sink(output)
        except Exception:
            log.exception("request %s failed", self.request_id)
            self.fail(internal())
            return True

    def _queue(self, choice: _ChoiceQueue, output: Output) -> None:
        if choice.unread is not None:
            choice.unread.extend(output)
        else:
            output.cached_tokens = self._cached_tokens
            choice.unread = output
            self._ready.append(choice)
            if len(self._ready) == 1:
                self._unread_since = self._loop.time()
                self._timer = self._timer or self._loop.call_later(self._slow_client_timeout, self._check_reader)
        if output.finish_reason is not None:
            self._close_choice(choice, StreamEnd.COMPLETED)
        self._wake()

    def _notify_first(self) -> None:
        on_first, self.on_first = self.on_first, None
        if on_first is not None:
            on_first()

    def _close_choice(self, choice: _ChoiceQueue, end: StreamEnd) -> None:
        """Nothing more is expected of a choice. If it is the last one, that is the stream's ``end``."""
        choice.closed = True
        self._open_choices -= 1
        if not self._open_choices:
            self.end = self.end or end
            self._stop_timer()

    def _pop(self) -> Output:
        choice = self._ready.popleft()
        output, choice.unread = choice.unread, None
        assert output is not None  # what makes a choice ready
        if self._ready:
            self._unread_since = self._loop.time()
        output.prompt_logprobs = self._prompt.take()
        return output

    def _finish(self, end: StreamEnd, last: Output | AttemptFailed) -> None:
        """Ends the stream, unless it has ended, with ``last`` for its reader."""
        if self.end is not None:
            return
        self.end, self._last = end, last
        if end.drops_unread:
            self._ready.clear()
        self._stop_timer()
        self._wake()
        if end.cancels:
            self._on_cancel(self.request_id, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_reader(self) -> None:
        # One timer a period, not one a token: it is set again for what remains if the reader has read meanwhile.
        self._timer = None
        if not self._ready:
            return
        remaining = self._unread_since + self._slow_client_timeout - self._loop.time()
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check_reader)
        else:
            self.fail(output_unread())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_ready(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
