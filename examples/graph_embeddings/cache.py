"""``GraphEmbeddingCache``: embeddings of graph nodes, kept in the paged memory of the engine's core.

Graphs are added, changed and removed; queries ask for embeddings of their nodes. A query is a request of the core: its
scheduler batches queries under one budget of nodes for each step, its pools hold the blocks, count their references,
find them by name, move the coldest to the host and bring them back. Nothing in the core is changed for it. What is the
cache's own is how blocks are named (``content``), what a query needs (``plan``) and how rows are computed
(``executor``).

Blocks are immutable. A graph that is changed gets new names for the blocks that depend on the change, and for no
others; a query then makes these from copies of the old ones, in which only the rows that depend on it are computed.
Queries that run, and other graphs, go on reading the old ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.block_table import BlockTable, CachedBlocks
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput, SchedulerStats
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from examples.graph_embeddings.content import Content, Naming
from examples.graph_embeddings.executor import STALE, EmbeddingExecutor, Job, RowCounts
from examples.graph_embeddings.graph import Graph, GraphError, Ints
from examples.graph_embeddings.model import GraphSage
from examples.graph_embeddings.plan import Plan, Planner, Predecessor, Version

MAX_JOBS = 2**31 - 1
READOUT = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class EmbeddingCacheConfig:
    """``block_size`` nodes have their embeddings of one layer in a block; there are ``device_blocks``, of which the
    core keeps one, and ``host_blocks``. A step makes at most ``max_nodes_per_step`` rows, of at most ``max_num_seqs``
    queries. ``device`` is torch's name for where the blocks are.
    """

    device_blocks: int
    host_blocks: int = 0
    block_size: int = 16
    max_nodes_per_step: int = 8192
    max_num_seqs: int = 64
    device: str = "cpu"


@dataclass(slots=True)
class EmbeddingCacheStats:
    """Totals since the start, of parts of queries that were finished: ``blocks_needed``, those of them that were found,
    and how often a plan was out of date when its turn came.
    """

    blocks_needed: int = 0
    blocks_found: int = 0
    stale_plans: int = 0

    @property
    def hit_rate(self) -> float:
        """Blocks that were found, of those that were needed."""
        return self.blocks_found / self.blocks_needed if self.blocks_needed else 0.0


class EmbeddingCacheManager(KVCacheManager):
    """The core's pools and tables, where blocks are called what their job says and not by a chain of tokens."""

    def __init__(self, capacity: KVCacheConfig, jobs: dict[int, Job]) -> None:
        super().__init__(capacity)
        self._jobs = jobs

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether either pool has the block."""
        return self._find_cached(block_hash) is not None

    def get_cached_blocks(self, table: BlockTable, token_ids: Sequence[int]) -> list[CachedBlocks]:
        """As the core's, after naming the table's blocks."""
        if not table.block_hashes:
            table.block_hashes += self._jobs[token_ids[0]].plan.block_hashes
        return super().get_cached_blocks(table, token_ids)


@dataclass(slots=True)
class _Entry:
    """A graph of the cache: its version now, and what its changed blocks were before, where that is cached."""

    version: Version
    predecessors: dict[tuple[int, int], Predecessor] = field(default_factory=dict)


@dataclass(slots=True)
class _Query:
    """``nodes`` of one version of a graph, and ``result``, their rows. ``parts`` are places in ``nodes`` that are still
    to be asked for; the last of them is on its way, as job ``job_id``.
    """

    entry: _Entry
    version: Version
    nodes: Ints
    result: torch.Tensor
    parts: list[Ints]
    job_id: int | None = None
    error: Exception | None = None


class GraphEmbeddingCache:
    """Used by one thread."""

    def __init__(self, model: GraphSage, config: EmbeddingCacheConfig) -> None:
        if min(config.device_blocks, config.block_size, config.max_nodes_per_step + 1, config.host_blocks + 2) < 2:
            raise ValueError("A cache has at least two device blocks of at least two nodes, and steps at least one.")
        self.model = model
        self.config = config
        self.stats = EmbeddingCacheStats()
        self._naming = Naming(model.digest, model.num_layers, config.block_size)
        self._jobs: dict[int, Job] = {}
        self._owners: dict[int, _Query] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._entries: dict[int, _Entry] = {}
        self._queries: dict[int, _Query] = {}
        self._num_graphs = self._num_queries = self._next_job = 0
        block_bytes = config.block_size * model.width * 4
        capacity = KVCacheConfig(config.block_size, config.device_blocks, config.host_blocks, block_bytes)
        self.executor = EmbeddingExecutor(model, capacity, self._jobs, device=config.device)
        self.kv_cache_manager = EmbeddingCacheManager(capacity, self._jobs)
        limits = SchedulerConfig(
            max_model_len=capacity.usable_tokens,
            max_num_batched_tokens=config.max_nodes_per_step,
            max_num_seqs=config.max_num_seqs,
        )
        scheduler = Scheduler(limits, self.kv_cache_manager)
        self._usable_tokens = capacity.usable_tokens
        self._core = EngineCore(scheduler, self.executor, lambda step: self._outputs.extend(step.outputs))

    # Graphs

    def add_graph(self, graph: Graph) -> int:
        """Takes a graph in, and returns its number. Nothing is computed before a query asks for it."""
        if graph.features.shape[1] != self.model.num_features:
            raise GraphError(f"The model is for {self.model.num_features} features of a node.")
        self._num_graphs += 1
        self._entries[self._num_graphs] = _Entry(Version(graph, self._naming.name(graph)))
        return self._num_graphs

    def fork(self, graph_id: int) -> int:
        """A second graph that is like a first one until either is changed; returns its number. They share all blocks,
        and after a change those that do not depend on it, and rows of the others are copied.
        """
        entry = self._entry(graph_id)
        self._num_graphs += 1
        self._entries[self._num_graphs] = _Entry(entry.version, dict(entry.predecessors))
        return self._num_graphs

    def remove_graph(self, graph_id: int) -> None:
        """Forgets a graph. Queries of it that run are finished; its blocks stay until their room is needed."""
        self._entry(graph_id)
        del self._entries[graph_id]

    def graph(self, graph_id: int) -> Graph:
        """A graph as it is now."""
        return self._entry(graph_id).version.graph

    def add_edges(self, graph_id: int, edge_index: ArrayLike) -> None:
        """Adds edges ([2, E]: sources, then targets)."""
        graph = self.graph(graph_id).with_edges(edge_index)
        self._change(graph_id, graph, np.empty(0, np.int64), _targets(edge_index))

    def remove_edges(self, graph_id: int, edge_index: ArrayLike) -> None:
        """Takes edges away."""
        graph = self.graph(graph_id).without_edges(edge_index)
        self._change(graph_id, graph, np.empty(0, np.int64), _targets(edge_index))

    def set_features(self, graph_id: int, nodes: ArrayLike, features: torch.Tensor) -> None:
        """Gives nodes other features, a row for each."""
        graph = self.graph(graph_id).with_features(nodes, features)
        self._change(graph_id, graph, np.unique(graph.checked_nodes(nodes)), np.empty(0, np.int64))

    def add_nodes(self, graph_id: int, features: torch.Tensor) -> Ints:
        """Adds nodes behind those that there are, and returns their numbers."""
        before = self.graph(graph_id).num_nodes
        graph = self.graph(graph_id).with_nodes(features)
        added = np.arange(before, graph.num_nodes)
        self._change(graph_id, graph, added, np.empty(0, np.int64))
        return added

    # Queries

    def embeddings(self, graph_id: int, nodes: ArrayLike | None = None) -> torch.Tensor:
        """The embeddings at the last layer of ``nodes``, or of all: [nodes, width], on the CPU. Runs what else was
        submitted, too.
        """
        query_id = self.submit(graph_id, nodes)
        while not self.is_finished(query_id):
            self.step()
        return self.result(query_id)

    def submit(self, graph_id: int, nodes: ArrayLike | None = None) -> int:
        """Queues a query of a graph as it is now, whatever becomes of it; returns the query's number. Raises
        ``GraphError`` for a graph or nodes that there are not.
        """
        entry = self._entry(graph_id)
        graph = entry.version.graph
        chosen = np.arange(graph.num_nodes) if nodes is None else graph.checked_nodes(nodes)
        parts = [np.arange(len(chosen))] if len(chosen) else []
        query = _Query(entry, entry.version, chosen, torch.zeros(len(chosen), self.model.width), parts)
        self._start_next(query)
        self._num_queries += 1
        self._queries[self._num_queries] = query
        return self._num_queries

    @property
    def has_work(self) -> bool:
        """Whether anything was submitted that is not finished."""
        return self._core.scheduler.has_work

    def step(self) -> None:
        """One step: makes rows of as many queries as its budget allows."""
        self._core.step()
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            query = self._owners.get(int(output.request_id))
            if query is not None:  # None: it was cancelled
                self._finish_part(query, output.error)

    def is_finished(self, query_id: int) -> bool:
        """Whether ``result`` has what was asked for."""
        return not self._query(query_id).parts

    def result(self, query_id: int) -> torch.Tensor:
        """The embeddings that a finished query asked for, once. Raises ``GraphError`` if one of its nodes needs more
        blocks than there are, and ``QuireError`` if the core ended it.
        """
        query = self._query(query_id)
        if query.parts:
            raise GraphError("The query is not finished.")
        del self._queries[query_id]
        if query.error is not None:
            raise query.error
        return query.result

    def cancel(self, query_id: int) -> None:
        """Forgets a query, wherever it is."""
        self._end(self._query(query_id))
        del self._queries[query_id]

    def close(self) -> None:
        """Gives the memory back; nothing can be asked for any more."""
        self.executor.close()

    # Figures

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """What the core counted: blocks that moved between the pools, and preemptions."""
        return self._core.scheduler.stats

    @property
    def row_counts(self) -> RowCounts:
        """Rows that were computed and copied."""
        return self.executor.counts

    # Inside

    def _entry(self, graph_id: int) -> _Entry:
        entry = self._entries.get(graph_id)
        if entry is None:
            raise GraphError(f"There is no graph {graph_id}.")
        return entry

    def _query(self, query_id: int) -> _Query:
        query = self._queries.get(query_id)
        if query is None:
            raise GraphError(f"There is no query {query_id}.")
        return query

    def _change(self, graph_id: int, graph: Graph, nodes: Ints, targets: Ints) -> None:
        """Replaces a graph, of which the features of ``nodes`` and edges to ``targets`` are other ones now."""
        entry = self._entry(graph_id)
        before = entry.version.content
        content = before.changed(self._naming, graph, nodes, targets)
        entry.version = Version(graph, content)
        _keep_predecessors(entry, before, content, self.config.block_size, self.kv_cache_manager.is_cached)

    def _start_next(self, query: _Query) -> None:
        """Has the scheduler run the last part of a query. One that needs more blocks than there are is divided; its
        halves run one after the other, so that the second finds what the first has made.
        """
        while query.parts:
            places = query.parts[-1]
            plan = self._plan(query, query.nodes[places])
            if plan.num_tokens < self._usable_tokens:
                self._add_job(query, plan)
                return
            halves = _halve(query.nodes[places] // self.config.block_size)
            if halves is None:
                needed = f"{len(plan.block_hashes) + 1} blocks"
                self._end(query, GraphError(f"A block of these nodes takes {needed} to make, more than there are."))
            else:
                query.parts[-1:] = [places[half] for half in halves]

    def _plan(self, query: _Query, nodes: Ints) -> Plan:
        """Copies rows only as far as there is room for the blocks that they are copied from."""
        most = self._usable_tokens // self.config.block_size
        plan = self._make_plan(query, nodes, most)
        if plan.num_tokens < self._usable_tokens or not query.entry.predecessors:
            return plan
        plan = self._make_plan(query, nodes, 0)
        room = (self._usable_tokens - 1 - plan.num_tokens) // self.config.block_size
        return self._make_plan(query, nodes, room) if room > 0 else plan

    def _make_plan(self, query: _Query, nodes: Ints, max_copied: int) -> Plan:
        size, is_cached = self.config.block_size, self.kv_cache_manager.is_cached
        return Planner(query.version, size, is_cached, query.entry.predecessors, max_copied).plan(nodes)

    def _add_job(self, query: _Query, plan: Plan) -> None:
        job_id = self._next_job
        self._next_job = (self._next_job + 1) % MAX_JOBS
        self._jobs[job_id], self._owners[job_id] = Job(plan), query
        query.job_id = job_id
        try:
            self._core.scheduler.add_request(Request(str(job_id), [job_id] * plan.num_tokens, READOUT))
        except QuireError as error:
            self._end(query, error)

    def _finish_part(self, query: _Query, error: QuireError | None) -> None:
        """Stores what a part has made, and starts the next one. A plan that is out of date is made anew. That ends: a
        plan goes out of date only by blocks that others take, and the first of those that run is never stopped.
        """
        job = self._forget_job(query)
        if error is None:
            assert job.result is not None
            query.result[torch.from_numpy(query.parts.pop())] = job.result
            self.stats.blocks_needed += job.plan.num_needed
            self.stats.blocks_found += job.plan.num_found
        elif error.reason == STALE:
            self.stats.stale_plans += 1
        else:
            self._end(query, error)
        self._start_next(query)

    def _forget_job(self, query: _Query) -> Job:
        assert query.job_id is not None
        job_id, query.job_id = query.job_id, None
        del self._owners[job_id]
        return self._jobs.pop(job_id)

    def _end(self, query: _Query, error: Exception | None = None) -> None:
        """Ends a query before all its parts are there."""
        if query.job_id is not None:
            self._core.scheduler.abort_request(str(query.job_id))
            self._forget_job(query)
        query.parts.clear()
        query.error = error


def _halve(blocks: Ints) -> tuple[Ints, Ints] | None:
    """Which of ``blocks`` are in the higher and in the lower half; None if all are one."""
    is_low = blocks < (blocks.min() + blocks.max() + 1) // 2
    return (np.flatnonzero(~is_low), np.flatnonzero(is_low)) if is_low.any() else None


def _targets(edge_index: ArrayLike) -> Ints:
    return np.unique(np.asarray(edge_index)[1]).astype(np.int64)


def _keep_predecessors(
    entry: _Entry, before: Content, after: Content, block_size: int, is_cached: Callable[[bytes], bool]
) -> None:
    """Notes what the blocks that a change has renamed were before, where that is cached; otherwise what is known of an
    earlier change stays.
    """
    for layer in range(1, len(before.keys)):
        pairs = zip(before.block_hashes[layer], after.block_hashes[layer], strict=False)
        for block, (old, new) in enumerate(pairs):
            if old is not new and old != new and is_cached(old):
                keys = before.keys[layer][block * block_size : (block + 1) * block_size].copy()
                entry.predecessors[layer, block] = Predecessor(old, keys)
