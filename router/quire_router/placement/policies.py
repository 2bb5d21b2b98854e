"""Policies to compare ``cost`` with: the simple ones, and what two other routers do."""

from random import Random

import numpy as np

from quire_router.placement.policy import argmin_breaking_ties
from quire_router.placement.query import PlacementQuery
from quire_router.placement.table import Column, EngineTable, Rows


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        del table
        self._turn += 1
        return int(query.rows[self._turn % len(query.rows)])


class LeastLoad:
    """The fewest prompt tokens pending, then the fewest requests in flight."""

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        return least_loaded(query.rows, query.tie_break, table)


class PrefixOnly:
    """The longest prefix cached, however long the queue is there: what an index without load does."""

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        del table
        return int(query.rows[argmin_breaking_ties(-query.cached(), query.tie_break)])


class PowerOfTwo:
    """The less loaded of two that are drawn at random. Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", 2001.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)  # noqa: S311 - a choice among equals, not a secret

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        count = len(query.rows)
        two = self._random.sample(range(count), min(2, count))
        return least_loaded(query.rows[two], query.tie_break, table)


class LlmD:
    """The highest ``2 · queue + 2 · (1 - kv) + 3 · prefix``: the scorers that llm-d's router has by default, each from
    0 to 1. ``queue`` is 1 where the fewest wait and 0 where the most do, ``kv`` the part of the blocks in use,
    ``prefix`` the part of the prompt that is cached. From ``pkg/epp/config/loader/defaults.go`` of
    llm-d/llm-d-router, whose queue is what an engine's metrics last said; here it is counted at dispatch.
    """

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        rows = query.rows
        total = table.blocks_total[rows]
        free = np.where(total > 0, table.blocks_free[rows] / np.maximum(total, 1), 1)
        score = (
            2 * _shortness(table.columns_of(rows).queued())
            + 2 * free
            + 3 * query.cached() / max(query.prompt_tokens, 1)
        )
        return int(rows[argmin_breaking_ties(-score, query.tie_break)])


class SgLang:
    """The fewest requests where the fleet is imbalanced (by more than 32, and the most above 1.1 times the fewest);
    else the longest prefix, where more than half of the prompt is cached; else the fewest requests. The cache-aware
    policy of SGLang's router, ``policies/cache_aware.rs``; some versions send what nobody has to the smallest cache
    instead.
    """

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        requests, match = table.requests[query.rows], query.cached()
        most, fewest = requests.max(), requests.min()
        imbalanced = most - fewest > 32 and most > 1.1 * fewest
        follows = not imbalanced and match.max() > 0.5 * query.prompt_tokens
        return int(query.rows[argmin_breaking_ties(-match if follows else requests, query.tie_break)])


def least_loaded(rows: Rows, ticket: int, table: EngineTable) -> int:
    """The row with the fewest prompt tokens pending; of those, the one with the fewest requests in flight."""
    pending = table.pending_tokens[rows]
    fewest = rows[pending <= pending.min()]
    return int(fewest[argmin_breaking_ties(table.requests[fewest], ticket)])


def _shortness(queue: Column) -> Column:
    span = queue.max() - queue.min()
    return (queue.max() - queue) / span if span > 0 else np.ones(len(queue))
