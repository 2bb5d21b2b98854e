"""What is to be placed, and what is cached of it where. Plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from quire_router.placement.engine_table import Column, EngineTable, Rows, column_min


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Leading tokens of one prompt that engines have cached, a number for each row of the table: ``device`` in device
    memory from the first token on, and ``host`` more that follow and that at least the host pool has.
    """

    device: Column
    host: Column


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """One request as placement sees it: its prompt's tokens and the most it may draw, how many sequences it becomes,
    which ``rows`` of the table may run it (at least one), and what they have cached of it. ``home`` is the row that the
    last request of its session went to, -1 where there is none. ``queue`` is how many requests an engine has before
    their first token, as recent requests found it on average. ``ticket`` is a number of its own, by which it falls to
    one of several engines that are equally good. ``now`` is the table's time, in seconds.
    """

    prompt_tokens: int
    output_tokens: int
    sequences: int
    rows: Rows
    matches: PrefixMatches
    session_row: int = -1
    mean_queued: float = 0.0
    tie_break: int = 0
    now: float = 0.0

    def cached(self) -> Column:
        """Tokens of the prompt that either tier has, at each of the rows."""
        return self.matches.device[self.rows] + self.matches.host[self.rows]


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """``engine_id`` is where to run. ``terms`` says for some of the best engines what each scorer made of them, in
    seconds, best first, for people. ``cached_tokens`` are those of the prompt that it should find there, and
    ``block_hashes`` the names of all its full blocks there.
    """

    engine_id: str
    row: int
    policy: str
    cached_tokens: int
    scores: Sequence[tuple[str, dict[str, float]]] = field(default=())
    block_hashes: Iterable[bytes] = field(default=(), repr=False)


# What a policy is: it chooses one of the rows that may run a request. And what policies need: fair choices among those
# that are equally good, or nearly.


TIE_TOLERANCE = 1e-6
"""Differences below this are none; in seconds, a microsecond. It hides the order in which numbers were added up."""


class PlacementPolicy(Protocol):
    """A way to choose. What it remembers from one choice to the next is its own."""

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """One of ``query.rows``."""
        ...


def argmin_breaking_ties(costs: Column, ticket: int) -> int:
    """The position of the smallest number. Among equals the ``ticket`` decides: the same every time for one request,
    and spread over all of them for many.
    """
    ties = np.flatnonzero(costs <= column_min(costs) + TIE_TOLERANCE)
    return int(ties[ticket % len(ties)])


def spread(costs: Column, width: float, part: float) -> int:
    """The position of one of the small numbers, the smaller the likelier: where ``width`` of water would stand if it
    were poured over them, each is chosen by as large a part of all ``part`` from 0 to 1 as there is water above it.
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
    drawn = np.searchsorted(depths, depths[-1] * part, side="right")
    return int(near[min(drawn, wet - 1)])


# How placement is set up. Plain data; the command line's flags of the same names fill it in.


PolicyName = Literal["cost", "round_robin", "least_load", "prefix_only", "power_of_two", "llm_d", "sglang"]


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """``policy`` chooses. ``max_affinity_wait`` is how many seconds longer than necessary a request may wait for the
    sake of what is cached, and ``session_seconds`` what keeping a session on its engine is worth, both for ``cost``.
    ``max_sessions`` are remembered. ``seed`` is for policies that draw.
    """

    policy: PolicyName = "cost"
    max_affinity_wait: float = 20.0
    session_seconds: float = 0.5
    max_sessions: int = 65_536
    seed: int = 0
