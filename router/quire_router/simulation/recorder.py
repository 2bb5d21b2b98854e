"""What happened to each request of a simulation. Judges nothing. Times are in nanoseconds since the start."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTrace:
    """One request: when it came (to which router), when it was sent to an engine (to which), its first and last token,
    and its end; None for what never came. ``cached_tokens`` of its prompt the engine had. ``error`` is the code of a
    typed end.
    """

    arrived: int
    tenant: str
    num_prompt: int
    router: int
    engine: int | None = None
    placed: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    ended: int | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All requests in the order of their arrival; for how long each engine stepped; when all was over; how often
    sequences gave way; and how many blocks were never given back, of which there must be none.
    """

    traces: list[RequestTrace]
    busy: list[int]
    end: int
    preemptions: int
    lost_blocks: int
