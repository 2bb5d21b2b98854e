"""Log-probabilities of tokens, as they pass between the rooms. Plain data."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """At one position: the natural logarithm of the probability of the token that is there, and the most probable
    tokens with theirs, best first. Probabilities are the model's own, of a float32 softmax over the whole vocabulary.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def mean_logprob(logprobs: Iterable[TokenLogprobs]) -> float:
    """How probable an output is per token, which is what ``best_of`` goes by; -inf for an empty one."""
    values = [each.logprob for each in logprobs]
    return sum(values) / len(values) if values else float("-inf")
