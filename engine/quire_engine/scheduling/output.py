"""What a step means to the outside: new tokens, ends and the load. Plain data."""

from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason

from quire_engine.request import Timeline


@dataclass(slots=True)
class Output:
    """New tokens of one request, its end, or both.

    ``position`` is the index of ``token_ids[0]`` in the request's output, earlier attempts included.
    ``cached_tokens`` of the prompt were found in the prefix cache. An end-of-sequence or stop token is not part of
    the output. ``timeline`` comes with the end.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    finish_reason: FinishReason | None = None
    error: QuireError | None = None
    cached_tokens: int = 0
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is busy with; see ``quire.v1.Load``."""

    running: int
    waiting: int
    swapped: int
    uncomputed_tokens: int
    blocks_total: int
    blocks_free: int
    host_blocks_total: int
    host_blocks_free: int
