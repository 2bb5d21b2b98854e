"""Speculation without a draft model: tokens of a sequence are guessed where its text repeats itself, as far as it pays.

A step computes a sequence's last known token and its drafts together, and draws a token behind each. As a draw depends
on nothing but the seed, the position and the logits, each is the one that would have been drawn without drafts, and a
draft is right where it equals it: outputs are the same with speculation and without, sampled ones too.

Where the last tokens of a text occur earlier in it, what followed them there is the guess (prompt lookup decoding,
Saxena 2023; the hash chains by which earlier occurrences are found are those of LZ77 compressors). A sequence's hit
rate is known at no cost: each guessed token is compared with the one that was drawn, whether it was computed or not.
"""

from collections.abc import Sequence as Tokens
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from quire_engine.core.executor import Rates
from quire_engine.core.step import SchedulerOutput, StepTimings

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig
    from quire_engine.core.request import Sequence

MAX_CANDIDATES = 16
"""Earlier occurrences that are looked at, the last ones first."""

_HIT_MEMORY = 0.95  # weight of a guess after the next one
_PRIOR_HITS, _PRIOR_GUESSES = 1.0, 2.0
_STEP_MEMORY = 0.98  # weight of a step after the next one
_TRUST = 0.01  # weight of what is known of a token's cost, in steps whose numbers of rows vary by one
_FORGETTING = 0.002  # how far that is drawn to the prior in each step, so that drafts are tried again some day
_WORST = 4.0  # longer steps, relative to the expected time, were delayed by something else
_WARM = 3  # steps before their times count: the first pay for what is built once


class NgramProposer:
    """Guesses the tokens that follow a sequence, from an earlier occurrence of its last tokens: of at least
    ``shortest``, and the longest one counts, up to ``longest``; of equally long ones the last.

    While guesses are right the same occurrence is followed; a wrong one has another looked up.
    """

    __slots__ = (
        "_earlier",
        "_guesses",
        "_hits",
        "_last",
        "_longest",
        "_num_seen",
        "_shortest",
        "_source",
        "_token_ids",
    )

    def __init__(self, token_ids: Tokens[int], shortest: int, longest: int) -> None:
        self._token_ids = token_ids
        self._shortest = shortest
        self._longest = longest
        # Where each n-gram of ``shortest`` tokens ends last, and for each end the one before it of the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        self._num_seen = 0
        self._source = 0  # where the guess of the next token stands in the text; 0 for none
        self._hits = _PRIOR_HITS
        self._guesses = _PRIOR_GUESSES

    @property
    def hit_rate(self) -> float:
        """The probability that a guessed token is right, if those before it are."""
        return self._hits / self._guesses

    def update(self) -> None:
        """Takes in the tokens that the sequence got since the last call."""
        known, shortest = self._token_ids, self._shortest
        for position in range(self._num_seen, len(known)):
            if self._source:
                self._count(hit=known[self._source] == known[position])
            end = position + 1
            self._earlier.append(0)
            if end >= shortest:
                ngram = tuple(known[end - shortest : end])
                self._earlier[position] = self._last.get(ngram, 0)
                self._last[ngram] = end
        self._num_seen = len(known)
        if not self._source and known:
            self._source = self._find()

    def propose(self, count: int) -> list[int]:
        """At most ``count`` guessed tokens. A guess that runs into the text's end goes on with itself: the text has
        begun to repeat.
        """
        if not self._source:
            return []
        known, period = self._token_ids, len(self._token_ids) - self._source
        return [known[self._source + index % period] for index in range(count)]

    def _count(self, *, hit: bool) -> None:
        self._hits = _PRIOR_HITS + _HIT_MEMORY * (self._hits - _PRIOR_HITS) + hit
        self._guesses = _PRIOR_GUESSES + _HIT_MEMORY * (self._guesses - _PRIOR_GUESSES) + 1
        self._source = self._source + 1 if hit else 0

    def _find(self) -> int:
        """The end of the best earlier occurrence of the last tokens; 0 if there is none."""
        best = best_length = 0
        end = self._earlier[-1]
        for _ in range(MAX_CANDIDATES):
            if not end or best_length >= self._longest:
                break
            length = self._match_length(end)
            if length > best_length:
                best, best_length = end, length
            end = self._earlier[end - 1]
        return best

    def _match_length(self, end: int) -> int:
        """How many tokens before ``end`` equal the last ones of the text, of which ``shortest`` are known to."""
        known, length, limit = self._token_ids, self._shortest, min(self._longest, end)
        while length < limit and known[end - 1 - length] == known[-1 - length]:
            length += 1
        return length


class DecodeTimes:
    """How long a step takes that computes no prompts: a constant, and a cost for each token that it draws. A least
    squares fit of the relative error, in which old steps count less. While the steps do not vary, a token's cost stays
    near what was known of it, and returns slowly to a prior.
    """

    __slots__ = ("_prior", "_steps", "_sums", "row_seconds", "step_seconds")

    def __init__(self, rates: Rates) -> None:
        self._prior = 1 / rates.tokens_per_second
        self._steps = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.step_seconds = 0.0
        self.row_seconds = self._prior

    @property
    def is_known(self) -> bool:
        """Whether any steps have been counted."""
        return self._steps > _WARM

    def predict(self, rows: int) -> float:
        """Seconds of a step that draws so many tokens."""
        return self.step_seconds + rows * self.row_seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Adds one step."""
        if seconds <= 0:
            return
        self._steps += 1
        if not self.is_known:
            return
        if self._steps > _WARM + 1:
            seconds = min(seconds, _WORST * self.predict(rows))
        weight = 1 / seconds**2
        new = (weight, weight * rows, weight * rows * rows, weight * seconds, weight * rows * seconds)
        self._sums = (
            _STEP_MEMORY * self._sums[0] + new[0],
            _STEP_MEMORY * self._sums[1] + new[1],
            _STEP_MEMORY * self._sums[2] + new[2],
            _STEP_MEMORY * self._sums[3] + new[3],
            _STEP_MEMORY * self._sums[4] + new[4],
        )
        self._fit()

    def _fit(self) -> None:
        total, rows, squares, seconds, products = self._sums
        mean_rows, mean_seconds = rows / total, seconds / total
        spread = max(0.0, squares / total - mean_rows**2)
        covariance = products / total - mean_rows * mean_seconds
        known = self.row_seconds + _FORGETTING * (self._prior - self.row_seconds)
        slope = (covariance + _TRUST * known) / (spread + _TRUST)
        # Neither cost is below 0.
        self.row_seconds = min(max(slope, 0.0), mean_seconds / mean_rows)
        self.step_seconds = mean_seconds - mean_rows * self.row_seconds


class Speculator:
    """Chooses the drafts of a step: those with which it makes most tokens a second, by the times of past steps and
    each sequence's hit rate.
    """

    def __init__(self, config: "SchedulerConfig", rates: Rates) -> None:
        self._most = config.num_speculative_tokens
        self._shortest = config.prompt_lookup_min
        self._longest = config.prompt_lookup_max
        self.times = DecodeTimes(rates)

    def observe(self, scheduler_output: SchedulerOutput, timings: StepTimings) -> None:
        """Takes in how long a step took."""
        chunks = scheduler_output.chunks
        rows = sum([len(chunk.sample_requests) for chunk in chunks])
        if rows and all(len(chunk.token_ids) == chunk.num_draft_tokens + 1 for chunk in chunks):
            self.times.observe(rows, timings.forward + timings.sample)

    def propose(self, sequences: Tokens["Sequence"], room: int) -> dict[int, list[int]]:
        """Drafts by sequence id, at most ``room`` in all, for a step that computes one known token of each sequence."""
        for sequence in sequences:
            if sequence.proposer is None:
                sequence.proposer = NgramProposer(sequence.token_ids, self._shortest, self._longest)
            sequence.proposer.update()
        if not self.times.is_known:
            return {}
        counts = self._choose_counts(sequences, room)
        return {sequence.id: drafts for sequence, count in counts if (drafts := _propose(sequence, count))}

    def _choose_counts(self, sequences: Tokens["Sequence"], room: int) -> list[tuple["Sequence", int]]:
        """How many drafts each sequence gets. One more is worth it while the probability that it makes a token is
        above what the step makes in the time that it costs; the most probable come first, so that the first that is
        not ends the choice.
        """
        tokens, seconds = float(len(sequences)), self.times.predict(len(sequences))
        counts = [0] * len(sequences)
        gains = [
            (-proposer.hit_rate, index)
            for index, sequence in enumerate(sequences)
            if (proposer := sequence.proposer) is not None and proposer.propose(1) and self._limit(sequence) > 0
        ]
        heapify(gains)
        while gains and room > 0:
            gain, index = -gains[0][0], gains[0][1]
            if gain * seconds <= self.times.row_seconds * tokens:
                break
            tokens, seconds, room = tokens + gain, seconds + self.times.row_seconds, room - 1
            counts[index] += 1
            proposer = sequences[index].proposer
            if proposer is not None and counts[index] < self._limit(sequences[index]):
                heapreplace(gains, (-gain * proposer.hit_rate, index))
            else:
                heappop(gains)
        return [(sequence, count) for sequence, count in zip(sequences, counts, strict=True) if count]

    def _limit(self, sequence: "Sequence") -> int:
        """The most drafts of a sequence: one more token is drawn behind them, and it may be the last."""
        return min(self._most, sequence.limit - len(sequence.token_ids) - 1)


def _propose(sequence: "Sequence", count: int) -> list[int]:
    return [] if sequence.proposer is None else sequence.proposer.propose(count)
