"""What a call returns, in the shape of vLLM's outputs. Plain data."""

from dataclasses import dataclass, field

from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability, of the model's own distribution. ``rank`` is 1 for the most probable token;
    None for a token that is not among those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id, at one position: the token that is there, then the most probable ones, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt.

    ``finish_reason`` is ``stop`` (``stop_reason`` is then the stop string, or None for an end-of-sequence or stop
    token, which is not part of the output), ``length``, or ``error``. ``token_ids`` go up to the token that completed
    the stop string. ``logprobs`` has one entry for each of them where they were asked for, ``cumulative_logprob`` is
    their sum (also known with ``best_of``). ``score`` is a beam's: the sum of its tokens' log-probabilities, divided by
    its length to the power of ``length_penalty``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt.

    ``prompt`` is the text, of a conversation what its template made of it; None for a prompt of token ids.
    ``prompt_logprobs`` has one entry for each of ``prompt_token_ids`` where they were asked for, None for the first.
    ``num_cached_tokens`` of the prompt were found in the prefix cache. With an ``error``, ``outputs`` are as far as
    they came, and those that had not ended have the finish reason ``error``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: QuireError | None = None
