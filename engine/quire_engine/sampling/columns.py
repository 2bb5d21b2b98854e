"""The sampling parameters of a worker's rows, in one array for each, so that those of a step are a gather."""

from math import inf, log

import numpy as np
import numpy.typing as npt

from quire_engine.core.step import SampleRequest
from quire_engine.sampling.metadata import SamplingMetadata, TokenArray, row_keys

_FIRST_ROWS = 64


class SamplingColumns:
    """Row by row what ``SamplingMetadata`` has of a draw, and whether a draw is plain: of the model's own logits,
    nothing banned, and nothing asked for but the token.
    """

    def __init__(self) -> None:
        self._temperature = np.zeros(_FIRST_ROWS, np.float32)
        self._top_k = np.zeros(_FIRST_ROWS, np.int64)
        self._top_p = np.ones(_FIRST_ROWS, np.float64)
        self._log_min_p = np.zeros(_FIRST_ROWS, np.float32)
        self._seeds = np.zeros(_FIRST_ROWS, np.uint64)
        self._is_plain = np.zeros(_FIRST_ROWS, np.bool_)

    def put(self, row: int, request: SampleRequest | None) -> None:
        """Takes in the parameters of a row; None for one that nothing is drawn for."""
        if row >= len(self._is_plain):
            self._add_rows(row + 1)
        self._is_plain[row] = request is not None and _is_plain(request)
        if request is not None:
            params = request.params
            self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
            self._log_min_p[row] = log(params.min_p) if params.min_p else -inf
            self._seeds[row] = request.seed

    def are_plain(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether all draws of ``rows`` are plain."""
        return bool(self._is_plain[rows].all())

    def metadata(self, rows: npt.NDArray[np.int64], positions: TokenArray) -> SamplingMetadata | None:
        """Those of draws for ``rows``, of the tokens at ``positions``; None if all are greedy."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        keys = row_keys(self._seeds[rows], positions)
        return SamplingMetadata(temperature, self._top_k[rows], self._top_p[rows], self._log_min_p[rows], keys)

    def _add_rows(self, count: int) -> None:
        more = max(count, 2 * len(self._is_plain)) - len(self._is_plain)
        for name, column in vars(self).items():
            setattr(self, name, np.pad(column, (0, more)))


def _is_plain(request: SampleRequest) -> bool:
    params = request.params
    is_penalised = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    bans = params.bad_words or params.logit_bias or (params.min_tokens and request.stop_token_ids)
    asks_more = request.grammar is not None or request.num_candidates or params.wants_logprobs
    return not (is_penalised or bans or asks_more)
