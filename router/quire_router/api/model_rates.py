"""``ModelRates``: what this router's counters of a model say of the last seconds, as rates and quantiles."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import sub
from time import monotonic

from prometheus_client import Counter, Histogram

from quire_router.core import metrics
from quire_router.core.fleet_view import Quantiles

WINDOW = 10.0  # seconds
_RATE_WINDOW = 2.0  # seconds, for tokens per second, of which there are enough
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The counters at ``time``. The histograms are cumulative: how many observations were at most each bound."""

    time: float
    tokens: float
    prompt_tokens: float
    cached_tokens: float
    ttft: Sequence[float]
    itl: Sequence[float]


class ModelRates:
    """The rates of one model over the samples of the last ``WINDOW`` seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._samples: deque[_Sample] = deque()

    def sample(self) -> None:
        """Reads the counters. To be called before the figures are read."""
        now = monotonic()
        self._samples.append(
            _Sample(
                now,
                _total(metrics.GENERATION_TOKENS, self._model),
                _total(metrics.TENANT_PROMPT_TOKENS, self._model),
                _total(metrics.TENANT_CACHED_TOKENS, self._model),
                _cumulative(metrics.TTFT, self._model),
                _cumulative(metrics.ITL, self._model),
            )
        )
        while len(self._samples) > 2 and self._samples[1].time <= now - WINDOW:
            self._samples.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Tokens that this router got per second."""
        last = self._samples[-1]
        first = next((each for each in self._samples if each.time >= last.time - _RATE_WINDOW), last)
        return 0.0 if first is last else round((last.tokens - first.tokens) / (last.time - first.time), 1)

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompt tokens of requests that ended which was cached, 0 to 1; None if none ended."""
        first, last = self._samples[0], self._samples[-1]
        prompts = last.prompt_tokens - first.prompt_tokens
        return round((last.cached_tokens - first.cached_tokens) / prompts, 3) if prompts else None

    @property
    def ttft(self) -> Quantiles | None:
        """Seconds to the first token; None if there was none."""
        return _quantiles(metrics.SECONDS, self._samples[0].ttft, self._samples[-1].ttft)

    @property
    def itl(self) -> Quantiles | None:
        """Seconds between tokens; None if there were none."""
        return _quantiles(metrics.TOKEN_SECONDS, self._samples[0].itl, self._samples[-1].itl)


def _total(counter: Counter, model: str) -> float:
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.labels["model"] == model)


def _cumulative(histogram: Histogram, model: str) -> list[float]:
    samples = [sample for metric in histogram.labels(model).collect() for sample in metric.samples]
    return [sample.value for sample in samples if sample.name.endswith("_bucket")]


def _quantiles(bounds: Sequence[float], before: Sequence[float], now: Sequence[float]) -> Quantiles | None:
    counts = list(map(sub, now, before))
    if not counts[-1]:
        return None
    p50, p95, p99 = (round(_quantile((*bounds, inf), counts, share), 4) for share in _QUANTILES)
    return p50, p95, p99


def _quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    """Returns a quantile of cumulative ``counts``, as Prometheus' ``histogram_quantile`` does: linear within a bucket;
    beyond the last bound, that bound.
    """
    rank = share * counts[-1]
    index = next(index for index, count in enumerate(counts) if count >= rank)
    if bounds[index] == inf:
        return bounds[index - 1]
    low, under = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    return low + (bounds[index] - low) * (rank - under) / (counts[index] - under)
