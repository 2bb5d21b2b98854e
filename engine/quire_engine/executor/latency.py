"""How long a step takes: a formula in place of a device."""

from dataclasses import dataclass, fields

from quire_engine.scheduling.plan import ScheduledChunk, SchedulerOutput, StepTimings
from quire_engine.scheduling.rates import Rates


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The roofline of a step: each part takes as long as the slower of computing and reading memory.

    ``tokens_per_second``: tokens that the linear layers compute when many share a step. ``weights_seconds``: reading
    all weights once, which no step that computes is shorter than. ``context_seconds``: reading the keys and values of
    one token of context. ``pair_seconds``: computing the attention of one token to one token of its context.
    ``draw_seconds``: the logits and the draw of one token. ``overhead_seconds``: what every step costs besides.
    ``bytes_per_second``: copying blocks between the pools, one way. ``jitter``: by how much of itself a step may be
    longer or shorter.
    """

    tokens_per_second: float
    weights_seconds: float
    context_seconds: float
    pair_seconds: float
    draw_seconds: float
    overhead_seconds: float
    bytes_per_second: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if min(self.tokens_per_second, self.bytes_per_second) <= 0:
            raise ValueError("tokens_per_second and bytes_per_second must be above 0.")
        if not 0 <= self.jitter < 1:
            raise ValueError("jitter must be at least 0 and below 1.")
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name} must be at least 0 and finite.")

    @property
    def rates(self) -> Rates:
        """What an engine would measure when it starts."""
        return Rates(self.tokens_per_second, self.bytes_per_second)

    def timings(self, plan: SchedulerOutput, block_size: int, block_bytes: int) -> StepTimings:
        """Seconds of each part of the step, before jitter and without the overhead."""
        num_draws = sum(len(chunk.draws) for chunk in plan.chunks)
        return StepTimings(
            swap=plan.num_swapped_blocks * block_bytes / self.bytes_per_second
            + len(plan.blocks_to_copy) * 2 * block_size * self.context_seconds,
            forward=self._forward(plan) if plan.chunks else 0.0,
            sample=num_draws * self.draw_seconds,
        )

    def _forward(self, plan: SchedulerOutput) -> float:
        linear = max(self.weights_seconds, plan.num_tokens / self.tokens_per_second)
        return linear + sum(map(self._attention, plan.chunks))

    def _attention(self, chunk: ScheduledChunk) -> float:
        length, end = len(chunk.token_ids), chunk.end
        pairs = length * (chunk.start + end + 1) / 2  # the first sees start + 1 tokens, the last all
        return max(end * self.context_seconds, pairs * self.pair_seconds)
