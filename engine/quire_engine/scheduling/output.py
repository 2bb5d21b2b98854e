"""What a step means to the outside: new tokens, ends and the load. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason

from quire_engine.request import SequenceTimings


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of one choice of a request, its end, or both.

    ``index`` is which choice. ``position`` is the index of ``token_ids[0]`` in the choice's output, earlier attempts
    included. ``cached_tokens`` of the prompt were found in the prefix cache. An end-of-sequence or stop token is not
    part of the output. ``timings`` come with the end. ``logprobs`` has one entry for each of ``token_ids`` where they
    were asked for, and ``prompt_logprobs`` those of the prompt's tokens from ``prompt_position`` on. ``score`` is a
    beam's, at its end. ``ends_request`` is set on the last output of the request.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    finish_reason: FinishReason | None = None
    error: QuireError | None = None
    cached_tokens: int = 0
    timings: SequenceTimings | None = None
    index: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_position: int = 0
    score: float | None = None
    ends_request: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is busy with; see ``quire.v1.Load``."""

    running: int
    waiting: int
    swapped: int
    uncomputed_tokens: int
    blocks_total: int
    blocks_free: int
    host_blocks_total: int
    host_blocks_free: int
