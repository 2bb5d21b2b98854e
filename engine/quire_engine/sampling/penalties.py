"""Repetition, frequency and presence penalties: scores that go down, or up, for tokens that occurred before.

The repetition penalty (Keskar et al. 2019) looks at prompt and output, as transformers' does: it multiplies a negative
score and divides any other. Frequency and presence penalties look at the output alone, as the OpenAI API's do: the
first is taken from a score once for each time that the output has the token, the second once.

Only the scores of tokens that occurred are touched, and a sequence's tokens are counted as they come.
"""

from collections.abc import Sequence

import numpy as np
import numpy.ma  # numpy.unique would import it in the step, where there may be no descriptor for that
import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import FloatArray, TokenArray, flat_indices, repeat_per_index
from quire_engine.scheduling.plan import SampleRequest

_LEAST, _MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_TINY: float = torch.finfo(torch.float32).tiny
_NO_TOKENS = np.empty(0, dtype=np.int64)


class Penalties:
    """One sequence's penalties and counts of the tokens that they apply to: a cache of its ``token_ids``."""

    __slots__ = (
        "_counts",
        "_draw",
        "_num_counted",
        "_prompt",
        "_slots",
        "_tokens",
        "frequency",
        "presence",
        "repetition",
    )

    def __init__(self, draw: SampleRequest) -> None:
        params = draw.params
        # A penalty that float32 rounds to 0 would divide by it.
        self.repetition = max(params.repetition_penalty, _TINY)
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self._draw = draw
        self._prompt = (
            np.unique(np.array(draw.token_ids[: draw.num_prompt_tokens], np.int64))
            if self.has_repetition
            else _NO_TOKENS
        )
        self._num_counted = draw.num_prompt_tokens
        self._slots: dict[int, int] = {}
        self._tokens, self._counts = np.zeros(16, dtype=np.int64), np.zeros(16, dtype=np.float32)

    @classmethod
    def from_request(cls, draw: SampleRequest) -> "Penalties | None":
        """The penalties that the draw's parameters ask for; None if there are none."""
        params = draw.params
        asked = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        return cls(draw) if asked else None

    @property
    def has_repetition(self) -> bool:
        """Whether there is a repetition penalty."""
        return self.repetition != 1

    @property
    def seen_token_ids(self) -> TokenArray:
        """The distinct tokens of the prompt and those of the output, [N]; a token of both is there twice."""
        return np.concatenate((self._prompt, self.output_token_ids))

    @property
    def output_token_ids(self) -> TokenArray:
        """The distinct tokens of the output, [N]."""
        return self._tokens[: len(self._slots)]

    @property
    def output_counts(self) -> FloatArray:
        """How often each of ``output_token_ids`` occurs in the output, [N]."""
        return self._counts[: len(self._slots)]

    def update(self) -> None:
        """Counts the output tokens that were added since the last call."""
        new = self._draw.token_ids[self._num_counted :]
        for token_id in new:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[slot] = token_id
            self._counts[slot] += 1
        self._num_counted += len(new)


def apply_penalties(scores: torch.Tensor, penalised: Sequence[tuple[int, Penalties]]) -> None:
    """Applies to ``scores`` [R, V] float32, finite, in place, each (row, penalties) of ``penalised``: repetition,
    then frequency, then presence, as vLLM does. Scores stay finite.
    """
    for _, penalties in penalised:
        penalties.update()
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
