"""Tokens counted in plain numbers, and told to the metrics now and then: to tell them of each would cost more than most
of what is done with it.
"""

from bisect import bisect_left

from quire_router import metrics

FLUSH_PERIOD = 0.1  # seconds
_BUCKET_BOUNDS = metrics.TOKEN_SECONDS


class TokenMetrics:
    """The tokens of one model, and the times between them, since the last ``flush``."""

    def __init__(self, model: str) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._counts = [0] * len(_BUCKET_BOUNDS) + [0]
        self._generation_tokens = metrics.GENERATION_TOKENS.labels(model)
        self._inter_token_latency = metrics.ITL.labels(model)

    def add(self, tokens: int, gap: float | None) -> None:
        """A piece of so many tokens came, ``gap`` seconds after the one before, if there was one."""
        self._tokens += tokens
        if gap is not None:
            seconds = gap / tokens
            self._seconds += seconds
            self._counts[bisect_left(_BUCKET_BOUNDS, seconds)] += 1

    def flush(self) -> None:
        """Tells the metrics."""
        if self._tokens:
            self._generation_tokens.inc(self._tokens)
            self._inter_token_latency.observe_many(self._counts, self._seconds)
            self._tokens, self._seconds, self._counts = 0, 0.0, [0] * len(self._counts)


_TOKEN_METRICS: dict[str, TokenMetrics] = {}


def token_metrics(model: str) -> TokenMetrics:
    """The one of a configured model."""
    tally = _TOKEN_METRICS.get(model)
    if tally is None:
        tally = _TOKEN_METRICS[model] = TokenMetrics(model)
    return tally


def flush() -> None:
    """Tells the metrics of every model."""
    for tally in _TOKEN_METRICS.values():
        tally.flush()
