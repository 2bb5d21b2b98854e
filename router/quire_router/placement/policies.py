"""Placement policies: ``cost``, which chooses the engine at which a request costs the fewest seconds, and others to
compare it with: the simple ones, and what two other routers do.
"""

from collections.abc import Callable, Mapping
from random import Random

import numpy as np

from quire_router.placement.engine_speed import SpeedCache
from quire_router.placement.engine_table import Column, EngineTable, Rows, column_min
from quire_router.placement.query import (
    PlacementPolicy,
    PlacementQuery,
    PlacementSettings,
    PolicyName,
)
from quire_router.placement.scorers import CandidateView, Scorer, make_scorers

TIE_TOLERANCE = 1e-6
"""Differences below this are none; in seconds, a microsecond. It hides the order in which numbers were added up."""

MUTUAL_DELAY = 2.0
"""Of two requests that do not see each other one delays the other: each counts the one before it and the one after."""

_TIE_BREAKS = 1 << 32


class CostPolicy:
    """The smallest sum of all ``scorers``, in seconds. Chooses from one table, as it caches the speeds of its engines.

    Several routers that choose at one moment would find the same engine. The work that the others have just sent and
    not published yet goes where this choice goes if all choose alike; so engines that are worse by less than that share
    the choice, in the proportions in which none of them could be chosen more often at less cost to all.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = tuple(scorers.values())
        self._speed_cache = SpeedCache()

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        view = CandidateView(query, table, self._speed_cache)
        total = self._sum(view)
        width = MUTUAL_DELAY * table.unseen_tokens * float(view.token_seconds.mean()) if table.unseen_tokens else 0.0
        if width <= TIE_TOLERANCE:
            return int(query.rows[argmin_breaking_ties(total, query.tie_break)])
        return int(query.rows[choose_by_water_filling(total, width, query.tie_break % _TIE_BREAKS / _TIE_BREAKS)])

    def total(self, query: PlacementQuery, table: EngineTable) -> Column:
        """Returns the seconds at each of the query's rows."""
        return self._sum(CandidateView(query, table, self._speed_cache))

    def _sum(self, view: CandidateView) -> Column:
        total = np.zeros(len(view.query.rows))
        for scorer in self._scorers:
            column = view.score(scorer)
            if column is not view.zeros:
                total += column
        return total


class RoundRobin:
    """Each row in turn."""

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
            2 * _queue_scores(table.columns_of(rows).queued())
            + 2 * free
            + 3 * query.cached() / max(query.prompt_tokens, 1)
        )
        return int(rows[argmin_breaking_ties(-score, query.tie_break)])


class SgLang:
    """The fewest requests where the fleet is imbalanced (by more than 32, and the most above 1.1 times the fewest);
    else the longest prefix, if more than half of the prompt is cached; else the fewest requests. The cache-aware policy
    of SGLang's router, ``policies/cache_aware.rs``; some versions send a prompt that no engine has cached to the
    smallest cache instead.
    """

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """See ``PlacementPolicy.choose``."""
        requests, match = table.requests[query.rows], query.cached()
        most, fewest = requests.max(), requests.min()
        imbalanced = most - fewest > 32 and most > 1.1 * fewest
        use_prefix = not imbalanced and match.max() > 0.5 * query.prompt_tokens
        return int(query.rows[argmin_breaking_ties(-match if use_prefix else requests, query.tie_break)])


_FACTORIES: Mapping[PolicyName, Callable[[PlacementSettings], PlacementPolicy]] = {
    "cost": lambda settings: CostPolicy(make_scorers(settings)),
    "round_robin": lambda _: RoundRobin(),
    "least_load": lambda _: LeastLoad(),
    "prefix_only": lambda _: PrefixOnly(),
    "power_of_two": lambda settings: PowerOfTwo(settings.seed),
    "llm_d": lambda _: LlmD(),
    "sglang": lambda _: SgLang(),
}


def make_policy(settings: PlacementSettings) -> PlacementPolicy:
    """Returns a new policy of the settings' name."""
    return _FACTORIES[settings.policy](settings)


def least_loaded(rows: Rows, tie_break: int, table: EngineTable) -> int:
    """The row with the fewest prompt tokens pending; of those, the one with the fewest requests in flight."""
    pending = table.pending_tokens[rows]
    fewest = rows[pending <= pending.min()]
    return int(fewest[argmin_breaking_ties(table.requests[fewest], tie_break)])


def _queue_scores(queue: Column) -> Column:
    span = queue.max() - queue.min()
    return (queue.max() - queue) / span if span > 0 else np.ones(len(queue))


def argmin_breaking_ties(costs: Column, tie_break: int) -> int:
    """Returns the index of the smallest cost. Among equals ``tie_break`` decides: the same every time for one request,
    and spread over all of them for many.
    """
    ties = np.flatnonzero(costs <= column_min(costs) + TIE_TOLERANCE)
    return int(ties[tie_break % len(ties)])


def choose_by_water_filling(costs: Column, width: float, quantile: float) -> int:
    """Returns the index of one of the small costs, the smaller the likelier: if ``width`` of water were poured over the
    costs, each would be chosen in proportion to the depth of the water above it. ``quantile`` from 0 to 1 says which
    part of all the water decides.
    """
    near = np.flatnonzero(costs <= column_min(costs) + max(width, TIE_TOLERANCE))
    if len(near) == 1:
        return int(near[0])
    heights = costs[near]
    order = np.argsort(heights)
    near, heights = near[order], heights[order]
    levels = (width + np.cumsum(heights)) / np.arange(1, len(near) + 1)
    wet = np.count_nonzero(heights < levels)
    depths = np.cumsum(levels[wet - 1] - heights[:wet])
    drawn = np.searchsorted(depths, depths[-1] * quantile, side="right")
    return int(near[min(drawn, wet - 1)])
