"""``CandidateView``: what one request would meet at each engine that may run it, in the columns that several scorers
need.
"""

from collections.abc import Callable

import numpy as np

from quire_router.placement.query import PlacementQuery
from quire_router.placement.speeds import SpeedCache
from quire_router.placement.table import Column, EngineColumns, EngineTable, column_max

Scorer = Callable[["CandidateView"], Column]
"""Seconds, one number for each of the query's rows; ``CandidateView.nothing`` where they are all zero."""


class CandidateView:
    """Columns over ``query.rows``, each computed once for all scorers. None of them is to be written to.

    ``engines`` are the table's columns, ``paces`` theirs, made ``cluster_step_times``, and ``steps`` and
    ``token_seconds`` those of ``EngineSpeeds``. ``cached`` and ``uncached`` are tokens of the prompt that are in either
    tier there, and the others; ``copies`` is how many blocks of them the host tier has, None when none has any.
    ``to_compute`` are the uncached tokens together with those pending. ``slowing`` is what the sequences that decode
    there add to each step, in seconds. ``missing`` is the part of the engine's blocks, or of its places for sequences
    if that is more, that others hold and this request needs; None when nothing is missing anywhere. An engine that did
    not say how many it has lacks none. ``nothing`` is a column of zeros.
    """

    __slots__ = (
        "_terms",
        "blocks_to_copy",
        "cached",
        "decode_slowdown",
        "engines",
        "paces",
        "query",
        "shortfall",
        "steps",
        "token_seconds",
        "tokens_to_compute",
        "uncached",
        "zeros",
    )  # fmt: skip

    def __init__(self, query: PlacementQuery, table: EngineTable, known: SpeedCache | None = None) -> None:
        """``known`` has what was found for earlier requests of the same table."""
        self._terms: dict[Scorer, Column] = {}
        self.query = query
        self.zeros = np.zeros(len(query.rows))
        self.engines = engines = table.columns_of(query.rows)
        speeds = (known or SpeedCache()).get(table, query.rows, engines, query.now)
        self.paces, self.steps, self.token_seconds = speeds.paces, speeds.steps, speeds.token_seconds
        self.decode_slowdown = engines.decoding * speeds.paces.sequence_seconds
        device, host = query.matches.device[query.rows], query.matches.host[query.rows]
        swaps_in = bool(host.any())
        self.cached = device + host if swaps_in else device
        self.blocks_to_copy = host / speeds.block_size if swaps_in else None
        self.uncached = query.prompt_tokens - self.cached
        self.tokens_to_compute = engines.pending_tokens + self.uncached
        needed = engines.pending_tokens + (query.prompt_tokens - device) if swaps_in else self.tokens_to_compute
        self.shortfall = _missing(needed / speeds.block_size, query.sequences, engines)

    def score(self, scorer: Scorer) -> Column:
        """What the scorer finds, which is computed when it is first asked for."""
        term = self._terms.get(scorer)
        if term is None:
            term = self._terms[scorer] = scorer(self)
        return term


def _missing(blocks: Column, sequences: int, engines: EngineColumns) -> Column | None:
    """Where a request needs so many ``blocks`` and places for ``sequences``, with all that is pending there."""
    blocks = blocks - engines.blocks_free
    places = engines.requests + engines.swapped + sequences - engines.max_sequences
    missing = [
        _part(missing, total)
        for missing, total in ((blocks, engines.blocks_total), (places, engines.max_sequences))
        if column_max(missing) > 0
    ]
    return np.maximum(missing[0], missing[-1]) if missing else None


def _part(missing: Column, total: Column) -> Column:
    return np.where(total > 0, np.maximum(missing, 0) / np.maximum(total, 1), 0)
