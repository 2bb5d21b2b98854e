"""``Outlook``: what one request would meet at each engine that may run it, in the columns that several scorers need."""

import numpy as np

from quire_router.placement.likeness import alike
from quire_router.placement.query import Query
from quire_router.placement.table import Column, Columns, EngineTable


class Outlook:
    """Columns over ``query.rows``, each computed once for all scorers.

    ``engines`` are the table's columns, with paces made ``alike``. ``device`` and ``cached`` are tokens of the prompt
    that are in device memory there, and in either tier; ``uncached`` the others, and ``copies`` the host tier's blocks.
    ``token_seconds`` is what a prompt token takes in a step that is full of them, and ``steps`` its part of such a
    step. ``slowing`` is what the sequences that decode there add to each step, in seconds. ``missing`` is the part of
    the engine's blocks, or of its places for sequences if that is more, that others hold and this request needs; None
    when nothing is missing anywhere. An engine that did not say how many it has lacks none.
    """

    __slots__ = (
        "cached", "copies", "device", "engines", "missing", "query", "slowing", "steps", "token_seconds", "uncached",
    )  # fmt: skip

    def __init__(self, query: Query, table: EngineTable) -> None:
        self.query = query
        self.engines = engines = alike(table.at(query.rows), query.now)
        host = query.matches.host[query.rows]
        self.device = query.matches.device[query.rows]
        self.cached = self.device + host
        self.uncached = query.prompt_tokens - self.cached
        block_size = np.maximum(engines.block_size, 1)
        self.copies = host / block_size
        self.steps = 1 / np.maximum(engines.step_tokens, 1)
        self.token_seconds = engines.token_seconds + engines.step_seconds * self.steps
        self.slowing = engines.decoding * engines.sequence_seconds
        blocks = (engines.pending_tokens + (query.prompt_tokens - self.device)) / block_size - engines.blocks_free
        places = engines.requests + engines.swapped + query.sequences - engines.max_sequences
        self.missing = _missing(blocks, places, engines) if max(blocks.max(), places.max()) > 0 else None


def _missing(blocks: Column, places: Column, engines: Columns) -> Column:
    return np.maximum(_part(blocks, engines.blocks_total), _part(places, engines.max_sequences))


def _part(missing: Column, total: Column) -> Column:
    return np.where(total > 0, np.maximum(missing, 0) / np.maximum(total, 1), 0)
