"""What a request would cost at each engine, as scorers that add up: each a pure function of a ``CandidateView``.

A scorer returns seconds, one number for each of the query's rows, and only differences between rows matter. All are
finite as long as the table's numbers are. A scorer that needs another's result gets it from ``CandidateView.score``,
and one that is zero everywhere returns ``CandidateView.zeros``: neither takes any time. Another concern, such as the
adapters that an engine has loaded, is another function here and another entry of ``make_scorers``.
"""

from collections.abc import Callable, Mapping

import numpy as np

from quire_router.placement.engine_speed import SpeedCache
from quire_router.placement.engine_table import Column, EngineColumns, EngineTable, column_max, column_min
from quire_router.placement.query import PlacementQuery, PlacementSettings

Scorer = Callable[["CandidateView"], Column]
"""Seconds, one number for each of the query's rows; ``CandidateView.zeros`` if they are all zero."""

TYPICAL_OUTPUT = 256
"""Tokens that an output is taken to have: what a client allows says little, as most outputs end by themselves."""

DELAYED_PER_QUEUED = 2.0
"""Requests that are delayed for each one that waits: 1 / (1 - load) in a simple queue, at half load."""

DELAYED_BY_DUPLICATES = 0.1
"""Requests that are delayed although none waits: what is computed twice is stored twice, and evicts something that is
computed again."""

DECODE_WEIGHT = 0.02
"""Weight of a second by which an output takes longer, relative to a second until a first token: a person who reads
along hardly notices."""


class CandidateView:
    """What one request would meet at each engine that may run it: columns over ``query.rows``, each computed once for
    all scorers. They must not be written to.

    ``engines`` are the table's columns; ``step_times``, ``steps_per_token`` and ``token_seconds`` are those of their
    ``EngineSpeeds``. ``cached`` and ``uncached`` are the tokens of the prompt that either tier has there, and the
    others; ``blocks_to_copy`` is how many blocks of them the host tier has, None if no engine has any there.
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
        self.step_times, self.steps_per_token, self.token_seconds = (
            speeds.step_times,
            speeds.steps_per_token,
            speeds.token_seconds,
        )
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
    evenly over ``TYPICAL_OUTPUT`` steps_per_token, and their blocks with them.
    """
    if view.shortfall is None:
        return view.zeros
    return view.shortfall * (TYPICAL_OUTPUT * (view.step_times.step_seconds + view.decode_slowdown))


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
