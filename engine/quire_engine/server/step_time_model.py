"""A model of how long this engine's steps take, fitted to its past steps.

A step's seconds are a sum: a constant, a cost for each prompt token that it computes, and a cost for each sequence that
it samples a token for. Old steps count exponentially less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp

from quire_engine.core.engine_core import StepTrace
from quire_engine.core.executor import Rates

WARM = 5  # from this step with prompts on, an engine is warm

_MEMORY = 1 - 1 / 256  # weight of a step after the next one of its kind
_MEMORY_SECONDS = 60.0  # a pause in which the weight of earlier steps of a kind falls to 1/e
_TRUST = 0.001  # weight of the prior, in steps
_SOLVABLE = 1e-9  # part of a sum of squares: the least ridge, so that rounding does not decide
_SHORTEST = 1e-6  # seconds; no step is shorter
_REFIT = 16  # steps
_REFIT_SECONDS = 1.0
_WORST = 4.0  # longer steps, relative to the expected and to the last one, were delayed by something else
_PRIOR_STEP_TOKENS = 32

Coefficients = tuple[float, float, float]
_SUBSETS = [kept for size in (3, 2, 1) for kept in combinations(range(3), size)]


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds for each step, for each prompt token in it, for each sequence that it samples for, and for copying a
    block back from the host pool. See ``quire.v1.Pace``.
    """

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    host_block_seconds: float

    def predict(self, prompt_tokens: int, sequences: int) -> float:
        """Seconds of a step that copies no blocks."""
        return self.step_seconds + prompt_tokens * self.token_seconds + sequences * self.sequence_seconds


class StepTimeEstimator:
    """Fits a ``StepTimeModel`` by least squares of the relative error, so that short steps count as much as long ones.
    Costs are never negative. Costs that the steps do not determine stay near those of ``rates``.

    Steps with and without prompt tokens are summed separately: many decode steps do not displace what is known of
    prompts. After minutes without steps, the next ones determine the model.

    Steps before the ``warm``-th one with prompt tokens are ignored: the first prompts pay for what is built or read
    once, which would make an engine look slow, so that it would get no others.
    """

    def __init__(self, rates: Rates, block_bytes: int, *, warm: int = WARM) -> None:
        token = 1 / rates.tokens_per_second
        self._prior: Coefficients = (_PRIOR_STEP_TOKENS * token, token, token)
        self._host_block_seconds = block_bytes / rates.bytes_per_second
        self._decoding, self._mixed = _DecayedSums(), _DecayedSums()
        self._model = self._make(self._prior)
        self._steps = 0
        self._warm = warm
        self._prompt_steps = 0
        self._fitted = 0.0
        self._ended = 0

    @property
    def model(self) -> StepTimeModel | None:
        """The current model; None before the first steps that count: until then, assuming the speed of other engines is
        better than a partial fit.
        """
        return self._model if self._steps else None

    def on_step(self, trace: StepTrace) -> None:
        """Adds a step of the core. Overlapping steps last from the end of the one before."""
        ended = trace.started + int(1e9 * trace.elapsed)
        duration = ended - max(trace.started, self._ended)
        self._ended = ended
        if not trace.failed:
            prompt_tokens = trace.num_tokens - trace.num_decode
            self.observe(prompt_tokens, trace.num_sample_requests, duration / 1e9 - trace.timings.swap, ended / 1e9)

    def observe(self, prompt_tokens: int, sequences: int, seconds: float, ended: float = 0.0) -> None:
        """Adds one step. ``seconds`` are without block copies. ``ended`` is in seconds since a fixed time."""
        if seconds <= 0 or not (prompt_tokens or sequences) or not self._is_warm(prompt_tokens):
            return
        moments = self._mixed if prompt_tokens else self._decoding
        expected = max(moments.last, self._model.predict(prompt_tokens, sequences))
        moments.last = max(_SHORTEST, seconds)
        seconds = min(moments.last, _WORST * expected)
        moments.add((1 / seconds, prompt_tokens / seconds, sequences / seconds), ended)
        self._steps += 1
        if self._steps <= _REFIT or self._steps % _REFIT == 0 or ended - self._fitted >= _REFIT_SECONDS:
            self._fitted = ended
            self._refit()

    def _is_warm(self, prompt_tokens: int) -> bool:
        self._prompt_steps += prompt_tokens > 0
        return self._prompt_steps >= self._warm

    def _refit(self) -> None:
        model, prior = self._model, self._prior
        known = (model.step_seconds, model.token_seconds, model.sequence_seconds)
        # The ridge penalises relative errors of each cost, relative to the larger of the prior and the current cost.
        ridge = [_TRUST / max(cost, first) ** 2 for cost, first in zip(known, prior, strict=True)]
        self._model = self._make(_fit(self._decoding.plus(self._mixed), prior, ridge))

    def _make(self, costs: Coefficients) -> StepTimeModel:
        return StepTimeModel(*costs, self._host_block_seconds)


class _DecayedSums:
    """Exponentially decayed sums over steps: of the features (1, prompt tokens, sequences), each divided by the step's
    seconds, and of their products. ``last`` are the seconds of the last step, before clipping, ``ended`` its end.
    """

    __slots__ = ("ended", "last", "products", "sums")

    def __init__(self) -> None:
        self.last = float("inf")
        self.ended = 0.0
        self.sums = [0.0] * 3
        self.products = [0.0] * 9

    def add(self, features: Coefficients, ended: float) -> None:
        """Adds one step."""
        kept = _MEMORY * exp(min(0.0, self.ended - ended) / _MEMORY_SECONDS)
        self.ended = ended
        self.sums = [kept * old + new for old, new in zip(self.sums, features, strict=True)]
        squares = [left * right for left in features for right in features]
        self.products = [kept * old + new for old, new in zip(self.products, squares, strict=True)]

    def plus(self, other: "_DecayedSums") -> "_DecayedSums":
        """The sums over the steps of both."""
        both = _DecayedSums()
        both.sums = [left + right for left, right in zip(self.sums, other.sums, strict=True)]
        both.products = [left + right for left, right in zip(self.products, other.products, strict=True)]
        return both


def _fit(moments: _DecayedSums, prior: Coefficients, ridge: Sequence[float]) -> Coefficients:
    """The costs, none below 0, with the least sum of squared relative errors, drawn a little to the prior."""
    ridge = [max(steep, _SOLVABLE * moments.products[4 * i]) for i, steep in enumerate(ridge)]
    matrix = [[moments.products[3 * i + j] + (ridge[i] if i == j else 0.0) for j in range(3)] for i in range(3)]
    goal = [moments.sums[i] + ridge[i] * prior[i] for i in range(3)]
    best = (0.0, 0.0, 0.0)
    for kept in _SUBSETS:  # the solution is the subset whose omitted costs would be negative
        costs = _solve(matrix, goal, kept)
        if min(costs) >= 0 and _is_optimal(matrix, goal, costs):
            return costs
        if min(costs) >= 0 and best == (0.0, 0.0, 0.0):
            best = costs
    return best


def _is_optimal(matrix: Sequence[Sequence[float]], goal: Sequence[float], costs: Coefficients) -> bool:
    """Whether raising no cost that is 0 would reduce the error."""
    for i in range(3):
        pull = goal[i] - sum(matrix[i][j] * costs[j] for j in range(3))
        if costs[i] == 0 and pull > 1e-9 * abs(goal[i]):
            return False
    return True


def _solve(matrix: Sequence[Sequence[float]], goal: Sequence[float], kept: Sequence[int]) -> Coefficients:
    """The costs of ``kept`` by Gaussian elimination, the others 0. The matrix is positive definite."""
    rows = [[matrix[i][j] for j in kept] + [goal[i]] for i in kept]
    size = len(kept)
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    costs = [0.0, 0.0, 0.0]
    for i in reversed(range(size)):
        known = sum(rows[i][j] * costs[kept[j]] for j in range(i + 1, size))
        costs[kept[i]] = (rows[i][size] - known) / rows[i][i]
    return costs[0], costs[1], costs[2]
