"""Which of the outputs that were drawn are given: the one rule behind ``best_of``."""

from collections.abc import Sequence


def best_of(mean_logprobs: Sequence[float], n: int) -> list[int]:
    """Indexes of the ``n`` outputs with the highest mean log-probability, best first; of equal ones, the earlier."""
    return sorted(range(len(mean_logprobs)), key=lambda index: (-mean_logprobs[index], index))[:n]
