"""The plan of one step and its result: plain data, the only thing that scheduler and executor share.

Nothing here refers to a sequence or a pool, so a plan can be logged, replayed and sent to other ranks.
"""

from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from quire_engine.kv.copy import BlockCopy

__all__ = ["BlockCopy", "Chunk", "StepPlan", "StepResult", "StepTimings"]


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that a step computes.

    ``token_ids`` are the sequence's tokens ``[start, end)``; the ``start`` tokens before them are in the KV blocks
    already. ``block_ids`` is the sequence's block table, and covers at least ``end`` tokens: token ``p`` lives in
    slot ``p % block_size`` of ``block_ids[p // block_size]``. It is the scheduler's own list: read it while the step
    runs, never keep or change it. ``sampling`` is set when the chunk reaches the sequence's last known token, and
    then token ``end`` is to be drawn.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    sampling: SamplingParams | None

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the chunk is; also the position of the token that is
        drawn.
        """
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class StepPlan:
    """What one step does, in this order: copy out, copy in, compute the chunks, sample.

    A step that copies blocks out copies none in. ``preempted`` counts the sequences that had to give way.
    """

    step: int
    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    preempted: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def split(self) -> list["StepPlan"]:
        """One plan for each chunk, without the copies: to find the request that makes a step fail."""
        return [StepPlan(self.step, [chunk]) for chunk in self.chunks]


@dataclass(slots=True)
class StepTimings:
    """Seconds that the executor spent in each part of a step."""

    swap: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    def add(self, other: "StepTimings") -> None:
        """Adds another run's seconds, part by part."""
        self.swap += other.swap
        self.forward += other.forward
        self.sample += other.sample


@dataclass(slots=True)
class StepResult:
    """What a step made: one drawn token, or one error, for each chunk with ``sampling``; both keyed by sequence
    id.
    """

    token_ids: dict[int, int] = field(default_factory=dict)
    errors: dict[int, QuireError] = field(default_factory=dict)
    timings: StepTimings = field(default_factory=StepTimings)
