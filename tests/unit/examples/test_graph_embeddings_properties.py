"""Whatever is added, changed, asked for and removed, in whatever memory: embeddings are those of the whole graph
computed at once, every block holds what its name says, and all blocks are free in the end.
"""

import random
from collections import Counter

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import Tier

from examples.graph_embeddings.cache import EmbeddingCacheConfig, GraphEmbeddingCache
from examples.graph_embeddings.content import Naming
from examples.graph_embeddings.graph import Graph, GraphError
from examples.graph_embeddings.model import GraphSage
from tests.support.graph_oracle import PlainGraph, assert_equal, edge_index, named_blocks, powerlaw_edges

FEATURES = 3
# Where graphs shall have whole neighbourhoods in common, only the first few are drawn.
PALETTE = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(0))
ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=16)
PAIRS = st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=24)
CONFIGS = st.builds(
    EmbeddingCacheConfig,
    device_blocks=st.integers(6, 30),
    host_blocks=st.integers(0, 20),
    block_size=st.integers(2, 4),
    max_nodes_per_step=st.integers(1, 40),
    max_num_seqs=st.integers(1, 4),
)


def within(pairs: list[tuple[int, int]], num_nodes: int) -> list[tuple[int, int]]:
    return [(source % num_nodes, target % num_nodes) for source, target in pairs]


@given(ROWS, PAIRS, PAIRS, PAIRS, ROWS, st.integers(1, 3))
def test_names_after_a_change_are_those_of_the_changed_graph(rows, pairs, added, removed, further, num_layers):
    naming = Naming(b"model", num_layers, 2)
    graph = Graph.of(edge_index(within(pairs, len(rows))), PALETTE[rows])
    content = naming.name(graph)
    for index, change in ((edge_index(within(added, len(rows))), Graph.with_edges),
                          (edge_index(within(removed, len(rows))), Graph.without_edges)):  # fmt: skip
        graph = change(graph, index)
        content = content.changed(naming, graph, graph.checked_nodes([]), graph.checked_nodes(sorted(set(index[1]))))
    nodes = list(range(min(len(further), len(rows))))
    graph = graph.with_features(nodes, PALETTE[further[: len(nodes)]])
    content = content.changed(naming, graph, graph.checked_nodes(nodes), graph.checked_nodes([]))
    graph = graph.with_nodes(PALETTE[further])
    grown = graph.checked_nodes(list(range(len(rows), graph.num_nodes)))
    content = content.changed(naming, graph, grown, graph.checked_nodes([]))
    expected = naming.name(graph)
    assert content.block_hashes == expected.block_hashes
    assert all((ours == theirs).all() for ours, theirs in zip(content.keys, expected.keys, strict=True))


OPERATIONS = ("submit", "submit", "submit", "step", "step", "drain", "add_edges", "remove_edges", "set_features",
              "add_nodes", "add_graph", "add_larger_copy", "remove_graph", "cancel")  # fmt: skip
SCRIPTS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 31), ROWS, PAIRS), min_size=8, max_size=40)


class CheckedCache:
    """A cache beside plain graphs: every result, and whatever any block holds, is compared with theirs."""

    def __init__(self, config: EmbeddingCacheConfig, num_layers: int) -> None:
        self.model = GraphSage.random(FEATURES, 4, num_layers, seed=num_layers)
        self.cache = GraphEmbeddingCache(self.model, config)
        self.graphs: dict[int, PlainGraph] = {}
        self.queries: dict[int, tuple[PlainGraph, list[int] | None]] = {}
        self.named: dict[bytes, torch.Tensor] = {}

    def run(self, operation: str, number: int, rows: list[int], pairs: list[tuple[int, int]]) -> None:
        """One operation on the graph or query that ``number`` picks, if there is any; then looks at every block."""
        if operation in {"add_graph", "step", "drain"}:
            getattr(self, operation)(rows, pairs)
        elif operation == "cancel":
            self.cancel(number)
        elif self.graphs:
            graph_id = sorted(self.graphs)[number % len(self.graphs)]
            getattr(self, operation)(graph_id, self.graphs[graph_id], rows, pairs)
        self.check_blocks()

    def note(self, graph_id: int, plain: PlainGraph) -> None:
        """What a graph is from now on; a query that runs goes on with what it was."""
        self.graphs[graph_id] = plain
        self.named |= named_blocks(self.cache.graph(graph_id), plain, self.model, self.cache.config.block_size)

    def add_graph(self, rows, pairs):
        plain = PlainGraph(PALETTE[rows], set(within(pairs, len(rows))))
        self.note(self.cache.add_graph(Graph.of(plain.edge_index, plain.features)), plain)

    def add_larger_copy(self, _, earlier, rows, pairs):
        del pairs
        plain = PlainGraph(torch.cat([earlier.features, PALETTE[rows]]), set(earlier.edges))
        self.note(self.cache.add_graph(Graph.of(plain.edge_index, plain.features)), plain)

    def add_edges(self, graph_id, plain, rows, pairs):
        edges = within(pairs, len(plain.features))
        self.cache.add_edges(graph_id, edge_index(edges))
        self.note(graph_id, PlainGraph(plain.features, plain.edges | set(edges)))

    def remove_edges(self, graph_id, plain, rows, pairs):
        edges = sorted(plain.edges)[::3] + within(pairs, len(plain.features))
        self.cache.remove_edges(graph_id, edge_index(edges))
        self.note(graph_id, PlainGraph(plain.features, plain.edges - set(edges)))

    def set_features(self, graph_id, plain, rows, pairs):
        changes = list(zip([source for source, _ in within(pairs, len(plain.features))], rows, strict=False))
        self.cache.set_features(graph_id, [node for node, _ in changes], PALETTE[[row for _, row in changes]])
        features = plain.features.clone()
        for node, row in changes:
            features[node] = PALETTE[row]
        self.note(graph_id, PlainGraph(features, plain.edges))

    def add_nodes(self, graph_id, plain, rows, pairs):
        added = self.cache.add_nodes(graph_id, PALETTE[rows])
        assert added.tolist() == list(range(len(plain.features), len(plain.features) + len(rows)))
        self.note(graph_id, PlainGraph(torch.cat([plain.features, PALETTE[rows]]), plain.edges))

    def remove_graph(self, graph_id, plain, rows, pairs):
        self.cache.remove_graph(graph_id)
        del self.graphs[graph_id]

    def submit(self, graph_id, plain, rows, pairs):
        """All nodes, or some."""
        nodes = [target for _, target in within(pairs, len(plain.features))] if len(rows) < 5 else None
        self.queries[self.cache.submit(graph_id, nodes)] = plain, nodes

    def cancel(self, number):
        if self.queries:
            query_id = sorted(self.queries)[number % len(self.queries)]
            self.cache.cancel(query_id)
            del self.queries[query_id]

    def step(self, rows=(), pairs=()):
        for _ in range(max(1, len(rows) // 4)):
            before = self.cache.row_counts.computed + self.cache.row_counts.copied
            self.cache.step()
            made = self.cache.row_counts.computed + self.cache.row_counts.copied - before
            assert made <= self.cache.config.max_nodes_per_step
        for query_id in [each for each in self.queries if self.cache.is_finished(each)]:
            self.check_result(query_id)

    def drain(self, rows=(), pairs=()):
        while self.cache.has_work:
            self.step()
        for query_id in list(self.queries):
            self.check_result(query_id)

    def check_result(self, query_id: int) -> None:
        plain, nodes = self.queries.pop(query_id)
        config = self.cache.config
        try:
            result = self.cache.result(query_id)
        except GraphError:
            event("a block that needs more than there is")
            blocks = -(-len(plain.features) // config.block_size) * self.model.num_layers
            assert blocks + 1 >= config.device_blocks - 1
        else:
            expected = plain.layers(self.model)[-1]
            assert_equal(result, expected if nodes is None else expected[nodes])

    def check_blocks(self) -> None:
        """Each is in one place, and those with a name hold what it says."""
        manager, size = self.cache.kv_cache_manager, self.cache.config.block_size
        manager.check_integrity()
        for stored in manager.stored_blocks():
            on_device = stored.tier is Tier.DEVICE
            pool = manager.device_pool if on_device else manager.host_pool
            rows = self.cache.executor.device_rows if on_device else self.cache.executor.host_rows
            first = pool.get_cached_block(stored.block_hash) * size
            expected = self.named[stored.block_hash]
            assert_equal(rows[first : first + len(expected)], expected)

    def events(self) -> Counter[str]:
        """What has happened, and how often."""
        stats = self.cache.scheduler_stats
        return +Counter(
            {
                "copied out": stats.blocks_copied_out,
                "copied in": stats.blocks_copied_in,
                "preempted": sum(stats.preemptions.values()),
                "rows copied": self.cache.row_counts.copied,
                "plans out of date": self.cache.stats.stale_plans,
                "hits": self.cache.stats.blocks_found,
            }
        )

    def end(self) -> None:
        """Ends what runs, and looks for lost blocks."""
        self.drain()
        self.check_blocks()
        manager = self.cache.kv_cache_manager
        assert manager.device_pool.num_free == manager.device_pool.num_blocks
        assert manager.host_pool.num_free == manager.host_pool.num_blocks


@settings(max_examples=50)
@given(CONFIGS, st.integers(1, 3), SCRIPTS)
def test_embeddings_are_those_of_the_whole_graph_and_no_block_is_lost(config, num_layers, script):
    checked = CheckedCache(config, num_layers)
    checked.run("add_graph", 0, [node % 3 for node in range(20)], [(node, (node * 7 + 3) % 20) for node in range(20)])
    for operation in script:
        checked.run(*operation)
    checked.end()


def test_they_are_under_pressure_too() -> None:
    """Several queries at once in little memory: blocks go to the host and back, and plans are out of date."""
    happened = Counter[str]()
    for seed in range(20):
        draws = random.Random(seed)
        blocks = draws.randrange(24, 48)
        config = EmbeddingCacheConfig(blocks, draws.choice([0, 12, 40]), 3, draws.randrange(4, 24), 4)
        checked = CheckedCache(config, num_layers=2)
        for _ in range(2):
            checked.run("add_graph", 0, draws.choices(range(40), k=30), powerlaw_edges(30, 60, draws.randrange(99)))
        for _ in range(60):
            rows, number = draws.choices(range(40), k=draws.randrange(1, 8)), draws.randrange(99)
            edges = [(draws.randrange(30), draws.randrange(30)) for _ in range(draws.randrange(1, 6))]
            operation = draws.choice(
                ["submit", "submit", "step", "set_features", "add_edges", "remove_edges", "cancel"]
            )
            checked.run(operation, number, rows, edges)
        checked.end()
        happened += checked.events()
    # A query that was admitted has room for all its blocks, so that none is ever preempted.
    assert happened.keys() == {"copied out", "copied in", "rows copied", "plans out of date", "hits"}
