"""An attempt of a request at one engine: ``Output``, what comes of it; ``StreamEnd``, the ways in which it ends; and
``AttemptFailed``, raised where another engine is to go on.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs

from quire_router.core.generation import Delta


class StreamEnd(Enum):
    """The ways in which an ``OutputStream`` ends. What the runner makes of them is the table "How an attempt ends" in
    docs/architecture.md.
    """

    COMPLETED = auto()
    """The engine has ended the last choice."""
    STOPPED = auto()
    """A stop string, which the engine does not see, has ended the last choice."""
    ABORTED = auto()
    """The request was cancelled: every open choice ends with ``FinishReason.ABORT``."""
    CLOSED = auto()
    """The reader has left, usually because its client has."""
    REJECTED = auto()
    """The engine has ended the request with an error, which the reader gets after the tokens before it."""
    FAILED = auto()
    """This router ends the request with an error, which the reader gets at once: its time is over, the router shuts
    down or has lost the lease, the reader is too slow, the engine sent what cannot be.
    """
    REFUSED = auto()
    """The engine did not accept the request (``EngineFull``)."""
    LOST = auto()
    """The engine, or the session with it, is gone, or it has given up the request (``EngineLost``)."""
    WITHDRAWN = auto()
    """As LOST, from an engine that may still run the request or some of its choices."""

    @property
    def cancels(self) -> bool:
        """Whether the engine may still run the request, and gets a Cancel."""
        return self in (StreamEnd.STOPPED, StreamEnd.ABORTED, StreamEnd.CLOSED, StreamEnd.FAILED, StreamEnd.WITHDRAWN)

    @property
    def drops_unread(self) -> bool:
        """Whether the reader gets nothing more of what came before."""
        return self in (StreamEnd.CLOSED, StreamEnd.FAILED)


class AttemptFailed(Exception):  # noqa: N818 - an event of an engine, not an error of the request
    """One engine has not ended the request, and another can run it, from the tokens delivered so far. ``kind`` is the
    failure as metrics and spans label it.
    """

    kind: str


class EngineLost(AttemptFailed):
    """The engine cannot go on with the request."""

    kind = "engine_lost"


class EngineDraining(EngineLost):
    """The engine was draining before the request came, and did not accept it."""

    kind = "engine_leaving"


class EngineSilent(EngineLost):
    """The engine said nothing for a while. It may go on, but another one can go on at once."""

    kind = "engine_silent"


class EngineStalled(EngineSilent):
    """None of the server's streams advances, although it answers polls."""

    kind = "engine_stalled"


class DrainExceeded(EngineLost):
    """The engine was draining, and ended before the request had."""

    kind = "drain_exceeded"


class EngineFull(AttemptFailed):
    """The engine accepts no more requests now; it has done nothing for this one."""

    kind = "engine_full"


class RequestUnsupported(EngineFull):
    """The engine cannot run this request, as ``error`` says; one of another kind may."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(error.message)
        self.error = error


class LoRAMissing(EngineFull):
    """The engine does not have the request's adapter any more, or cannot read it, as ``error`` says."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(error.message)
        self.error = error


ATTEMPT_FAILURES = (
    EngineLost.kind,
    EngineSilent.kind,
    EngineStalled.kind,
    EngineDraining.kind,
    DrainExceeded.kind,
    EngineFull.kind,
)
"""The kinds of failure of an attempt, as metrics label them."""


@dataclass(slots=True)
class Output:
    """What an engine sent of one choice: tokens from ``position`` of its output on, its end, or both.

    ``error`` is set with ``FinishReason.ERROR``, which ends the request, whatever ``index`` says. ``cached_tokens`` of
    the prompt were in the engine's prefix cache. ``logprobs`` has one entry for each token if they were asked for.
    ``prompt_logprobs`` are those of the prompt's tokens from ``prompt_position`` on, as the engine sends them in
    parts; a reader gets all of them with its first output. ``score`` is a beam's, with its end. ``stop_token``
    ended the choice, where log-probabilities were asked for. ``pooled`` is what a prompt was pooled to, with its end.
    ``deltas`` were made of
    it before it was queued, if a stop string in them ended its choice: what follows is dropped.
    """

    token_ids: list[int]
    position: int
    finish_reason: FinishReason | None = None
    error: QuireError | None = None
    cached_tokens: int = 0
    index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_position: int = 0
    score: float | None = None
    stop_token: StopToken | None = None
    pooled: bytes = b""
    deltas: list[Delta] | None = None

    def drop(self, count: int) -> None:
        """Leaves out the first tokens: they came before."""
        del self.token_ids[:count], self.logprobs[:count]
        self.position += count

    def extend(self, following: "Output") -> None:
        """Takes in the choice's next output."""
        self.token_ids += following.token_ids
        self.logprobs += following.logprobs
        self.finish_reason, self.score = following.finish_reason, following.score
        self.stop_token, self.pooled = following.stop_token, following.pooled
