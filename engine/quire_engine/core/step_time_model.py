"""A model of how long this engine's steps take, fitted to its past steps.

A step's seconds are a constant plus four costs: per prompt token computed, per token sampled, per pair of a prompt
token and an earlier token in attention, and per token of context that decoding reads. Old steps count exponentially
less. Memory and time per step are constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from quire_engine.core.executor import Rates
from quire_engine.core.step import SchedulerOutput

WARM = 5  # an engine is warm from this step with prompts on

_MEMORY = 1 - 1 / 256  # weight of a step, relative to the next one of its kind
_MEMORY_SECONDS = 60.0  # the weight of earlier steps of a kind falls to 1/e in a pause of this length
_TRUST = 0.001  # weight of the prior, in steps
_SOLVABLE = 1e-9  # fraction of a sum of squares: the smallest ridge, so that rounding does not decide
_SHORTEST = 1e-6  # seconds; the shortest step
_REFIT = 16  # steps
_REFIT_SECONDS = 1.0
_WORST = 4.0  # longer steps, relative to both the expected and the last one, were delayed by something else
_PRIOR_STEP_TOKENS = 32
_PRIOR_CONTEXT = 8192  # a token's attention to this many tokens takes as long as the rest of the token

AUTO_LOSS = 0.05
"""By default steps are as short as possible without slowing prompts by more than this fraction. Steps of up to
``AUTO_SECONDS`` are always allowed.
"""
AUTO_SECONDS = 0.05
BEST_EFFORT_PART = 0.25
"""Fraction of the shortest step by which best-effort work may lengthen steps while regular requests may come."""
MIN_PROMPT_TOKENS = 16
"""Minimum chunk of the first prompt in a step, whatever the time limit; also the minimum of every other chunk except a
prompt's last.
"""

_DRIFT = 1 / 8  # weight of the last mixed step in the mean ratio of actual to expected time
_ANY_NUMBER = 1 << 30
_ALIGNED = 16  # larger chunks are multiples of this, like kernels' tiles

_SIZE = 5
_TOKENS, _SEQUENCES, _PAIRS, _CONTEXT = range(1, _SIZE)  # features, after the constant 1
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The part of a step's work that determines its duration. ``prompt_tokens`` are the tokens of chunks of more than
    one token. ``sequences`` counts the tokens sampled, including those after drafts. ``prompt_pairs`` are the pairs of
    a token of a prompt chunk and a token that it attends to. ``context_tokens`` are the tokens that chunks of one
    token, with or without drafts, attend to.
    """

    prompt_tokens: int = 0
    sequences: int = 0
    prompt_pairs: float = 0.0
    context_tokens: int = 0

    @classmethod
    def of(cls, scheduler_output: SchedulerOutput) -> "StepWork":
        """Returns the work of a step."""
        starts, lengths, drafts = scheduler_output.starts, scheduler_output.lengths, scheduler_output.drafts
        if not drafts and lengths.count(1) == len(lengths):  # most steps, and much faster than a loop
            return cls(0, scheduler_output.total_num_draws, 0.0, sum(starts) + len(starts))
        prompt_tokens = context_tokens = 0
        prompt_pairs = 0.0
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            num_known = length - len(drafts[index]) if index in drafts else length
            if num_known == 1:
                context_tokens += start + length
            else:
                prompt_tokens += num_known
                prompt_pairs += count_pairs(start, num_known)
        return cls(prompt_tokens, scheduler_output.total_num_draws, prompt_pairs, context_tokens)


def count_pairs(start: int, length: int) -> float:
    """Returns the number of token pairs in the causal attention of ``length`` tokens after ``start`` others: the first
    attends to ``start + 1`` tokens, the last to all.
    """
    return length * (start + (length + 1) / 2)


@dataclass(frozen=True, slots=True)
class Pace:
    """Step times as routers get them: the costs per token and per sequence include attention at the context lengths of
    the last steps. See ``quire.v1.Pace``.
    """

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    host_block_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds per step, and per unit of its ``StepWork``."""

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    pair_seconds: float
    context_seconds: float

    def predict(self, work: StepWork) -> float:
        """Returns the seconds of a step that copies no blocks."""
        return (
            self.step_seconds
            + work.prompt_tokens * self.token_seconds
            + work.sequences * self.sequence_seconds
            + work.prompt_pairs * self.pair_seconds
            + work.context_tokens * self.context_seconds
        )


class StepBudget:
    """What a step may still compute: ``tokens``, one of which is reserved for each of the ``decoding`` sequences not
    scheduled yet, and ``seconds`` of prompts. A prompt's chunk costs its tokens, its attention and, at the prompt's
    end, the sampling of a token. ``max_seconds`` is the limit of the whole step; 0 without one.

    A prompt that ends in a step gets its first token when the step ends, so every further prompt in the step delays it.
    Leaving that prompt to the next step delays the other prompts by one more decode. After the end of a prompt a step
    therefore has time for others only while that delay is the smaller one.
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
        """Limits time only if ``model`` is given. ``saved`` is the seconds saved by one step fewer, and ``waiting`` the
        number of prompts that are not computed yet.
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
        """Whether a time-limited step computes any prompt."""
        return self._prompts > 0

    @property
    def allows_prompts(self) -> bool:
        """Whether another prompt may be started: some time is left, or the step has no prompt yet."""
        if self._model is None:
            return self.tokens > 0
        if self.tokens <= self.decoding:
            return False
        return not self._prompts or self._fitting(self._model, 0) >= MIN_PROMPT_TOKENS

    def chunk_length(self, start: int, wanted: int) -> int:
        """Returns the length of a sequence's next chunk, which begins at token ``start``, if ``wanted`` tokens are left
        to compute. 0 if it has to wait for another step.
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
        """Spends one token for each of ``count`` decoding sequences."""
        self.tokens -= count
        self.decoding = max(0, self.decoding - count)

    def spend(self, start: int, length: int, wanted: int) -> None:
        """Spends a chunk of ``length`` of the ``wanted`` tokens of a sequence."""
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
        """Returns the most tokens after ``start`` others that fit into ``seconds``: the root of a quadratic
        equation.
        """
        seconds = self.seconds - model.sequence_seconds
        if seconds <= 0:
            return 0
        linear = model.token_seconds + model.pair_seconds * (start + 0.5)
        root = linear + sqrt(linear * linear + 2 * model.pair_seconds * seconds)
        return int(min(2 * seconds / root, self.tokens)) if root else self.tokens


class BestEffortBudget(StepBudget):
    """A step's budget for best-effort work, added to everything else in the step: ``seconds``, which decodes use too.
    The first chunk always fits, so that each such step advances.
    """

    __slots__ = ("_bound", "_is_used")

    def __init__(self, tokens: int, model: StepTimeModel, seconds: float) -> None:
        super().__init__(tokens, model, seconds=seconds, waiting=_ANY_NUMBER)
        self._bound = model
        self._is_used = False

    @property
    def allows_prompts(self) -> bool:
        """Whether another prompt may be started."""
        return self.tokens > 0 and (not self._is_used or self._fitting(self._bound, 0) >= MIN_PROMPT_TOKENS)

    def chunk_length(self, start: int, wanted: int) -> int:
        """See ``StepBudget``. Also 0 for a decoding sequence that has to skip this step."""
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
    Costs are never negative. Costs that the steps do not determine stay close to the costs that ``rates`` imply.

    Steps with and without prompt tokens are summed separately, so that many decode steps do not displace knowledge
    about prompts. After minutes without steps, new steps determine the model. A step that something else delayed counts
    as at most ``_WORST`` times the expected duration.

    Steps before the ``warm``-th one with prompt tokens are ignored. The first prompts pay for one-time costs, and a
    slow estimate would keep routers from sending more.

    Steps that mix prompts and decodes may for a while take longer or shorter than the model says. Budgets correct for
    the mean ratio of the last few.

    ``model`` is None before the first steps that count: until then, assuming the speed of other engines is better than
    a partial fit. ``pace`` is the model as routers get it.

    Reads no clock: the same steps give the same model. Only the thread of the steps writes it; reading ``model`` and
    ``pace`` is thread-safe.
    """

    def __init__(self, rates: Rates, block_bytes: int, *, warm: int = WARM) -> None:
        token = 1 / rates.tokens_per_second
        self._prior = (_PRIOR_STEP_TOKENS * token, token, token, token / _PRIOR_CONTEXT, token / _PRIOR_CONTEXT)
        self._host_block_seconds = block_bytes / rates.bytes_per_second
        self._decoding, self._mixed = _DecayedSums(), _DecayedSums()
        self.model: StepTimeModel | None = None
        self.pace: Pace | None = None
        self._steps = 0
        self._warm = warm
        self._prompt_steps = 0
        self._fitted = 0.0
        self._drift = 1.0
        self.mean_prompt_context = 0
        """Tokens that a prompt token attended to in the last steps, on average."""

    def make_budget(
        self,
        tokens: int,
        max_seconds: float | None,
        contexts: Sequence[int],
        *,
        waiting: int = 1,
        start: int = 0,
    ) -> StepBudget:
        """Returns the budget of a step in which sequences with these ``contexts`` (tokens) decode. Without a time limit
        if nothing decodes or if too little is known. ``max_seconds`` is the setting ``max_step_seconds``. ``waiting``
        prompts are not computed yet; the next chunk begins after ``start`` tokens.
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
        """Returns the budget for best-effort work: ``BEST_EFFORT_PART`` of a step in which one sequence decodes,
        because a new request waits for the step. If too little is known, the budget is ``MIN_PROMPT_TOKENS``.
        """
        model = self.model
        if model is None:
            return StepBudget(min(tokens, MIN_PROMPT_TOKENS))
        return BestEffortBudget(tokens, model, BEST_EFFORT_PART * model.predict(StepWork(sequences=1)))

    def observe(self, work: StepWork, seconds: float, ended: float = 0.0) -> None:
        """Adds one step. ``seconds`` are without block copies. ``ended`` is in seconds since a fixed time."""
        if seconds <= 0 or not (work.prompt_tokens or work.sequences):
            return
        self._prompt_steps += work.prompt_tokens > 0
        if self._prompt_steps < self._warm:
            return
        moments = self._mixed if work.prompt_tokens else self._decoding
        predicted = self._known.predict(work)
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

    @property
    def _known(self) -> StepTimeModel:
        """The current model, or the one that the rates imply."""
        return self.model or StepTimeModel(*self._prior)

    def _refit(self) -> None:
        # The ridge penalises each cost's relative error, relative to the larger of the prior and the current cost.
        model = self._known
        known = (
            model.step_seconds,
            model.token_seconds,
            model.sequence_seconds,
            model.pair_seconds,
            model.context_seconds,
        )
        ridge = [_TRUST / max(cost, first) ** 2 for cost, first in zip(known, self._prior, strict=True)]
        both = self._decoding.plus(self._mixed)
        self.model = model = StepTimeModel(*_fit(both, self._prior, ridge))
        pairs = both.sums[_PAIRS] / both.sums[_TOKENS] if both.sums[_TOKENS] else 0.0
        self.mean_prompt_context = int(pairs)
        context = both.sums[_CONTEXT] / both.sums[_SEQUENCES] if both.sums[_SEQUENCES] else 0.0
        self.pace = Pace(
            model.step_seconds,
            model.token_seconds + pairs * model.pair_seconds,
            model.sequence_seconds + context * model.context_seconds,
            self._host_block_seconds,
        )


def _auto_seconds(decoding: float, full: float, waiting: int) -> float:
    """Returns the default time limit of a step, in seconds. Decoding alone takes ``decoding`` seconds. As many prompt
    tokens as a step may have take ``full`` seconds. ``waiting`` prompts are not computed yet.

    A second of prompts needs 1 / p steps with p seconds of prompts each, and every step also takes ``decoding``. That
    may cost at most ``AUTO_LOSS`` seconds more than steps with ``full`` seconds of prompts. If prompts queue, slowing
    all of them lengthens the queue too, by 1 / (1 - load). In a simple queue that is the mean number of prompts in it
    plus one. So the loss is divided by the number of prompts.
    """
    steps = AUTO_LOSS / (max(1, waiting) * decoding) if decoding else inf
    return decoding + 1 / (steps + 1 / full) if full else decoding


class _DecayedSums:
    """Exponentially decayed sums over steps: of the features (1 and the fields of ``StepWork``), each divided by the
    step's seconds, and of their products. ``last`` is the seconds of the last step, before clipping; ``ended`` is its
    end.
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
        """Returns the sums over the steps of both."""
        both = _DecayedSums()
        both.sums = [left + right for left, right in zip(self.sums, other.sums, strict=True)]
        both.products = [left + right for left, right in zip(self.products, other.products, strict=True)]
        return both


def _fit(moments: _DecayedSums, prior: Vector, ridge: Vector) -> Vector:
    """Returns the costs, none below 0, with the least sum of squared relative errors and a slight pull to the prior.

    Uses an active-set method like Lawson and Hanson's, starting with all costs. Drops the lowest cost while any is
    below 0, and takes back a cost that would reduce the error.
    """
    size = range(_SIZE)
    ridge = [max(steep, _SOLVABLE * moments.products[(_SIZE + 1) * i]) for i, steep in enumerate(ridge)]
    matrix = [[moments.products[_SIZE * i + j] + (ridge[i] if i == j else 0.0) for j in size] for i in size]
    goal = [moments.sums[i] + ridge[i] * prior[i] for i in size]
    kept, best = list(size), [0.0] * _SIZE
    for _ in range(3 * _SIZE):  # rounding may make the search cycle
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
    """Returns the costs in ``kept`` by Gaussian elimination; the others are 0. The matrix is positive definite."""
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
