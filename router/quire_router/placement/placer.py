"""Placing a request: its blocks are hashed, the index says which engines have them, the policy chooses, and what
follows from the choice is recorded. Decisions are explained for spans and for the header ``x-quire-route``. Does no
I/O.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

import numpy as np

from quire_router.core.generation import GenerationRequest, LoRA
from quire_router.placement.engine_table import ArrayCache, Column, EngineTable, Rows
from quire_router.placement.policies import (
    CandidateView,
    LoRAColumns,
    PlacementQuery,
    PlacementSettings,
    PrefixMatches,
    make_policy,
    make_scorers,
)
from quire_router.placement.prefix_index import (
    MAX_PROMPT_BLOCKS,
    BlockHashes,
    BlockNamespace,
    HashesByNamespace,
    PrefixIndex,
)

SessionKey = tuple[str, str]
"""A tenant and its name for the session: a tenant cannot refer to another one's."""

RowGroups = list[tuple[BlockNamespace, Rows]]

ScoreBreakdown = list[tuple[str, dict[str, float]]]

QUEUE_AVERAGING_REQUESTS = 64
"""Requests over which the queue that they find is averaged."""

BLOCKS_HASHED_AT_ONCE = 512
"""Blocks of a long prompt that are hashed without a pause, in about 0.3 ms."""

MAX_EXPLAINED_ENGINES = 4
"""Engines that an explanation covers."""

MAX_ROUTE_HEADER_BYTES = 1024
"""Most bytes of ``x-quire-route``."""


class Placer:
    """Chooses an engine for each request, by the policy that ``settings`` name.

    ``namespace_of`` returns the namespace of a row's engine; it must not change for the rows of a read-only array.
    ``clock`` is the index's, in seconds. ``on_speculative_blocks`` is called with an engine and the hashes of blocks
    that it will have soon and did not have, in the order of their prompt. ``lora_columns`` returns what the engines of
    some rows do with adapters, None if that is not known.
    """

    def __init__(
        self,
        table: EngineTable,
        index: PrefixIndex,
        settings: PlacementSettings,
        namespace_of: Callable[[int], BlockNamespace],
        clock: Callable[[], float],
    ) -> None:
        self.lora_columns: Callable[[Rows, LoRA], LoRAColumns | None] = lambda _rows, _lora: None
        self.on_speculative_blocks: Callable[[str, Iterable[bytes]], None] = lambda _engine_id, _hashes: None
        self._table = table
        self._index = index
        self._settings = settings
        self._policy = make_policy(settings)
        self._namespace_of = namespace_of
        self._groups = NamespaceGroups(namespace_of)
        self._clock = clock
        self._sessions = SessionEngines(settings.max_sessions)
        self._mean_queued: dict[str, float] = {}

    def compute_hashes(
        self, generation: GenerationRequest, rows: Sequence[int] | Rows, hashes: HashesByNamespace
    ) -> Iterator[None]:
        """Fills ``hashes`` with those that ``place`` is going to look up for a long prompt, as far as they are in the
        index. Yields after each ``BLOCKS_HASHED_AT_ONCE``: hashing a long prompt that is cached takes milliseconds.
        """
        if len(rows) == 0:
            return
        for namespace, _ in self._groups.get(np.asarray(rows, np.intp)):
            if len(generation.prompt_token_ids) <= BLOCKS_HASHED_AT_ONCE * namespace.block_size:
                continue
            blocks = _get_hashes(hashes, namespace, generation)
            last = blocks.extend(1)  # of a prompt that is not cached no more are looked up
            while last is not None and self._index.may_contain(last):
                last = blocks.extend(BLOCKS_HASHED_AT_ONCE)
                yield

    def place(
        self,
        generation: GenerationRequest,
        rows: Sequence[int] | Rows,
        hashes: HashesByNamespace | None = None,
        *,
        explained: bool = False,
    ) -> "PlacementDecision | None":
        """Returns where to run the request, of the ``rows`` that may; None if there are none. ``hashes`` has those that
        are computed already. ``explained`` fills in the decision's scores.
        """
        if len(rows) == 0:
            return None
        allowed = np.asarray(rows, np.intp)
        hashes = {} if hashes is None else hashes
        matches = self._match(generation, allowed, hashes)
        query = self._query(generation, allowed, matches)
        row = self._policy.choose(query, self._table)
        return PlacementDecision(
            engine_id=self._engine_id(row),
            row=row,
            policy=self._settings.policy,
            cached_tokens=int(matches.device[row] + matches.host[row]),
            scores=explain(query, self._table, self._settings, row) if explained else (),
            block_hashes=hashes[self._namespace_of(row)],
            left=self._left_engine(generation, allowed),
        )

    def record_dispatch(self, decision: "PlacementDecision", generation: GenerationRequest) -> None:
        """Records that the request was sent where the decision says: its blocks are expected there from now on, and so
        is the next request of its session.
        """
        self._index.add_speculative(decision.row, decision.block_hashes, self._clock())
        cached_blocks = decision.cached_tokens // self._namespace_of(decision.row).block_size
        self.on_speculative_blocks(decision.engine_id, islice(decision.block_hashes, cached_blocks, MAX_PROMPT_BLOCKS))
        if generation.session:
            self._sessions.record((generation.tenant, generation.session), decision.engine_id)

    def _query(self, generation: GenerationRequest, rows: Rows, matches: PrefixMatches) -> PlacementQuery:
        lora = generation.lora
        return PlacementQuery(
            prompt_tokens=len(generation.prompt_token_ids),
            output_tokens=generation.params.max_tokens,
            sequences=generation.params.num_sequences,
            rows=rows,
            matches=matches,
            session_row=self._session_row(generation),
            mean_queued=self._update_mean_queued(generation, rows),
            tie_break=crc32(generation.request_id.encode()),
            now=self._clock(),
            lora=None if lora is None else self.lora_columns(rows, lora),
        )

    def _update_mean_queued(self, generation: GenerationRequest, rows: Rows) -> float:
        """Returns how many requests before their first token the model's requests found at an engine lately, on
        average, this one included unless it is best effort: that comes when there are few.
        """
        model = generation.model
        if generation.best_effort:
            return self._mean_queued.get(model, 0.0)
        waiting = np.maximum(self._table.requests[rows] - self._table.decoding[rows], 0)
        before = self._mean_queued.get(model, 0.0)
        after = before + (float(waiting.sum()) / len(rows) - before) / QUEUE_AVERAGING_REQUESTS
        self._mean_queued[model] = after
        return after

    def _match(self, generation: GenerationRequest, rows: Rows, hashes: HashesByNamespace) -> PrefixMatches:
        """Returns what each row has of the prompt, in tokens; ``hashes`` gets the prompt's blocks in each namespace.
        Engines compute at least the last token of a prompt, whatever is cached.
        """
        device, host = self._match_blocks(generation, rows, hashes)
        most = len(generation.prompt_token_ids) - 1
        device = np.minimum(device, most)
        return PrefixMatches(device, np.minimum(host, most - device))

    def _match_blocks(
        self, generation: GenerationRequest, rows: Rows, hashes: HashesByNamespace
    ) -> tuple[Column, Column]:
        """Returns the cached tokens in device memory and after them in the host pool, as the index has them."""
        size = len(self._table)
        device, host = np.zeros(size), np.zeros(size)
        groups = self._groups.get(rows)
        for namespace, members in groups:
            found = self._index.match(_get_hashes(hashes, namespace, generation), self._clock(), size)
            selected = slice(size) if len(groups) == 1 else members
            device[selected] = found.device[selected] * namespace.block_size
            host[selected] = found.host[selected] * namespace.block_size
        return device, host

    def _session_row(self, generation: GenerationRequest) -> int:
        """Returns the row of the engine that the session was on, -1 if there is none."""
        if not generation.session:
            return -1
        engine_id = self._sessions.get((generation.tenant, generation.session))
        return self._table.row_of(engine_id) if engine_id is not None else -1

    def _left_engine(self, generation: GenerationRequest, rows: Rows) -> str:
        """Returns the engine that the session was on and that can run nothing now; empty if there is none."""
        if not generation.session:
            return ""
        engine_id = self._sessions.get((generation.tenant, generation.session)) or ""
        return "" if self._table.row_of(engine_id) in rows else engine_id

    def _engine_id(self, row: int) -> str:
        engine_id = self._table.ids[row]
        assert engine_id is not None, "a row that may run a request has an engine"
        return engine_id


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """``engine_id`` is where to run. ``scores`` has for some of the best engines what each scorer returned for them, in
    seconds, best first, as an explanation. ``cached_tokens`` are those of the prompt that should be cached there, and
    ``block_hashes`` those of all its full blocks there. What the session had cached at the engine ``left`` is gone,
    with that engine or for now; empty if there is none.
    """

    engine_id: str
    row: int
    policy: str
    cached_tokens: int
    scores: Sequence[tuple[str, dict[str, float]]] = field(default=())
    block_hashes: Iterable[bytes] = field(default=(), repr=False)
    left: str = ""


def _get_hashes(hashes: HashesByNamespace, namespace: BlockNamespace, generation: GenerationRequest) -> BlockHashes:
    if namespace not in hashes:
        digest = b"" if generation.lora is None else generation.lora.digest
        hashes[namespace] = namespace.hashes(generation.prompt_token_ids, generation.cache_salt, digest)
    return hashes[namespace]


class SessionEngines:
    """Which engine ran the last request of each session. Bounded: of more than ``limit`` sessions, those that were idle
    longest are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._engines: OrderedDict[SessionKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def record(self, key: SessionKey, engine_id: str) -> None:
        """Records where the session's last request went."""
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)

    def get(self, key: SessionKey) -> str | None:
        """Returns the engine of its last request, None if it is not known."""
        return self._engines.get(key)


class NamespaceGroups:
    """Groups rows by the namespace of their engines' block hashes; usually there is one group. The groups of read-only
    arrays are cached: a pool hands out the same one until it changes, and asking each of a thousand engines takes
    longer than choosing one.
    """

    def __init__(self, namespace_of: Callable[[int], BlockNamespace]) -> None:
        self._namespace_of = namespace_of
        self._cache: ArrayCache[RowGroups] = ArrayCache()

    def get(self, rows: Rows) -> RowGroups:
        """Returns each namespace with its rows."""
        return self._cache.get(rows) or self._cache.put(rows, self._group(rows))

    def _group(self, rows: Rows) -> RowGroups:
        each = list(map(self._namespace_of, rows.tolist()))
        if each.count(each[0]) == len(each):
            return [(each[0], rows)]
        return [(one, rows[[namespace == one for namespace in each]]) for one in dict.fromkeys(each)]


def explain(query: PlacementQuery, table: EngineTable, settings: PlacementSettings, chosen: int) -> ScoreBreakdown:
    """Returns the scores of ``cost`` for the engines that it finds best, cheapest first, and for the ``chosen`` row; in
    seconds, to a tenth of a millisecond. Another policy's choice is explained by the same scores: what it cost.
    """
    view = CandidateView(query, table)
    columns = {name: view.score(scorer) for name, scorer in make_scorers(settings).items()}
    total = np.sum(list(columns.values()), axis=0)
    best = np.argsort(total, kind="stable")
    shown = [index for index in best if query.rows[index] == chosen] + [
        index for index in best[:MAX_EXPLAINED_ENGINES] if query.rows[index] != chosen
    ]
    shown = sorted(shown[:MAX_EXPLAINED_ENGINES], key=lambda index: float(total[index]))
    return [
        (str(table.ids[query.rows[index]]), {name: round(float(column[index]), 4) for name, column in columns.items()})
        for index in shown
    ]


def route_attributes(decision: PlacementDecision) -> dict[str, str]:
    """Returns the attributes that the route span has for explained engines, one for each."""
    return {
        f"quire.route.{rank}": f"{engine_id} {json.dumps(scores)}"
        for rank, (engine_id, scores) in enumerate(decision.scores, 1)
    }


def route_header(decision: PlacementDecision) -> str:
    """Returns the value of ``x-quire-route``: printable ASCII, at most ``MAX_ROUTE_HEADER_BYTES`` bytes; engines that
    do not fit are left out.
    """
    header = f"{_ascii(decision.engine_id)}; policy={decision.policy}; cached={decision.cached_tokens}"
    header += f"; left={_ascii(decision.left)}" if decision.left else ""
    header = header[:MAX_ROUTE_HEADER_BYTES]
    for engine_id, scores in decision.scores:
        terms = " ".join(f"{name}={seconds:g}" for name, seconds in scores.items() if seconds)
        entry = f", {_ascii(engine_id)}: {terms or '0'}"
        if len(header) + len(entry) > MAX_ROUTE_HEADER_BYTES:
            break
        header += entry
    return header


def _ascii(text: str) -> str:
    return "".join(character if " " <= character <= "~" else "?" for character in text)
