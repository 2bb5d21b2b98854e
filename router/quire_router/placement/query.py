"""What is placed and how: the request as placement sees it, what engines have cached of it, the decision, the settings,
and what a policy is, with the tie breaks that all policies share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire_router.placement.engine_table import Column, EngineTable, Rows

PolicyName = Literal["cost", "round_robin", "least_load", "prefix_only", "power_of_two", "llm_d", "sglang"]


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
    which ``rows`` of the table may run it (at least one), and what they have cached of it. ``session_row`` is the row
    that the last request of its session went to, -1 if there is none. ``mean_queued`` is how many requests an engine
    has before their first token, as recent requests found it on average. ``tie_break`` is a number of the request's
    own, which decides between engines that are equally good. ``now`` is the table's time, in seconds.
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
        """Returns how many tokens of the prompt either tier has, at each of the rows."""
        return self.matches.device[self.rows] + self.matches.host[self.rows]


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """``engine_id`` is where to run. ``scores`` has for some of the best engines what each scorer returned for them, in
    seconds, best first, as an explanation. ``cached_tokens`` are those of the prompt that should be cached there, and
    ``block_hashes`` those of all its full blocks there.
    """

    engine_id: str
    row: int
    policy: str
    cached_tokens: int
    scores: Sequence[tuple[str, dict[str, float]]] = field(default=())
    block_hashes: Iterable[bytes] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """How placement is set up; the command line's flags of the same names fill it in. ``policy`` chooses.
    ``max_affinity_wait`` is how many seconds longer than necessary a request may wait for the sake of what is cached,
    and ``session_seconds`` what keeping a session on its engine is worth, both for ``cost``. ``max_sessions`` are
    remembered. ``seed`` is for policies that draw.
    """

    policy: PolicyName = "cost"
    max_affinity_wait: float = 20.0
    session_seconds: float = 0.5
    max_sessions: int = 65_536
    seed: int = 0


class PlacementPolicy(Protocol):
    """Chooses one of the rows that may run a request. May keep state between choices."""

    def choose(self, query: PlacementQuery, table: EngineTable) -> int:
        """Returns one of ``query.rows``."""
        ...
