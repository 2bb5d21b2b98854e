"""Which engine a request goes to: the question (``PlacementQuery``), the scorers, which say what the request would cost
at each engine, and the policies, which choose. ``cost`` takes the engine where the sum of all scorers is smallest; the
other policies are there to compare it with: simple ones, and what two other routers do.

A scorer is a pure function of a ``CandidateView``. It returns seconds, one number for each of the query's rows, and
only differences between rows matter. All are finite as long as the table's numbers are. A scorer that needs another's
result gets it from ``CandidateView.score``, and one that is zero everywhere returns ``CandidateView.zeros``: neither
takes any time. Another concern is another function here and another entry of ``make_scorers``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

import numpy as np

from quire_router.placement.engine_table import (
    Column,
    EngineColumns,
    EngineTable,
    Rows,
    SpeedCache,
    column_max,
    column_min,
)

PolicyName = Literal["cost", "round_robin", "least_load", "prefix_only", "power_of_two", "llm_d", "sglang"]


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Leading tokens of one prompt that engines have cached, a number for each row of the table: ``device`` in device
    memory from the first token on, and ``host`` more that follow and that at least the host pool has.
    """

    device: Column
    host: Column


@dataclass(frozen=True, slots=True)
class LoRAColumns:
    """For a request with an adapter, and each of its query's rows: whether the adapter is in use there, and whether as
    many adapters are as can be at once.
    """

    active: Column
    full: Column


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """One request as placement sees it: its prompt's tokens and the most it may draw, how many sequences it becomes,
    which ``rows`` of the table may run it (at least one), and what they have cached of it. ``session_row`` is the row
    that the last request of its session went to, -1 if there is none. ``mean_queued`` is how many requests an engine
    has before their first token, as recent requests found it on average. ``tie_break`` is a number of the request's
    own, which decides between engines that are equally good. ``now`` is the table's time, in seconds. ``lora`` is None
    for a request without an adapter.
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
    lora: LoRAColumns | None = None

    def cached(self) -> Column:
        """Returns how many tokens of the prompt either tier has, at each of the rows."""
        return self.matches.device[self.rows] + self.matches.host[self.rows]


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


Scorer = Callable[["CandidateView"], Column]
"""Seconds, one number for each of the query's rows; ``CandidateView.zeros`` if they are all zero."""

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

    def _sum(self, view: "CandidateView") -> Column:
        total = np.zeros(len(view.query.rows))
        for scorer in self._scorers:
            column = view.score(scorer)
            if column is not view.zeros:
                total += column
        return total


TYPICAL_OUTPUT = 256
"""Tokens that an output is taken to have: what a client allows says little, as most outputs end by themselves."""

DELAYED_PER_QUEUED = 2.0
"""Requests that are delayed for each one that waits: 1 / (1 - load) in a simple queue, at half load."""

DELAYED_BY_DUPLICATES = 0.1
"""Requests that are delayed although none waits: what is computed twice is stored twice, and evicts something that is
computed again."""

LORA_LOAD_SECONDS = 0.02
"""An adapter comes into a slot: some ten megabytes or so are copied, and read before if they are not in memory."""

DECODE_WEIGHT = 0.02
"""Weight of a second by which an output takes longer, relative to a second until a first token: a person who reads
along hardly notices."""


class CandidateView:
    """What one request would meet at each engine that may run it: columns over ``query.rows``, each computed once for
    all scorers. They must not be written to.

    ``engines`` are the table's columns, and ``step_times`` those of their ``EngineSpeeds``. ``steps_per_token`` is the
    part that one prompt token is of the prompt tokens that the engine gives to a step now, and ``token_seconds`` the
    time of one, with that part of the step's own time. ``cached`` and ``uncached`` are the tokens of the prompt that
    either tier has there, and the others; ``blocks_to_copy`` is how many blocks of them the host tier has, None if no
    engine has any there.
    ``tokens_to_compute`` are the uncached tokens and those pending. ``decode_slowdown`` is what the sequences that
    decode there add to each step, in seconds. ``shortfall`` is the part of the engine's blocks, or of its
    ``max_sequences`` if that is more, that others hold and this request needs; None if no engine lacks anything. An
    engine that did not report how many it has lacks none. ``zeros`` is a column of zeros.
    """

    __slots__ = (
        "_scores",
        "blocks_to_copy",
        "cached",
        "decode_slowdown",
        "engines",
        "query",
        "shortfall",
        "step_times",
        "steps_per_token",
        "token_seconds",
        "tokens_to_compute",
        "uncached",
        "zeros",
    )  # fmt: skip

    def __init__(self, query: PlacementQuery, table: EngineTable, speed_cache: SpeedCache | None = None) -> None:
        """``speed_cache`` has the speeds that earlier requests of the same table needed."""
        self._scores: dict[Scorer, Column] = {}
        self.query = query
        self.zeros = np.zeros(len(query.rows))
        self.engines = engines = table.columns_of(query.rows)
        speeds = (speed_cache or SpeedCache()).get(table, query.rows, engines, query.now)
        self.step_times = speeds.step_times
        self.steps_per_token = 1 / np.maximum(engines.prompt_tokens_per_step, 1.0)
        self.token_seconds = speeds.step_times.token_seconds + speeds.step_times.step_seconds * self.steps_per_token
        self.decode_slowdown = engines.decoding * speeds.step_times.sequence_seconds
        device, host = query.matches.device[query.rows], query.matches.host[query.rows]
        swaps_in = bool(host.any())
        self.cached = device + host if swaps_in else device
        self.blocks_to_copy = host / speeds.block_size if swaps_in else None
        self.uncached = query.prompt_tokens - self.cached
        self.tokens_to_compute = engines.pending_tokens + self.uncached
        needed = engines.pending_tokens + (query.prompt_tokens - device) if swaps_in else self.tokens_to_compute
        self.shortfall = _compute_shortfall(needed / speeds.block_size, query.sequences, engines)

    def score(self, scorer: Scorer) -> Column:
        """Returns the scorer's column, which is computed at the first call."""
        column = self._scores.get(scorer)
        if column is None:
            column = self._scores[scorer] = scorer(self)
        return column


def make_scorers(settings: PlacementSettings) -> Mapping[str, Scorer]:
    """Returns the scorers of the policy ``cost``, by name."""
    return {
        "waiting": waiting,
        "prefill": prefill,
        "neighbours": neighbours,
        "memory": memory,
        "lora": lora,
        "others": others,
        "affinity": affinity_bound(settings.max_affinity_wait),
        "session": session(settings.session_seconds),
    }


def waiting(view: CandidateView) -> Column:
    """Until what is pending there is computed: its tokens at that engine's speed, less the time that has passed since
    the step that computes the first of them began.

    The backlog score of additive costs: "active prefill" in Dynamo's ``kv`` router, "token load" in llm-d.
    """
    engines = view.engines
    step = np.minimum(engines.computing, engines.pending_tokens) * view.token_seconds
    passed = np.minimum(np.maximum(view.query.now - engines.stepped, view.zeros), step)
    return engines.pending_tokens * view.token_seconds - passed


def prefill(view: CandidateView) -> Column:
    """Computing what is not cached there of this prompt; a block of the host tier costs a copy."""
    computing = view.uncached * view.token_seconds + view.step_times.step_seconds
    return computing if view.blocks_to_copy is None else computing + _copy_seconds(view)


def neighbours(view: CandidateView) -> Column:
    """What the sequences that decode there add to each step until this request has its first token; and afterwards,
    what they and its own sequences take from each other, which counts for ``DECODE_WEIGHT``.
    """
    query = view.query
    decode_steps = 2 * query.sequences * min(query.output_tokens, TYPICAL_OUTPUT)
    return (1 + view.tokens_to_compute * view.steps_per_token + DECODE_WEIGHT * decode_steps) * view.decode_slowdown


def memory(view: CandidateView) -> Column:
    """Waiting for sequences to end there, if blocks or sequence slots are too few for this request.

    Nothing is admitted while a sequence is swapped out, so those are swapped in first. Sequences are taken to end
    evenly over ``TYPICAL_OUTPUT`` steps, and their blocks with them.
    """
    if view.shortfall is None:
        return view.zeros
    return view.shortfall * (TYPICAL_OUTPUT * (view.step_times.step_seconds + view.decode_slowdown))


def lora(view: CandidateView) -> Column:
    """Waiting for the request's adapter, where it is not in use: until it is in its slot, or, where others have all
    slots, until the sequences of one of these have ended.

    The idea is that of the Gateway API Inference Extension's ``lora-affinity-scorer``.
    """
    columns = view.query.lora
    if columns is None:
        return view.zeros
    until_free = TYPICAL_OUTPUT * (view.step_times.step_seconds + view.decode_slowdown)
    return np.where(columns.active, 0.0, LORA_LOAD_SECONDS + np.where(columns.full, until_free, 0.0))


def others(view: CandidateView) -> Column:
    """What computing the prompt there costs other requests: its seconds, for each of them that it delays.

    In a queue that is served in order, work delays every request that comes before the queue is next empty. By Little's
    law as many come during a wait as are seen waiting on average, and what delays them lengthens the queue for more. So
    an idle fleet computes a prompt again rather than let it wait for long, and an overloaded one saves whatever it can.
    """
    return _delayed_requests(view.query) * view.score(prefill)


def affinity_bound(max_wait: float) -> Scorer:
    """A scorer that bounds what following the cache may cost: where a request would wait more than ``max_wait`` seconds
    longer than at the engine with the least wait, what the cache saves counts only up to ``max_wait``, so that such an
    engine never wins by it. The idea is llm-d's ``prefix-cache-affinity-filter``.
    """

    def affinity(view: CandidateView) -> Column:
        wait = view.score(waiting)
        if (full := view.score(memory)) is not view.zeros:
            wait = wait + full
        longest = column_min(wait) + max_wait
        if column_max(wait) <= longest:
            return view.zeros
        return np.where(wait > longest, np.maximum(_cache_savings(view) - max_wait, 0), 0)

    return affinity


def session(seconds: float) -> Scorer:
    """A scorer that keeps a session where it is unless that costs more than ``seconds``: its history is cached there,
    also what the index does not have yet.
    """

    def session_cost(view: CandidateView) -> Column:
        if view.query.session_row < 0:
            return view.zeros
        elsewhere = view.query.rows != view.query.session_row
        return view.zeros if elsewhere.all() else elsewhere * seconds

    return session_cost


def _delayed_requests(query: PlacementQuery) -> float:
    """Returns how many requests one second of computing delays by a second."""
    return DELAYED_PER_QUEUED * query.mean_queued + DELAYED_BY_DUPLICATES


def _copy_seconds(view: CandidateView) -> Column:
    return view.zeros if view.blocks_to_copy is None else view.blocks_to_copy * view.step_times.host_block_seconds


def _cache_savings(view: CandidateView) -> Column:
    """Returns the seconds that the cache saves there, as the scorers count them."""
    own = view.cached * view.token_seconds - _copy_seconds(view)
    return (1 + _delayed_requests(view.query)) * own + view.cached * view.steps_per_token * view.decode_slowdown


def _compute_shortfall(blocks: Column, sequences: int, engines: EngineColumns) -> Column | None:
    """Returns the ``shortfall`` of a request that, with all that is pending, needs ``blocks`` and ``sequences``."""
    blocks = blocks - engines.blocks_free
    slots = engines.requests + engines.swapped + sequences - engines.max_sequences
    missing = [
        _fraction(missing, total)
        for missing, total in ((blocks, engines.blocks_total), (slots, engines.max_sequences))
        if column_max(missing) > 0
    ]
    return np.maximum(missing[0], missing[-1]) if missing else None


def _fraction(missing: Column, total: Column) -> Column:
    return np.where(total > 0, np.maximum(missing, 0) / np.maximum(total, 1), 0)


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
    llm-d/llm-d-router, whose queue is as old as the last scrape of an engine's metrics; here it is counted at dispatch.
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
