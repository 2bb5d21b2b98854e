"""Token bans: the tokens that would complete a bad word, or end an output that is shorter than ``min_tokens``."""

from collections.abc import Sequence

import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import flat_indices, token_array
from quire_engine.scheduling.plan import SampleRequest


class TokenBans:
    """The tokens that one sequence may not draw. Bad words are looked for in the output alone, not in the prompt, as in
    vLLM.
    """

    __slots__ = ("_draw", "_min_length", "_single_token_words", "_stops", "_words_by_second_last")

    def __init__(self, draw: SampleRequest) -> None:
        self._draw = draw
        self._min_length = draw.num_prompt_tokens + draw.params.min_tokens
        self._stops = sorted(draw.stop_token_ids)
        self._single_token_words = [word[0] for word in draw.params.bad_words if len(word) == 1]
        # By the token before the last: in most steps none of a sequence's words comes into question.
        self._words_by_second_last: dict[int, list[tuple[int, ...]]] = {}
        for word in draw.params.bad_words:
            if len(word) > 1:
                self._words_by_second_last.setdefault(word[-2], []).append(word)

    @classmethod
    def from_request(cls, draw: SampleRequest) -> "TokenBans | None":
        """The bans that the draw's parameters ask for; None if they never ban a token."""
        asked = draw.params.bad_words or (draw.params.min_tokens and draw.stop_token_ids)
        return cls(draw) if asked else None

    def token_ids(self) -> list[int]:
        """The tokens that are banned for the next draw; in most steps none."""
        tokens = self._single_token_words + self._bad_word_endings()
        return tokens + self._stops if len(self._draw.token_ids) < self._min_length else tokens

    def _bad_word_endings(self) -> list[int]:
        known, length = self._draw.token_ids, len(self._draw.token_ids) - self._draw.num_prompt_tokens
        if not length:
            return []
        return [
            word[-1]
            for word in self._words_by_second_last.get(known[-1], ())
            if len(word) - 1 <= length and tuple(known[1 - len(word) :]) == word[:-1]
        ]


def apply_bans(scores: torch.Tensor, banned: Sequence[tuple[int, TokenBans]]) -> None:
    """Sets the banned tokens of each (row, bans) to -inf in ``scores`` [R, V], in place."""
    if banned:
        token_ids = [token_array(bans.token_ids(), scores.shape[1]) for _, bans in banned]
        (indices,) = upload_arrays((flat_indices(scores, [row for row, _ in banned], token_ids),), scores.device)
        scores.view(-1).index_fill_(0, indices, -torch.inf)
