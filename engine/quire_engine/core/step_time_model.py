"""A model of how long this engine's steps take, fitted to its past steps.

A step's seconds are a sum: a constant, and a cost for each prompt token that it computes, each token that it draws,
each pair of a prompt token and a token before it that attention computes, and each token of context that decoding
reads. Old steps count exponentially less. Memory and time for each step are constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from quire_engine.core.executor import Rates
from quire_engine.core.step import SchedulerOutput

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
_PRIOR_CONTEXT = 8192  # tokens before a token whose attention takes as long as the token otherwise

AUTO_LOSS = 0.05
"""By default steps are as short as makes prompts take this part longer; but they may take ``AUTO_SECONDS``."""
AUTO_SECONDS = 0.05
BEST_EFFORT_PART = 0.25
"""What is best effort makes steps longer by this part of the shortest one, while there are others to wait for them."""
MIN_PROMPT_TOKENS = 16
"""The first prompt of a step gets as many, whatever was promised; and no chunk of a prompt has fewer but its last."""

_DRIFT = 1 / 8  # weight of the last mixed step in the mean of how much longer than expected those steps take
_ANY_NUMBER = 1 << 30
_ALIGNED = 16  # chunks of more tokens are multiples of it, as kernels' tiles are

_SIZE = 5
_TOKENS, _SEQUENCES, _PAIRS, _CONTEXT = range(1, _SIZE)  # features, behind the constant 1
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its duration depends on it: tokens of chunks of more than one, which are
    prompts'; tokens that it draws, those behind drafts included; pairs of a token of such a chunk and one that it
    attends to; and the tokens that chunks of one token, and of one and its drafts, attend to.
    """

    prompt_tokens: int = 0
    sequences: int = 0
    prompt_pairs: float = 0.0
    context_tokens: int = 0

    @classmethod
    def of(cls, scheduler_output: SchedulerOutput) -> "StepWork":
        """The work of a step."""
        prompt_tokens = context_tokens = 0
        prompt_pairs = 0.0
        drafts = scheduler_output.drafts
        for index, (start, length) in enumerate(zip(scheduler_output.starts, scheduler_output.lengths, strict=True)):
            num_known = length - len(drafts[index]) if index in drafts else length
            if num_known == 1:
                context_tokens += start + length
            else:
                prompt_tokens += num_known
                prompt_pairs += count_pairs(start, num_known)
        return cls(prompt_tokens, scheduler_output.num_draws, prompt_pairs, context_tokens)


def count_pairs(start: int, length: int) -> float:
    """Pairs of tokens in the causal attention of ``length`` tokens behind ``start`` others: the first attends to
    ``start + 1`` tokens, the last to all.
    """
    return length * (start + (length + 1) / 2)


@dataclass(frozen=True, slots=True)
class Pace:
    """Step times as routers get them: the costs of attention are part of the tokens' and the sequences', as large as
    they were in the last steps. See ``quire.v1.Pace``.
    """

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    host_block_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds for each step, and for each unit of its ``StepWork``."""

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    pair_seconds: float
    context_seconds: float

    def predict(self, work: StepWork) -> float:
        """Seconds of a step that copies no blocks."""
        return (
            self.step_seconds
            + work.prompt_tokens * self.token_seconds
            + work.sequences * self.sequence_seconds
            + work.prompt_pairs * self.pair_seconds
            + work.context_tokens * self.context_seconds
        )


class StepBudget:
    """What a step may still compute: ``tokens``, of which one is kept for each of the ``decoding`` sequences that have
    not been scheduled yet, and ``seconds`` of prompts. A prompt's chunk takes its tokens, its attention and, at the
    prompt's end, the draw of a token. ``max_seconds`` is what the step may take in all, 0 without a bound.

    A prompt that ends has its first token when the step ends, so what the step computes of others delays it. Leaving
    that to the next step delays each of the others by what decoding takes once more. So behind the end of a prompt a
    step has time for others only as far as that costs less.
    """

    __slots__ = ("_ended", "_model", "_prompts", "_saved", "decoding", "max_seconds", "seconds", "tokens", "waiting")

    def __init__(
        self,
        tokens: int,
        model: StepTimeModel | None = None,
        *,
        max_seconds: float = 0.0,
        seconds: float = inf,
        decoding: int = 0,
        saved: float = inf,
        waiting: int = 1,
    ) -> None:
        """Without a bound in time unless ``model`` is given. ``saved`` are the seconds that one step less takes, and
        ``waiting`` the prompts that are not computed.
        """
        self.tokens = tokens
        self.max_seconds = max_seconds
        self.seconds = seconds
        self.decoding = decoding
        self.waiting = waiting
        self._model = model
        self._prompts = 0
        self._ended = 0
        self._saved = saved

    @property
    def has_prompts(self) -> bool:
        """Whether a bounded step computes any prompt."""
        return self._prompts > 0

    @property
    def allows_prompts(self) -> bool:
        """Whether another prompt may be begun: there is some time left, or none has been yet."""
        if self._model is None:
            return self.tokens > 0
        if self.tokens <= self.decoding:
            return False
        return not self._prompts or self._fitting(self._model, 0) >= MIN_PROMPT_TOKENS

    def chunk_length(self, start: int, wanted: int) -> int:
        """The tokens that the next chunk of a sequence may have, whose first is ``start`` and which lacks ``wanted``: 0
        if its turn is in another step.
        """
        if self._model is None or wanted == 1:
            return min(wanted, self.tokens)
        least = min(wanted, MIN_PROMPT_TOKENS)
        length = min(wanted, self.tokens - self.decoding, self._fitting(self._model, start))
        if _ALIGNED < length < wanted:
            length -= length % _ALIGNED
        if length >= least:
            return length
        return 0 if self._prompts else min(least, self.tokens)

    def spend_decodes(self, count: int) -> None:
        """Takes one token of each of so many sequences that lack only that."""
        self.tokens -= count
        self.decoding = max(0, self.decoding - count)

    def spend(self, start: int, length: int, wanted: int) -> None:
        """Takes the chunk of ``length`` tokens that a sequence got."""
        self.tokens -= length
        if self._model is None:
            return
        if wanted == 1:
            self.decoding = max(0, self.decoding - 1)
            return
        self._prompts += 1
        work = StepWork(length, int(length == wanted), count_pairs(start, length))
        self.seconds -= self._model.predict(work) - self._model.step_seconds
        if length == wanted:
            self._ended += 1
            self.waiting = max(0, self.waiting - 1)
            behind = self._saved * self.waiting / self._ended if self.waiting else 0.0
            self.seconds = min(self.seconds, behind)

    def _fitting(self, model: StepTimeModel, start: int) -> int:
        """The most tokens behind ``start`` others that take ``seconds``: the root of a quadratic equation."""
        seconds = self.seconds - model.sequence_seconds
        if seconds <= 0:
            return 0
        linear = model.token_seconds + model.pair_seconds * (start + 0.5)
        root = linear + sqrt(linear * linear + 2 * model.pair_seconds * seconds)
        return int(min(2 * seconds / root, self.tokens)) if root else self.tokens


class BestEffortBudget(StepBudget):
    """What a step has for work that is best effort, on top of all else in it: ``seconds``, which sequences that decode
    take as well. The first chunk is computed whatever it takes, so that each such step advances.
    """

    __slots__ = ("_bound", "_is_used")

    def __init__(self, tokens: int, model: StepTimeModel, seconds: float) -> None:
        super().__init__(tokens, model, seconds=seconds, waiting=_ANY_NUMBER)
        self._bound = model
        self._is_used = False

    @property
    def allows_prompts(self) -> bool:
        """Whether another prompt may be begun."""
        return self.tokens > 0 and (not self._is_used or self._fitting(self._bound, 0) >= MIN_PROMPT_TOKENS)

    def chunk_length(self, start: int, wanted: int) -> int:
        """See ``StepBudget``; 0 also for a sequence that decodes and has to stand still in this step."""
        if wanted == 1:
            fits = not self._is_used or self._decode_seconds(start) <= self.seconds
            return min(wanted, self.tokens) if fits else 0
        if self._is_used and self._fitting(self._bound, start) < min(wanted, MIN_PROMPT_TOKENS):
            return 0
        return super().chunk_length(start, wanted)

    def spend(self, start: int, length: int, wanted: int) -> None:
        """See ``StepBudget``."""
        super().spend(start, length, wanted)
        self._is_used = True
        if wanted == 1:
            self.seconds -= self._decode_seconds(start)

    def _decode_seconds(self, context: int) -> float:
        return self._bound.sequence_seconds + context * self._bound.context_seconds


class StepTimeEstimator:
    """Fits a ``StepTimeModel`` by least squares of the relative error, so that short steps count as much as long ones.
    Costs are never negative. Costs that the steps do not determine stay near those of ``rates``.

    Steps with and without prompt tokens are summed separately: many decode steps do not displace what is known of
    prompts. After minutes without steps, the next ones determine the model. A step that something else delayed counts
    as at most ``_WORST`` times as long as expected.

    Steps before the ``warm``-th one with prompt tokens are ignored: the first prompts pay for what is built or read
    once, which would make an engine look slow, so that it would get no others.

    Steps with prompts and sequences that decode may take longer for a while than the model says, or shorter: the mean
    of the last few is accounted for in budgets.

    Reads no clock: the same steps make the same model. Written by the thread of the steps; ``model`` and ``pace`` may
    be read from any.
    """

    def __init__(self, rates: Rates, block_bytes: int, *, warm: int = WARM) -> None:
        token = 1 / rates.tokens_per_second
        self._prior = (_PRIOR_STEP_TOKENS * token, token, token, token / _PRIOR_CONTEXT, token / _PRIOR_CONTEXT)
        self._host_block_seconds = block_bytes / rates.bytes_per_second
        self._decoding, self._mixed = _DecayedSums(), _DecayedSums()
        self._model = StepTimeModel(*self._prior)
        self._pace: Pace | None = None
        self._steps = 0
        self._warm = warm
        self._prompt_steps = 0
        self._fitted = 0.0
        self._drift = 1.0
        self.mean_prompt_context = 0
        """Tokens that one of a prompt's attended to in the last steps, on average."""

    @property
    def model(self) -> StepTimeModel | None:
        """The current model; None before the first steps that count: until then, assuming the speed of other engines is
        better than a partial fit.
        """
        return self._model if self._steps else None

    @property
    def pace(self) -> Pace | None:
        """The model as routers get it; None as long as ``model``."""
        return self._pace

    def make_budget(
        self,
        tokens: int,
        max_seconds: float | None,
        contexts: Sequence[int],
        *,
        waiting: int = 1,
        start: int = 0,
    ) -> StepBudget:
        """The budget of a step in which sequences with these ``contexts`` decode. Not bounded in time where nothing
        decodes or too little is known. ``max_seconds`` is ``max_step_seconds`` of the settings. So many prompts are
        ``waiting`` to be computed, the next one's tokens behind ``start`` others.
        """
        model = self.model
        if max_seconds == 0 or model is None or not contexts:
            return StepBudget(tokens)
        decoding = model.predict(StepWork(0, len(contexts), 0.0, sum(contexts)))
        if max_seconds is None:
            full = model.predict(StepWork(tokens, 0, count_pairs(start, tokens))) - model.step_seconds
            max_seconds = max(AUTO_SECONDS, _auto_seconds(decoding, full, waiting))
        return StepBudget(
            tokens,
            model,
            max_seconds=max_seconds,
            seconds=max_seconds / self._drift - decoding,
            decoding=len(contexts),
            saved=decoding,
            waiting=waiting,
        )

    def make_best_effort_budget(self, tokens: int) -> StepBudget:
        """What is best effort may make a step longer by ``BEST_EFFORT_PART`` of one in which a single sequence decodes:
        who comes meanwhile waits for the step. Where too little is known, it has the fewest tokens.
        """
        model = self.model
        if model is None:
            return StepBudget(min(tokens, MIN_PROMPT_TOKENS))
        return BestEffortBudget(tokens, model, BEST_EFFORT_PART * model.predict(StepWork(sequences=1)))

    def observe(self, work: StepWork, seconds: float, ended: float = 0.0) -> None:
        """Adds one step. ``seconds`` are without block copies. ``ended`` is in seconds since a fixed time."""
        if seconds <= 0 or not (work.prompt_tokens or work.sequences) or not self._is_warm(work):
            return
        moments = self._mixed if work.prompt_tokens else self._decoding
        predicted = self._model.predict(work)
        if work.prompt_tokens and work.context_tokens and predicted:
            ratio = min(2.0, max(0.5, seconds / predicted))
            self._drift += _DRIFT * (ratio - self._drift)
        expected = max(moments.last, predicted)
        moments.last = max(_SHORTEST, seconds)
        seconds = min(moments.last, _WORST * expected)
        features = (1, work.prompt_tokens, work.sequences, work.prompt_pairs, work.context_tokens)
        moments.add([feature / seconds for feature in features], ended)
        self._steps += 1
        is_due = work.prompt_tokens or self._steps <= _REFIT or self._steps % _REFIT == 0
        if is_due or ended - self._fitted >= _REFIT_SECONDS:
            self._fitted = ended
            self._refit()

    def _is_warm(self, work: StepWork) -> bool:
        self._prompt_steps += work.prompt_tokens > 0
        return self._prompt_steps >= self._warm

    def _refit(self) -> None:
        # The ridge penalises relative errors of each cost, relative to the larger of the prior and the current cost.
        model = self._model
        known = (
            model.step_seconds,
            model.token_seconds,
            model.sequence_seconds,
            model.pair_seconds,
            model.context_seconds,
        )
        ridge = [_TRUST / max(cost, first) ** 2 for cost, first in zip(known, self._prior, strict=True)]
        both = self._decoding.plus(self._mixed)
        self._model = model = StepTimeModel(*_fit(both, self._prior, ridge))
        pairs = both.sums[_PAIRS] / both.sums[_TOKENS] if both.sums[_TOKENS] else 0.0
        self.mean_prompt_context = int(pairs)
        context = both.sums[_CONTEXT] / both.sums[_SEQUENCES] if both.sums[_SEQUENCES] else 0.0
        self._pace = Pace(
            model.step_seconds,
            model.token_seconds + pairs * model.pair_seconds,
            model.sequence_seconds + context * model.context_seconds,
            self._host_block_seconds,
        )


def _auto_seconds(decoding: float, full: float, waiting: int) -> float:
    """Seconds of a step by default. Decoding alone takes ``decoding``, and as much of prompts as a step may have takes
    ``full``; so many prompts are ``waiting``.

    A second of prompts needs 1 / p steps with p seconds of prompts each, and every step takes ``decoding`` besides.
    That is to be at most ``AUTO_LOSS`` seconds more than in steps with ``full`` seconds of prompts. Where prompts wait
    for each other, what makes all of them take longer lengthens the queue too: by 1 / (1 - load), which in a simple
    queue is the mean number of those who are in it, and one. So the loss is divided by how many there are.
    """
    steps = AUTO_LOSS / (max(1, waiting) * decoding) if decoding else inf
    return decoding + 1 / (steps + 1 / full) if full else decoding


class _DecayedSums:
    """Exponentially decayed sums over steps: of the features (1 and those of ``StepWork``), each divided by the step's
    seconds, and of their products. ``last`` are the seconds of the last step, before clipping, ``ended`` its end.
    """

    __slots__ = ("ended", "last", "products", "sums")

    def __init__(self) -> None:
        self.last = float("inf")
        self.ended = 0.0
        self.sums = [0.0] * _SIZE
        self.products = [0.0] * _SIZE**2

    def add(self, features: Vector, ended: float) -> None:
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


def _fit(moments: _DecayedSums, prior: Vector, ridge: Vector) -> Vector:
    """The costs, none below 0, with the least sum of squared relative errors, drawn a little to the prior.

    An active-set method as Lawson and Hanson's, which begins with all costs: the lowest is left out while any is below
    0, and one that would reduce the error is taken back.
    """
    size = range(_SIZE)
    ridge = [max(steep, _SOLVABLE * moments.products[(_SIZE + 1) * i]) for i, steep in enumerate(ridge)]
    matrix = [[moments.products[_SIZE * i + j] + (ridge[i] if i == j else 0.0) for j in size] for i in size]
    goal = [moments.sums[i] + ridge[i] * prior[i] for i in size]
    kept, best = list(size), [0.0] * _SIZE
    for _ in range(3 * _SIZE):  # rounding may let the search go round in circles
        costs = _solve(matrix, goal, kept)
        if min(costs) < 0:
            kept.remove(costs.index(min(costs)))
            continue
        best = costs
        pulls = {i: goal[i] - sum(matrix[i][j] * costs[j] for j in kept) for i in size if i not in kept}
        pulls = {i: pull / goal[i] for i, pull in pulls.items() if pull > 1e-9 * abs(goal[i])}
        if not pulls:
            break
        kept = sorted([*kept, max(pulls, key=lambda i: pulls[i])])
    return best


def _solve(matrix: Sequence[Vector], goal: Vector, kept: Sequence[int]) -> list[float]:
    """The costs of ``kept`` by Gaussian elimination, the others 0. The matrix is positive definite."""
    rows = [[matrix[i][j] for j in kept] + [goal[i]] for i in kept]
    size = len(kept)
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    costs = [0.0] * len(goal)
    for i in reversed(range(size)):
        known = sum(rows[i][j] * costs[kept[j]] for j in range(i + 1, size))
        costs[kept[i]] = (rows[i][size] - known) / rows[i][i]
    return costs
