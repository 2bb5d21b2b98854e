"""``Placer``: what it takes to place a request, in its order: names its blocks, asks the index who has them, lets the
policy choose, and remembers what follows from the choice. Does no I/O.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from zlib import crc32

import numpy as np

from quire_router.generation import GenerationRequest
from quire_router.placement.expected import MAX_PROMPT_BLOCKS
from quire_router.placement.explanation import explain
from quire_router.placement.groups import NamespaceGroups
from quire_router.placement.index import PrefixIndex
from quire_router.placement.named import make_policy
from quire_router.placement.namespace import BlockHashes, BlockNamespace, HashesByNamespace
from quire_router.placement.query import PlacementDecision, PlacementQuery, PrefixMatches
from quire_router.placement.sessions import SessionEngines
from quire_router.placement.settings import PlacementSettings
from quire_router.placement.table import Column, EngineTable, Rows

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
