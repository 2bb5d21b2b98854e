"""Tokens that may not come next: those that would complete a bad word, or end an output that is too short."""

from collections.abc import Sequence

import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import cells, token_array
from quire_engine.scheduling.plan import SampleRequest


class Forbidden:
    """What one sequence may not draw. A bad word is completed within the output; the prompt's tokens are no part of it,
    as in vLLM.
    """

    __slots__ = ("_always", "_by_last", "_draw", "_min_length", "_stops")

    def __init__(self, draw: SampleRequest) -> None:
        self._draw = draw
        self._min_length = draw.num_prompt + draw.params.min_tokens
        self._stops = sorted(draw.stop_token_ids)
        self._always = [word[0] for word in draw.params.bad_words if len(word) == 1]
        # By the token before the last: in most steps none of a sequence's words comes into question.
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        for word in draw.params.bad_words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append(word)

    @classmethod
    def of(cls, draw: SampleRequest) -> "Forbidden | None":
        """What the draw's parameters forbid at any time."""
        asked = draw.params.bad_words or (draw.params.min_tokens and draw.stop_token_ids)
        return cls(draw) if asked else None

    def token_ids(self) -> list[int]:
        """What may not come next; in most steps nothing."""
        tokens = self._always + self._completing()
        return tokens + self._stops if len(self._draw.token_ids) < self._min_length else tokens

    def _completing(self) -> list[int]:
        known, length = self._draw.token_ids, len(self._draw.token_ids) - self._draw.num_prompt
        if not length:
            return []
        return [
            word[-1]
            for word in self._by_last.get(known[-1], ())
            if len(word) - 1 <= length and tuple(known[1 - len(word) :]) == word[:-1]
        ]


def forbid(scores: torch.Tensor, forbidden: Sequence[tuple[int, Forbidden]]) -> None:
    """Sets in ``scores`` [R, V], in place, what each row named may not draw to -inf."""
    if forbidden:
        token_ids = [token_array(one.token_ids(), scores.shape[1]) for _, one in forbidden]
        (places,) = upload_arrays((cells(scores, [row for row, _ in forbidden], token_ids),), scores.device)
        scores.view(-1).index_fill_(0, places, -torch.inf)
