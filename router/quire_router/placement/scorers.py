"""What an engine would cost a request, as scorers that add up: each a pure function of what the request would
meet there.

A scorer returns seconds, one number for each of the query's rows, and only differences between rows matter. All are
finite whatever the table holds, as long as that is. One that needs another's asks ``CandidateView.term`` for it, and
one that is zero everywhere is ``CandidateView.nothing``: neither takes any time. Another concern, such as the adapters
that an engine has loaded, is another function here and another entry of ``make_scorers``.
"""

from collections.abc import Callable, Mapping

import numpy as np

from quire_router.placement.engine_speed import SpeedCache
from quire_router.placement.engine_table import Column, EngineColumns, EngineTable, column_max, column_min
from quire_router.placement.query import PlacementQuery, PlacementSettings

# ``CandidateView``: what one request would meet at each engine that may run it, in the columns that several scorers
# need.


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


TYPICAL_OUTPUT = 256
"""Tokens that an output is taken to have: what a client allows says little, as most outputs end by themselves."""

DELAYED_PER_QUEUED = 2.0
"""Requests that are delayed for each one that waits: 1 / (1 - load) in a simple queue, at half load."""

DELAYED_BY_DUPLICATES = 0.1
"""Requests that are delayed although nobody waits: what is computed twice is stored twice, and pushes something out
that is computed again."""

DECODE_WEIGHT = 0.02
"""What a second counts by which an output takes longer, beside a second until a first token: who reads along hardly
notices."""


def make_scorers(settings: PlacementSettings) -> Mapping[str, Scorer]:
    """The terms of the policy ``cost``, by name."""
    return {
        "waiting": waiting,
        "prefill": prefill,
        "neighbours": neighbours,
        "memory": memory,
        "others": others,
        "affinity": affinity_bound(settings.max_affinity_wait),
        "session": session(settings.session_seconds),
    }


def waiting(outlook: CandidateView) -> Column:
    """Until what is pending there is computed: its tokens at that engine's pace, less the time for which the step that
    computes the first of them has been under way.

    The backlog term of additive costs: "active prefill" in Dynamo's ``kv`` router, "token load" in llm-d.
    """
    engines = outlook.engines
    step = np.minimum(engines.computing, engines.pending_tokens) * outlook.token_seconds
    passed = np.minimum(np.maximum(outlook.query.now - engines.stepped, outlook.zeros), step)
    return engines.pending_tokens * outlook.token_seconds - passed


def prefill(outlook: CandidateView) -> Column:
    """Computing what is not cached there of this prompt; a block of the host tier costs a copy."""
    computing = outlook.uncached * outlook.token_seconds + outlook.paces.step_seconds
    return computing if outlook.blocks_to_copy is None else computing + _copying(outlook)


def neighbours(outlook: CandidateView) -> Column:
    """What the sequences that decode there add to each step until this request has its first token; and afterwards,
    what they and its own sequences take from each other, which counts for ``DECODE_WEIGHT``.
    """
    query = outlook.query
    decode_steps = 2 * query.sequences * min(query.output_tokens, TYPICAL_OUTPUT)
    return (1 + outlook.tokens_to_compute * outlook.steps + DECODE_WEIGHT * decode_steps) * outlook.decode_slowdown


def memory(outlook: CandidateView) -> Column:
    """Waiting for sequences to end there, where blocks or places are too few for this request.

    Nothing is admitted while a sequence is swapped out, so those have to come back first. Sequences are taken to end
    evenly over ``TYPICAL_OUTPUT`` steps, and their blocks with them.
    """
    if outlook.shortfall is None:
        return outlook.zeros
    return outlook.shortfall * (TYPICAL_OUTPUT * (outlook.paces.step_seconds + outlook.decode_slowdown))


def others(outlook: CandidateView) -> Column:
    """What computing the prompt there costs those that wait: its seconds, for each of them that it delays.

    In a queue that is served in order, work delays everyone who comes before the queue is next empty. By Little's law
    as many come during a wait as are seen waiting on average, and what delays them lengthens the queue for more. So an
    idle fleet computes a prompt again rather than let it wait for long, and an overloaded one saves whatever it can.
    """
    return _delayed(outlook.query) * outlook.score(prefill)


def affinity_bound(max_wait: float) -> Scorer:
    """A scorer that bounds what following the cache may cost: where a request would wait more than ``max_wait`` seconds
    longer than at the engine with the least wait, what the cache saves counts only up to ``max_wait``, so that such an
    engine never wins by it. The idea is llm-d's ``prefix-cache-affinity-filter``.
    """

    def affinity(outlook: CandidateView) -> Column:
        wait = outlook.score(waiting)
        if (full := outlook.score(memory)) is not outlook.zeros:
            wait = wait + full
        longest = column_min(wait) + max_wait
        if column_max(wait) <= longest:
            return outlook.zeros
        return np.where(wait > longest, np.maximum(_saved(outlook) - max_wait, 0), 0)

    return affinity


def session(seconds: float) -> Scorer:
    """A scorer that keeps a session where it is unless that costs more than ``seconds``: its history is cached there,
    also what the index has not heard of yet.
    """

    def leaving(outlook: CandidateView) -> Column:
        if outlook.query.session_row < 0:
            return outlook.zeros
        away = outlook.query.rows != outlook.query.session_row
        return outlook.zeros if away.all() else away * seconds

    return leaving


def _delayed(query: PlacementQuery) -> float:
    """Requests that one second of computing delays by a second."""
    return DELAYED_PER_QUEUED * query.mean_queued + DELAYED_BY_DUPLICATES


def _copying(outlook: CandidateView) -> Column:
    return (
        outlook.zeros if outlook.blocks_to_copy is None else outlook.blocks_to_copy * outlook.paces.host_block_seconds
    )


def _saved(outlook: CandidateView) -> Column:
    """What the cache is worth there, counted as the scorers count it."""
    own = outlook.cached * outlook.token_seconds - _copying(outlook)
    return (1 + _delayed(outlook.query)) * own + outlook.cached * outlook.steps * outlook.decode_slowdown
