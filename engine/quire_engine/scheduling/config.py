"""The limits that a scheduler keeps. Plain data."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "sjf", "priority"]
Batching = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence.

    ``max_num_seqs``: sequences that hold device blocks. ``max_num_batched_tokens``: tokens that a step computes.
    ``max_model_len``: tokens of one sequence. ``watermark``: part of the device blocks that an admission leaves free,
    so that what runs can grow for a while. ``max_waiting``: sequences that may wait. ``max_swapped``: sequences that
    may be swapped out at once; a victim beyond is computed again.

    ``policy`` is the order in which those that wait are admitted, ``max_overtakes`` how often one of them can be
    overtaken by a later one under ``sjf``. With ``batching`` static, nothing is admitted between the first token of a
    batch and the end of its last sequence.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    watermark: float = 0.01
    max_waiting: int = 16384
    max_swapped: int = 64
    policy: Policy = "fcfs"
    max_overtakes: int = 64
    batching: Batching = "continuous"
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 2**31 - 1
    model_revision: str = ""

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1:
            raise ValueError("max_num_seqs, max_num_batched_tokens and max_model_len must be at least 1.")
