"""What is to be placed, and what is cached of it where. Plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire_router.placement.table import Column, Rows


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
