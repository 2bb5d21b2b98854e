"""The logits processors, in the order in which they are applied.

    1. Add the logit bias.
    2. Apply the repetition penalty, then the frequency penalty, then the presence penalty.
    3. Set to -inf the tokens that would complete a bad word, or end an output before ``min_tokens``.
    4. Set to -inf the tokens that the grammar forbids.

Temperature, top-k, top-p and min-p follow in this order in ``sample_ops``. The order is vLLM's, except for min-p: vLLM
applies it before top-k, and transformers after top-p as here. The position of 3 and 4 does not change what is drawn,
because -inf stays -inf. They are last so that the others see only finite numbers.

Each processor touches only the rows that ask for it.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.ma  # numpy.unique would import it during a step, when no file descriptor may be left
import torch
from quire_proto.sampling import SamplingParams

from quire_engine.core.step import SampleRequest
from quire_engine.device.accelerator import upload_arrays
from quire_engine.sampling.grammar_bitmask import (
    AnyGrammarState,
    DraftGrammarState,
    GrammarBitmask,
    GrammarState,
    apply_grammar_bitmask,
)
from quire_engine.sampling.metadata import (
    FloatArray,
    KnownTokens,
    TokenArray,
    flat_indices,
    repeat_per_index,
    token_array,
)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Constants that a request adds to some scores: ``values`` [N] float32, one for each of ``token_ids`` [N] int64,
    which are distinct.
    """

    token_ids: TokenArray
    values: FloatArray

    @classmethod
    def from_params(cls, params: SamplingParams, vocab_size: int) -> "LogitBias | None":
        """Returns the bias of ``params`` without tokens outside the vocabulary, or None if nothing is left."""
        pairs = [pair for pair in params.logit_bias if 0 <= pair[0] < vocab_size]
        if not pairs:
            return None
        token_ids, values = zip(*pairs, strict=True)
        return cls(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))


def apply_logit_bias(scores: torch.Tensor, biased: Sequence[tuple[int, LogitBias]]) -> None:
    """Adds each (row, bias) of ``biased`` to ``scores`` [R, V] float32, in place."""
    if biased:
        indices = flat_indices(scores, [row for row, _ in biased], [bias.token_ids for _, bias in biased])
        values = np.concatenate([bias.values for _, bias in biased])
        scores.view(-1).index_add_(0, *upload_arrays((indices, values), scores.device))


_LEAST, _MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_TINY: float = torch.finfo(torch.float32).tiny
_NO_TOKENS = np.empty(0, dtype=np.int64)


class Penalties:
    """One output's penalties, with counts of the tokens that they apply to. A cache of its tokens.

    The repetition penalty (Keskar et al. 2019) covers prompt and output, as in transformers: it multiplies a negative
    score and divides any other. The frequency and presence penalties cover only the output, as in the OpenAI API. The
    frequency penalty is subtracted once for each occurrence of a token, the presence penalty once. Only the scores of
    tokens that occurred change, and tokens are counted as they arrive.
    """

    __slots__ = (
        "_counts",
        "_num_counted",
        "_num_prompt",
        "_prompt",
        "_slots",
        "_tokens",
        "frequency",
        "presence",
        "repetition",
    )

    def __init__(self, sample_request: SampleRequest) -> None:
        params = sample_request.params
        # A penalty that float32 rounds to 0 would cause a division by 0.
        self.repetition = max(params.repetition_penalty, _TINY)
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self._prompt: TokenArray | None = None if self.has_repetition else _NO_TOKENS
        self._num_prompt = self._num_counted = sample_request.num_prompt_tokens
        self._slots: dict[int, int] = {}
        self._tokens, self._counts = np.zeros(16, dtype=np.int64), np.zeros(16, dtype=np.float32)

    @classmethod
    def from_request(cls, sample_request: SampleRequest) -> "Penalties | None":
        """Returns the penalties of the request, or None if it has none."""
        return cls(sample_request) if cls.are_asked(sample_request.params) else None

    @staticmethod
    def are_asked(params: SamplingParams) -> bool:
        """Whether ``params`` ask for any penalty."""
        return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)

    def copy(self) -> "Penalties":
        """Returns a copy of the counts, to which drafts may be added."""
        copied = copy(self)
        copied._slots = self._slots.copy()
        copied._tokens, copied._counts = self._tokens.copy(), self._counts.copy()
        return copied

    @property
    def has_repetition(self) -> bool:
        """Whether there is a repetition penalty."""
        return self.repetition != 1

    @property
    def seen_token_ids(self) -> TokenArray:
        """The distinct tokens of the prompt, then the distinct tokens of the output, [N]. A token in both occurs
        twice.
        """
        assert self._prompt is not None, "update comes first"
        return np.concatenate((self._prompt, self.output_token_ids))

    @property
    def output_token_ids(self) -> TokenArray:
        """The distinct tokens of the output, [N]."""
        return self._tokens[: len(self._slots)]

    @property
    def output_counts(self) -> FloatArray:
        """How often each of ``output_token_ids`` occurs in the output, [N]."""
        return self._counts[: len(self._slots)]

    def update(self, known: KnownTokens) -> None:
        """Counts the output tokens in ``known`` that are new since the last call."""
        if self._prompt is None:
            self._prompt = np.unique(known[: self._num_prompt]).astype(np.int64)
        new = known[self._num_counted :].tolist()
        for token_id in new:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[slot] = token_id
            self._counts[slot] += 1
        self._num_counted += len(new)


def apply_penalties(scores: torch.Tensor, penalised: Sequence[tuple[int, Penalties]]) -> None:
    """Applies each (row, penalties) of ``penalised`` to the finite ``scores`` [R, V] float32, in place: repetition,
    then frequency, then presence, as in vLLM. Scores stay finite.
    """
    _apply_repetition(scores, [(row, one, one.seen_token_ids) for row, one in penalised if one.has_repetition])
    counted = [(row, one) for row, one in penalised if one.frequency or one.presence]
    _apply_frequency_and_presence(scores, [(row, one) for row, one in counted if len(one.output_token_ids)])


def _apply_repetition(scores: torch.Tensor, penalised: Sequence[tuple[int, Penalties, TokenArray]]) -> None:
    if not penalised:
        return
    indices = flat_indices(scores, [row for row, _, _ in penalised], [tokens for _, _, tokens in penalised])
    lengths = [len(tokens) for _, _, tokens in penalised]
    factors_of = repeat_per_index([one.repetition for _, one, _ in penalised], lengths)
    at, factors = upload_arrays((indices, factors_of), scores.device)
    old = scores.view(-1).index_select(0, at)
    # A token that occurs twice is read and written twice, with the same value.
    new = torch.where(old < 0, old * factors, old / factors).clamp_(_LEAST, _MOST)
    scores.view(-1).index_copy_(0, at, new)


def _apply_frequency_and_presence(scores: torch.Tensor, penalised: Sequence[tuple[int, Penalties]]) -> None:
    if not penalised:
        return
    lengths = [len(one.output_token_ids) for _, one in penalised]
    indices = flat_indices(scores, [row for row, _ in penalised], [one.output_token_ids for _, one in penalised])
    counts = np.concatenate([one.output_counts for _, one in penalised])
    each = [
        repeat_per_index(of, lengths)
        for of in zip(*((one.frequency, one.presence) for _, one in penalised), strict=True)
    ]
    at, times, frequency, presence = upload_arrays((indices, counts, *each), scores.device)
    values = scores.view(-1).index_select(0, at)
    values -= frequency * times
    values -= presence
    scores.view(-1).index_copy_(0, at, values)


class TokenBans:
    """The tokens that one output may not draw: tokens that would complete a bad word, or that would end an output
    shorter than ``min_tokens``. Bad words are searched only in the output, not in the prompt, as in vLLM.
    """

    __slots__ = ("_min_length", "_num_prompt", "_single_token_words", "_stops", "_words_by_second_last")

    def __init__(self, sample_request: SampleRequest) -> None:
        self._num_prompt = sample_request.num_prompt_tokens
        self._min_length = self._num_prompt + sample_request.params.min_tokens
        self._stops = sorted(sample_request.stop_token_ids)
        self._single_token_words = [word[0] for word in sample_request.params.bad_words if len(word) == 1]
        # Indexed by the second-last token, because in most steps no word of an output can match.
        self._words_by_second_last: dict[int, list[tuple[int, ...]]] = {}
        for word in sample_request.params.bad_words:
            if len(word) > 1:
                self._words_by_second_last.setdefault(word[-2], []).append(word)

    @classmethod
    def from_request(cls, sample_request: SampleRequest) -> "TokenBans | None":
        """Returns the bans of the request, or None if it can never ban a token."""
        return cls(sample_request) if cls.are_asked(sample_request) else None

    @staticmethod
    def are_asked(sample_request: SampleRequest) -> bool:
        """Whether the parameters can ever ban a token."""
        params = sample_request.params
        return bool(params.bad_words or (params.min_tokens and sample_request.stop_token_ids))

    def token_ids(self, known: KnownTokens) -> list[int]:
        """Returns the tokens that are banned after ``known``; in most steps none."""
        tokens = self._single_token_words + self._bad_word_endings(known)
        return tokens + self._stops if len(known) < self._min_length else tokens

    def _bad_word_endings(self, known: KnownTokens) -> list[int]:
        length = len(known) - self._num_prompt
        if not (length and self._words_by_second_last):
            return []
        return [
            word[-1]
            for word in self._words_by_second_last.get(int(known[-1]), ())
            if len(word) - 1 <= length and tuple(known[1 - len(word) :].tolist()) == word[:-1]
        ]


def apply_bans(scores: torch.Tensor, banned: Sequence[tuple[int, list[int]]]) -> None:
    """Sets the banned tokens of each (row, token ids) to -inf in ``scores`` [R, V], in place."""
    if banned:
        token_ids = [token_array(each, scores.shape[1]) for _, each in banned]
        (indices,) = upload_arrays((flat_indices(scores, [row for row, _ in banned], token_ids),), scores.device)
        scores.view(-1).index_fill_(0, indices, -torch.inf)


class SamplingState:
    """One output's parameters in the form that the logits processors read, each None if unused. A cache that can be
    rebuilt from the ``SampleRequest`` and the output's tokens. ``has_processors`` says whether a logits processor
    changes the logits in every step. ``bans`` change them only in some steps.
    """

    __slots__ = (
        "bans",
        "bias",
        "grammar_state",
        "greedy",
        "has_processors",
        "is_beam",
        "penalties",
        "sample_request",
        "wants_logprobs",
    )

    def __init__(self, sample_request: SampleRequest, vocab_size: int) -> None:
        self.sample_request = sample_request
        self.greedy = sample_request.params.greedy
        self.is_beam = sample_request.num_candidates > 0
        self.wants_logprobs = sample_request.params.wants_logprobs
        self.bias = LogitBias.from_params(sample_request.params, vocab_size)
        self.penalties = Penalties.from_request(sample_request)
        self.bans = TokenBans.from_request(sample_request)
        self.grammar_state: AnyGrammarState | None = (
            None if sample_request.grammar is None else GrammarState(sample_request)
        )
        self.has_processors = bool(self.bias or self.penalties or self.grammar_state)

    def of_drafts(self, num_drafts: int) -> "SamplingState":
        """Returns the state after ``num_drafts`` drafts of the output, valid for one step."""
        state = copy(self)
        if self.penalties is not None:
            state.penalties = self.penalties.copy()
        if isinstance(self.grammar_state, GrammarState):
            state.grammar_state = DraftGrammarState(self.grammar_state, num_drafts)
        return state


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw ``number`` of a step: a token to sample with ``state``. ``known`` [N] int32 are the tokens before it, of
    which the last ``num_drafts`` are drafts.
    """

    number: int
    state: SamplingState
    known: KnownTokens
    num_drafts: int = 0


def is_plain(sample_request: SampleRequest) -> bool:
    """Whether the request samples from the model's own logits, bans nothing, and wants only the token."""
    params = sample_request.params
    is_changed = params.logit_bias or Penalties.are_asked(params) or sample_request.grammar is not None
    asks_more = sample_request.num_candidates or params.wants_logprobs
    return not (is_changed or TokenBans.are_asked(sample_request) or asks_more)


def apply_logits_processors(scores: torch.Tensor, draws: Sequence[Draw], bitmask: GrammarBitmask) -> None:
    """Applies each row's logits processors to ``scores`` [R, V] float32, finite and contiguous, in place. ``bitmask``
    has the rows of grammars. Afterwards scores are finite or -inf.
    """
    rows = list(enumerate(draws))
    apply_logit_bias(scores, [(row, draw.state.bias) for row, draw in rows if draw.state.bias])
    penalised = [(row, draw.known, draw.state.penalties) for row, draw in rows if draw.state.penalties]
    for _, known, penalties in penalised:
        penalties.update(known)
    apply_penalties(scores, [(row, penalties) for row, _, penalties in penalised])
    apply_bans(scores, [(row, draw.state.bans.token_ids(draw.known)) for row, draw in rows if draw.state.bans])
    apply_grammar_bitmask(scores, [(row, draw.number) for row, draw in rows if draw.state.grammar_state], bitmask)
