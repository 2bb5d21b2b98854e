"""``Placer``: what it takes to place a request, in its order: names its blocks, asks the index who has them, lets the
policy choose, and remembers what follows from the choice. Does no I/O.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from zlib import crc32

import numpy as np

from quire_router.core.generation import GenerationRequest
from quire_router.placement.engine_table import ArrayCache, Column, EngineTable, Rows
from quire_router.placement.policies import make_policy
from quire_router.placement.prefix_index import (
    MAX_PROMPT_BLOCKS,
    BlockHashes,
    BlockNamespace,
    HashesByNamespace,
    PrefixIndex,
)
from quire_router.placement.query import PlacementDecision, PlacementQuery, PlacementSettings, PrefixMatches
from quire_router.placement.scorers import CandidateView, make_scorers

# Which engine ran the last request of each session. Bounded: the sessions that were quiet longest are forgotten.


SessionKey = tuple[str, str]
"""A tenant and its name for the session: one tenant cannot speak of another's."""


class SessionEngines:
    """Remembers the engines of the ``limit`` sessions that were seen last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._engines: OrderedDict[SessionKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def record(self, key: SessionKey, engine_id: str) -> None:
        """The session's last request went there."""
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)

    def get(self, key: SessionKey) -> str | None:
        """Where its last request went, as far as is known."""
        return self._engines.get(key)


# ``NamespaceGroups``: rows by the names that their engines have for blocks. Of a fleet's rows there is usually one
# group.


RowGroups = list[tuple[BlockNamespace, Rows]]


class NamespaceGroups:
    """Remembers the groups of arrays that cannot be written to: a fleet hands out the same one until it changes, and
    asking each of a thousand engines takes longer than choosing one.
    """

    def __init__(self, namespace_of: Callable[[int], BlockNamespace]) -> None:
        self._namespace_of = namespace_of
        self._known: ArrayCache[RowGroups] = ArrayCache()

    def get(self, rows: Rows) -> RowGroups:
        """Each namespace with its rows."""
        return self._known.get(rows) or self._known.put(rows, self._group(rows))

    def _group(self, rows: Rows) -> RowGroups:
        each = list(map(self._namespace_of, rows.tolist()))
        if each.count(each[0]) == len(each):
            return [(each[0], rows)]
        return [(one, rows[[namespace == one for namespace in each]]) for one in dict.fromkeys(each)]


# A decision explained to people: what each scorer made of the best engines, for a span and for a header.


MAX_EXPLAINED_ENGINES = 4
"""Engines that an explanation tells of."""

MAX_ROUTE_HEADER_BYTES = 1024
"""Bytes of ``x-quire-route``."""

ScoreBreakdown = list[tuple[str, dict[str, float]]]


def explain(query: PlacementQuery, table: EngineTable, settings: PlacementSettings, chosen: int) -> ScoreBreakdown:
    """The terms of ``cost`` for the engines that it finds best, cheapest first, and for the ``chosen`` one; in seconds,
    to a tenth of a millisecond. Another policy's choice is explained by the same terms: what it cost.
    """
    outlook = CandidateView(query, table)
    columns = {name: outlook.score(scorer) for name, scorer in make_scorers(settings).items()}
    total = np.sum(list(columns.values()), axis=0)
    best = np.argsort(total, kind="stable")
    shown = [place for place in best if query.rows[place] == chosen] + [
        place for place in best[:MAX_EXPLAINED_ENGINES] if query.rows[place] != chosen
    ]
    shown = sorted(shown[:MAX_EXPLAINED_ENGINES], key=lambda place: float(total[place]))
    return [
        (str(table.ids[query.rows[place]]), {name: round(float(column[place]), 4) for name, column in columns.items()})
        for place in shown
    ]


def route_attributes(decision: PlacementDecision) -> dict[str, str]:
    """Attributes of the route span beyond those of every decision: one for each engine that is explained."""
    return {
        f"quire.route.{rank}": f"{engine_id} {json.dumps(terms)}"
        for rank, (engine_id, terms) in enumerate(decision.scores, 1)
    }


def route_header(decision: PlacementDecision) -> str:
    """``x-quire-route``: printable ASCII, at most ``MAX_ROUTE_HEADER_BYTES`` bytes; engines that do not fit are left
    out.
    """
    header = f"{_ascii(decision.engine_id)}; policy={decision.policy}; cached={decision.cached_tokens}"
    header = header[:MAX_ROUTE_HEADER_BYTES]
    for engine_id, terms in decision.scores:
        told = " ".join(f"{name}={seconds:g}" for name, seconds in terms.items() if seconds)
        entry = f", {_ascii(engine_id)}: {told or '0'}"
        if len(header) + len(entry) > MAX_ROUTE_HEADER_BYTES:
            break
        header += entry
    return header


def _ascii(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)


QUEUE_AVERAGING_REQUESTS = 64
"""Requests over which the queue that they find is averaged."""
BLOCKS_HASHED_AT_ONCE = 512
"""Blocks of a long prompt that are named in one go, in about 0.3 ms."""


class Placer:
    """Chooses an engine for each request, by the policy that ``settings`` name.

    ``namespace_of`` says by which names a row's engine knows blocks; it must not change for the rows of an array that
    cannot be written to. ``clock`` is the index's, in seconds. ``on_expected`` is called with an engine and the names
    of blocks that it will have soon and did not have, in the order of their prompt.
    """

    def __init__(
        self,
        table: EngineTable,
        index: PrefixIndex,
        settings: PlacementSettings,
        namespace_of: Callable[[int], BlockNamespace],
        clock: Callable[[], float],
    ) -> None:
        self.on_speculative_blocks: Callable[[str, Iterable[bytes]], None] = lambda _engine_id, _names: None
        self._table = table
        self._index = index
        self._settings = settings
        self._policy = make_policy(settings)
        self._namespace_of = namespace_of
        self._groups = NamespaceGroups(namespace_of)
        self._clock = clock
        self._sessions = SessionEngines(settings.max_sessions)
        self._queues: dict[str, float] = {}

    def name(
        self, generation: GenerationRequest, rows: Sequence[int] | Rows, names: HashesByNamespace
    ) -> Iterator[None]:
        """Fills ``names`` with those that ``place`` is going to look up for a long prompt, as far as they are in the
        index. Yields after each ``BLOCKS_HASHED_AT_ONCE``: the names of a long prompt that is cached take milliseconds.
        """
        if len(rows) == 0:
            return
        for namespace, _ in self._groups.get(np.asarray(rows, np.intp)):
            if len(generation.prompt_token_ids) <= BLOCKS_HASHED_AT_ONCE * namespace.block_size:
                continue
            blocks = _get_hashes(names, namespace, generation)
            last = blocks.extend(1)  # of a prompt that is not cached no more are looked up
            while last is not None and self._index.may_contain(last):
                last = blocks.extend(BLOCKS_HASHED_AT_ONCE)
                yield

    def place(
        self,
        generation: GenerationRequest,
        rows: Sequence[int] | Rows,
        names: HashesByNamespace | None = None,
        *,
        explained: bool = False,
    ) -> PlacementDecision | None:
        """Where to run the request, of the ``rows`` that may; None when there are none. ``names`` are those that are
        known already. ``explained`` fills in the decision's terms.
        """
        if len(rows) == 0:
            return None
        allowed = np.asarray(rows, np.intp)
        names = {} if names is None else names
        matches = self._match(generation, allowed, names)
        query = self._query(generation, allowed, matches)
        row = self._policy.choose(query, self._table)
        return PlacementDecision(
            engine_id=self._engine_id(row),
            row=row,
            policy=self._settings.policy,
            cached_tokens=int(matches.device[row] + matches.host[row]),
            scores=explain(query, self._table, self._settings, row) if explained else (),
            block_hashes=names[self._namespace_of(row)],
        )

    def record_dispatch(self, decision: PlacementDecision, generation: GenerationRequest) -> None:
        """The request was sent where the decision says. From now on its blocks are expected there, and the next request
        of its session too.
        """
        self._index.add_speculative(decision.row, decision.block_hashes, self._clock())
        cached_blocks = decision.cached_tokens // self._namespace_of(decision.row).block_size
        self.on_speculative_blocks(decision.engine_id, islice(decision.block_hashes, cached_blocks, MAX_PROMPT_BLOCKS))
        if generation.session:
            self._sessions.record((generation.tenant, generation.session), decision.engine_id)

    def _query(self, generation: GenerationRequest, rows: Rows, matches: PrefixMatches) -> PlacementQuery:
        return PlacementQuery(
            prompt_tokens=len(generation.prompt_token_ids),
            output_tokens=generation.params.max_tokens,
            sequences=generation.params.num_sequences,
            rows=rows,
            matches=matches,
            session_row=self._home(generation),
            mean_queued=self._queue(generation.model, rows),
            tie_break=crc32(generation.request_id.encode()),
            now=self._clock(),
        )

    def _queue(self, model: str, rows: Rows) -> float:
        """How many requests before their first token the model's requests find at an engine, lately, on average."""
        waiting = np.maximum(self._table.requests[rows] - self._table.decoding[rows], 0)
        before = self._queues.get(model, 0.0)
        after = before + (float(waiting.sum()) / len(rows) - before) / QUEUE_AVERAGING_REQUESTS
        self._queues[model] = after
        return after

    def _match(self, generation: GenerationRequest, rows: Rows, names: HashesByNamespace) -> PrefixMatches:
        """What each row has of the prompt, in tokens; ``names`` gets the prompt's blocks in each namespace. Engines
        compute at least the last token of a prompt, whatever is cached.
        """
        device, host = self._find(generation, rows, names)
        most = len(generation.prompt_token_ids) - 1
        device = np.minimum(device, most)
        return PrefixMatches(device, np.minimum(host, most - device))

    def _find(self, generation: GenerationRequest, rows: Rows, names: HashesByNamespace) -> tuple[Column, Column]:
        """Cached tokens in device memory and after them in the host pool, as the index has them."""
        size = len(self._table)
        device, host = np.zeros(size), np.zeros(size)
        groups = self._groups.get(rows)
        for namespace, members in groups:
            found = self._index.match(_get_hashes(names, namespace, generation), self._clock(), size)
            ours = slice(size) if len(groups) == 1 else members
            device[ours] = found.device[ours] * namespace.block_size
            host[ours] = found.host[ours] * namespace.block_size
        return device, host

    def _home(self, generation: GenerationRequest) -> int:
        """The row of the engine that the session was on, -1 where there is none."""
        if not generation.session:
            return -1
        engine_id = self._sessions.get((generation.tenant, generation.session))
        return self._table.row_of(engine_id) if engine_id is not None else -1

    def _engine_id(self, row: int) -> str:
        engine_id = self._table.ids[row]
        assert engine_id is not None, "a row that may run a request has an engine"
        return engine_id


def _get_hashes(names: HashesByNamespace, namespace: BlockNamespace, generation: GenerationRequest) -> BlockHashes:
    if namespace not in names:
        names[namespace] = namespace.hashes(generation.prompt_token_ids, generation.cache_salt)
    return names[namespace]
