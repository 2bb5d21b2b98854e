"""A piece of an output on its way from an engine to its reader, and what comes instead where there is none."""

from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason

from quire_router.generation import Delta


class EngineLost(Exception):  # noqa: N818 - it is news about an engine, not an error of the request
    """The engine cannot go on with a request; it can be submitted again elsewhere, with the tokens delivered so far."""

    kind = "engine_lost"


class EngineDraining(EngineLost):
    """The engine was told to stop before the request came, and did not take it."""

    kind = "engine_leaving"


class DrainExceeded(EngineLost):
    """The engine was told to stop, and was gone before the request had ended."""

    kind = "drain_exceeded"


class EngineFull(Exception):  # noqa: N818 - as above
    """The engine takes no more requests now; it has done nothing for this one, and another engine may take it."""

    kind = "engine_full"


ATTEMPT_FAILURES = (EngineLost.kind, EngineDraining.kind, DrainExceeded.kind, EngineFull.kind)
"""Everything that an attempt can come to nothing by."""


@dataclass(slots=True)
class Output:
    """What came of one choice since its last piece: tokens from ``position`` of its output on, its end, or both.

    ``error`` is set with ``FinishReason.ERROR``, which ends the request, whatever ``index`` says. ``cached_tokens`` of
    the prompt were in the engine's prefix cache. ``logprobs`` has one entry for each token where they were asked for.
    ``prompt_logprobs`` are those of the prompt's tokens from ``prompt_position`` on, as the engine tells them piece by
    piece; a reader gets all of them with its first piece. ``score`` is a beam's, with its end. ``deltas`` are what was
    made of it before it was queued, where that ended its choice: what comes behind is not wanted.
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
    deltas: list[Delta] | None = None

    def drop(self, count: int) -> None:
        """Leaves out the first tokens: they came before."""
        del self.token_ids[:count], self.logprobs[:count]
        self.position += count

    def extend(self, following: "Output") -> None:
        """Takes in the choice's next piece."""
        self.token_ids += following.token_ids
        self.logprobs += following.logprobs
        self.finish_reason, self.score = following.finish_reason, following.score
