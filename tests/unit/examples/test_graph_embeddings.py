"""The paged cache for embeddings of graph nodes: what it computes, shares, copies, moves to the host and refuses."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.scheduler import Scheduler
from quire_proto.errors import ErrorCode, QuireError

from examples.graph_embeddings import __main__ as command
from examples.graph_embeddings import content
from examples.graph_embeddings.cache import EmbeddingCacheConfig, GraphEmbeddingCache
from examples.graph_embeddings.executor import EmbeddingExecutor
from examples.graph_embeddings.graph import Graph, GraphError
from examples.graph_embeddings.model import GraphSage
from tests.support.graph_oracle import PlainGraph, assert_equal, edge_index, powerlaw_edges

EXAMPLE = Path(sys.modules[Graph.__module__].__file__ or "").parent
FEATURES, NODES, SIZE = 5, 48, 4
MODEL = GraphSage.random(FEATURES, 6, 2)


def random_graph(num_nodes: int = NODES, seed: int = 0) -> PlainGraph:
    features = torch.randn(num_nodes, FEATURES, generator=torch.Generator().manual_seed(seed))
    return PlainGraph(features, set(powerlaw_edges(num_nodes, 2 * num_nodes, seed)))


def new_cache(device_blocks: int = 200, host_blocks: int = 0, *, model: GraphSage = MODEL, **config: int):
    return GraphEmbeddingCache(model, EmbeddingCacheConfig(device_blocks, host_blocks, SIZE, **config))


def add(cache: GraphEmbeddingCache, plain: PlainGraph) -> int:
    return cache.add_graph(Graph.of(plain.edge_index, plain.features))


def made(cache: GraphEmbeddingCache) -> tuple[int, int]:
    return cache.row_counts.computed, cache.row_counts.copied


def drain(cache: GraphEmbeddingCache) -> int:
    """Steps until nothing is left; returns how many."""
    steps = 0
    while cache.has_work:
        cache.step()
        steps += 1
    return steps


# What is computed


@given(st.integers(1, 3), st.integers(0, 99))
def test_the_whole_graph_at_once_is_what_a_dense_product_makes(num_layers, seed):
    plain, model = random_graph(20, seed), GraphSage.random(FEATURES, 6, num_layers, seed)
    assert_equal(model.embed(Graph.of(plain.edge_index, plain.features)), plain.layers(model)[-1])


def test_it_is_what_pytorch_geometric_makes():
    sage = pytest.importorskip("torch_geometric.nn").SAGEConv
    plain = random_graph()
    rows, edges = plain.features, torch.tensor(plain.edge_index)
    for number, (weight, bias) in enumerate(zip(MODEL.weights, MODEL.biases, strict=True), 1):
        layer = sage(len(weight) // 2, len(bias), aggr="mean")
        layer.lin_r.weight.data, layer.lin_l.weight.data = (half.T.contiguous() for half in weight.chunk(2))
        layer.lin_l.bias.data = bias
        rows = layer(rows, edges).detach()
        rows = rows if number == MODEL.num_layers else rows.relu()
    cache = new_cache()
    assert_equal(cache.embeddings(add(cache, plain)), rows)


def test_a_graph_in_csr_form_is_the_same_graph():
    plain = random_graph()
    graph = Graph.of(plain.edge_index, plain.features)
    again = Graph.of_csr(graph.indptr, graph.sources, plain.features)
    assert (again.edges == graph.edges).all()
    assert {*zip(*again.edge_index.tolist(), strict=True)} == plain.edges


def test_what_was_computed_is_computed_only_once():
    cache, plain = new_cache(), random_graph()
    graph_id = add(cache, plain)
    first = cache.embeddings(graph_id)
    assert made(cache) == (2 * NODES, 0)
    assert torch.equal(cache.embeddings(graph_id), first)
    assert torch.equal(cache.embeddings(graph_id, [7, 3, 7]), first[[7, 3, 7]])
    assert made(cache) == (2 * NODES, 0)


def test_a_query_of_a_few_nodes_computes_their_neighbourhood_and_no_more():
    plain = PlainGraph(torch.randn(NODES, FEATURES), {(node - SIZE, node) for node in range(SIZE, NODES)})  # a ladder
    cache = new_cache()
    result = cache.embeddings(add(cache, plain), [SIZE * 5 + 1])
    assert_equal(result, plain.layers(MODEL)[-1][[SIZE * 5 + 1]])
    assert made(cache) == (SIZE + 2 * SIZE, 0)  # its block, and that and the one before in the layer below


# What is shared


def test_a_graph_that_has_another_in_it_shares_the_blocks_that_see_nothing_else():
    cache, plain = new_cache(), random_graph()
    cache.embeddings(add(cache, plain))
    features = torch.cat([plain.features, torch.randn(6, FEATURES)])
    larger = PlainGraph(features, plain.edges | {(NODES, NODES + 1), (NODES, 5)})
    before, graph_id = made(cache)[0], add(cache, larger)
    assert_equal(cache.embeddings(graph_id), larger.layers(MODEL)[-1])
    stale = larger.stale_after(plain, 2)
    blocks = [{node // SIZE for node in nodes} for nodes in stale[1:]]
    assert made(cache)[0] - before == sum(min(SIZE, NODES + 6 - SIZE * b) for layer in blocks for b in layer)


def test_equal_neighbourhoods_within_one_graph_are_computed_once():
    ring = {(node, (node + 1) % SIZE) for node in range(SIZE)}
    edges = {(s + SIZE * copy, t + SIZE * copy) for s, t in ring for copy in range(5)}
    plain = PlainGraph(torch.randn(SIZE, FEATURES).repeat(5, 1), edges)
    cache = new_cache()
    assert_equal(cache.embeddings(add(cache, plain)), plain.layers(MODEL)[-1])
    assert made(cache) == (2 * SIZE, 0)


def test_names_that_leave_out_the_neighbourhood_would_share_what_differs(monkeypatch: pytest.MonkeyPatch):
    """The control: with the features alone as a key, a graph gets another's embeddings."""
    monkeypatch.setattr(content, "_hash_neighbourhoods", lambda graph, below, nodes: below[nodes])
    cache, plain = new_cache(), random_graph()
    cache.embeddings(add(cache, plain))
    other = PlainGraph(plain.features, set(list(plain.edges)[::2]))
    with pytest.raises(AssertionError):
        assert_equal(cache.embeddings(add(cache, other)), other.layers(MODEL)[-1])


# What a change does


@given(st.integers(0, 999), st.sampled_from(["add_edges", "remove_edges", "set_features", "add_nodes"]))
def test_a_change_computes_exactly_the_rows_that_depend_on_it(seed, kind):
    cache, plain = new_cache(), random_graph(seed=seed)
    graph_id = add(cache, plain)
    cache.embeddings(graph_id)
    after = PlainGraph(plain.features.clone(), set(plain.edges))
    if kind == "set_features":
        after.features[[seed % NODES]] = 1.0
        cache.set_features(graph_id, [seed % NODES], torch.ones(1, FEATURES))
    elif kind == "add_nodes":
        after.features = torch.cat([after.features, torch.ones(3, FEATURES)])
        cache.add_nodes(graph_id, torch.ones(3, FEATURES))
    elif kind == "add_edges":
        edge = (seed % NODES, seed // NODES)
        after.edges.add(edge)
        cache.add_edges(graph_id, edge_index([edge]))
    else:
        edge = sorted(plain.edges)[seed % len(plain.edges)]
        after.edges.remove(edge)
        cache.remove_edges(graph_id, edge_index([edge]))
    before = made(cache)[0]
    assert_equal(cache.embeddings(graph_id), after.layers(MODEL)[-1])
    assert made(cache)[0] - before == sum(map(len, after.stale_after(plain, 2)[1:]))


def test_a_change_that_changes_nothing_and_one_that_is_taken_back_compute_nothing():
    cache, plain = new_cache(), random_graph()
    graph_id = add(cache, plain)
    cache.embeddings(graph_id)
    absent = next((s, t) for s in range(NODES) for t in range(NODES) if (s, t) not in plain.edges)
    before = made(cache)
    cache.add_edges(graph_id, edge_index(sorted(plain.edges)[:3]))
    cache.set_features(graph_id, [4], plain.features[[4]])
    cache.remove_edges(graph_id, edge_index([absent]))
    cache.add_edges(graph_id, edge_index([absent]))
    cache.remove_edges(graph_id, edge_index([absent]))
    assert_equal(cache.embeddings(graph_id), plain.layers(MODEL)[-1])
    assert made(cache) == before


def test_a_fork_and_a_query_that_runs_go_on_as_they_were_when_the_graph_is_changed():
    cache, plain = new_cache(max_nodes_per_step=7), random_graph()
    graph_id = add(cache, plain)
    fork = cache.fork(graph_id)
    running = cache.submit(graph_id)
    cache.step()
    assert not cache.is_finished(running)
    cache.set_features(graph_id, [0, 1], torch.ones(2, FEATURES))
    changed = PlainGraph(torch.cat([torch.ones(2, FEATURES), plain.features[2:]]), plain.edges)
    assert_equal(cache.embeddings(graph_id), changed.layers(MODEL)[-1])
    assert_equal(cache.result(running), plain.layers(MODEL)[-1])
    before = made(cache)
    assert_equal(cache.embeddings(fork), plain.layers(MODEL)[-1])
    assert made(cache) == before


# Memory and batches


def test_the_coldest_blocks_go_to_the_host_and_come_back():
    one, other = random_graph(), random_graph(seed=1)
    cache = new_cache(2 * NODES // SIZE + 6, 2 * NODES // SIZE + 6)
    graph_ids = [add(cache, one), add(cache, other)]
    for _ in range(2):  # the host keeps what is used a second time
        for graph_id, plain in zip(graph_ids, (one, other), strict=True):
            assert_equal(cache.embeddings(graph_id), plain.layers(MODEL)[-1])
    before, stats = made(cache), cache.scheduler_stats
    assert_equal(cache.embeddings(graph_ids[0], list(range(12))), one.layers(MODEL)[-1][:12])
    assert made(cache) == before
    assert stats.blocks_copied_out >= NODES // SIZE
    assert stats.blocks_copied_in > 0
    assert stats.prefix_host_tokens > 0


def test_graphs_share_steps_and_a_step_has_a_budget():
    cache, graphs = new_cache(max_nodes_per_step=2 * NODES), [random_graph(12, seed) for seed in range(4)]
    queries = [cache.submit(add(cache, plain)) for plain in graphs]
    assert drain(cache) == 2  # four times two layers of 12 nodes, and a readout for each
    for query_id, plain in zip(queries, graphs, strict=True):
        assert_equal(cache.result(query_id), plain.layers(MODEL)[-1])
    narrow = new_cache(max_nodes_per_step=10)
    queries = [narrow.submit(add(narrow, plain)) for plain in graphs]
    assert drain(narrow) == 10  # 100 positions
    for query_id, plain in zip(queries, graphs, strict=True):
        assert_equal(narrow.result(query_id), plain.layers(MODEL)[-1])


def test_a_graph_that_is_larger_than_memory_is_made_in_parts():
    plain = PlainGraph(torch.randn(NODES, FEATURES), {(node - 1, node) for node in range(1, NODES)})
    cache = new_cache(2 + NODES // SIZE)
    assert_equal(cache.embeddings(add(cache, plain)), plain.layers(MODEL)[-1])
    assert cache.stats.blocks_needed > 2 * NODES // SIZE


def test_a_block_that_needs_more_than_there_is_ends_its_query_alone():
    star = PlainGraph(torch.randn(NODES, FEATURES), {(node, 0) for node in range(NODES)})
    cache = new_cache(8)
    graph_id = add(cache, star)
    refused, taken = cache.submit(graph_id), cache.submit(graph_id, [NODES - 1])
    drain(cache)
    with pytest.raises(GraphError, match="takes 14 blocks"):
        cache.result(refused)
    assert_equal(cache.result(taken), star.layers(MODEL)[-1][[NODES - 1]])
    assert cache.kv_cache_manager.device_pool.num_free == cache.kv_cache_manager.device_pool.num_blocks


def out_of_date_plans() -> GraphEmbeddingCache:
    """The plan of the second query reads blocks that the first one's take; both are right all the same."""
    known, unknown = random_graph(), random_graph(seed=1)
    cache = new_cache(2 * NODES // SIZE + 3)
    known_id, unknown_id = add(cache, known), add(cache, unknown)
    cache.embeddings(known_id)
    queries = [cache.submit(unknown_id), cache.submit(known_id)]
    drain(cache)
    for query_id, plain in zip(queries, (unknown, known), strict=True):
        assert_equal(cache.result(query_id), plain.layers(MODEL)[-1])
    return cache


def test_a_plan_whose_sources_are_gone_is_made_anew():
    assert out_of_date_plans().stats.stale_plans == 1


def test_without_looking_for_its_sources_it_would_read_what_others_wrote(monkeypatch: pytest.MonkeyPatch):
    """The control of the one before."""
    monkeypatch.setattr(EmbeddingExecutor, "_has_its_sources", lambda self, chunk, model_output: True)
    with pytest.raises((AssertionError, QuireError)):
        out_of_date_plans()


def test_a_query_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch):
    cache, good, bad = new_cache(), random_graph(12), random_graph(16, seed=1)
    sources_of = Graph.sources_of

    def failing(graph: Graph, nodes):
        if graph.num_nodes == 16 and cache.has_work:
            raise RuntimeError("this graph")
        return sources_of(graph, nodes)

    queries = cache.submit(add(cache, good)), cache.submit(add(cache, bad))
    monkeypatch.setattr(Graph, "sources_of", failing)
    drain(cache)
    assert_equal(cache.result(queries[0]), good.layers(MODEL)[-1])
    with pytest.raises(QuireError) as failure:
        cache.result(queries[1])
    assert failure.value.code is ErrorCode.INTERNAL
    assert cache.kv_cache_manager.device_pool.num_free == cache.kv_cache_manager.device_pool.num_blocks


def test_a_query_that_is_cancelled_gives_its_blocks_back_and_is_forgotten():
    cache = new_cache(max_nodes_per_step=8)
    graph_id = add(cache, random_graph())
    query_id, waiting = cache.submit(graph_id), cache.submit(graph_id)
    cache.step()
    cache.cancel(query_id)
    cache.cancel(waiting)
    assert drain(cache) <= 1
    assert cache.kv_cache_manager.device_pool.num_free == cache.kv_cache_manager.device_pool.num_blocks
    with pytest.raises(GraphError, match="no query"):
        cache.result(query_id)


def test_a_query_that_the_core_refuses_says_so_when_it_is_read(monkeypatch: pytest.MonkeyPatch):
    def refuse(scheduler: Scheduler, request: object) -> None:
        raise QuireError(ErrorCode.OVERLOADED, "The queue is full.")

    cache = new_cache()
    graph_id = add(cache, random_graph())
    monkeypatch.setattr(Scheduler, "add_request", refuse)
    with pytest.raises(QuireError, match="full"):
        cache.embeddings(graph_id)


@pytest.mark.parametrize(
    "wrong", [{"device_blocks": 1}, {"block_size": 1}, {"max_nodes_per_step": 0}, {"host_blocks": -1}]
)
def test_a_cache_without_room_for_anything_is_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        GraphEmbeddingCache(MODEL, EmbeddingCacheConfig(**{"device_blocks": 9, **wrong}))


@pytest.mark.parametrize(
    "weights", [(torch.zeros(4, 3), torch.zeros(4, 3)), (torch.zeros(4, 3, dtype=torch.float64),), (torch.zeros(5, 3),)]
)
def test_a_model_whose_weights_do_not_fit_is_refused(weights):
    with pytest.raises(ValueError, match="eights"):
        GraphSage(weights, tuple(torch.zeros(3) for _ in weights))


# What is refused


@pytest.mark.parametrize(
    ("edges", "features"),
    [
        ([[0], [3]], torch.zeros(3, FEATURES)),
        ([[-1], [0]], torch.zeros(3, FEATURES)),
        ([[0.5], [0.0]], torch.zeros(3, FEATURES)),
        ([0, 1], torch.zeros(3, FEATURES)),
        ([[0], [1], [2]], torch.zeros(3, FEATURES)),
        ([[0], [1]], torch.zeros(3)),
        ([[0], [1]], torch.zeros(3, 0)),
        ([[0], [1]], torch.full((3, FEATURES), float("nan"))),
    ],
)
def test_what_is_no_graph_is_refused(edges, features):
    with pytest.raises(GraphError):
        Graph.of(edges, features)


@pytest.mark.parametrize("indptr", [[0, 1], [0, 1, 1, 1], [0, 2, 1, 2], [1, 1, 1, 2]])
def test_what_is_no_csr_form_is_refused(indptr):
    with pytest.raises(GraphError):
        Graph.of_csr(indptr, [0, 1], torch.zeros(3, FEATURES))


def test_graphs_nodes_and_queries_that_there_are_not_are_refused():
    cache = new_cache()
    graph_id = add(cache, random_graph())
    for refused in (
        lambda: cache.embeddings(graph_id + 1),
        lambda: cache.embeddings(graph_id, [NODES]),
        lambda: cache.set_features(graph_id, [0], torch.zeros(2, FEATURES)),
        lambda: cache.add_nodes(graph_id, torch.zeros(2, FEATURES + 1)),
        lambda: cache.add_edges(graph_id, [[0], [NODES]]),
        lambda: cache.remove_graph(graph_id + 1),
        lambda: cache.result(1),
        lambda: cache.add_graph(Graph.of([[], []], torch.zeros(3, FEATURES + 1))),
    ):
        with pytest.raises(GraphError):
            refused()
    with pytest.raises(GraphError, match="not finished"):
        cache.result(cache.submit(graph_id))
    assert cache.embeddings(graph_id, []).shape == (0, MODEL.width)


def test_a_removed_graph_is_gone_and_its_blocks_may_still_be_found():
    cache, plain = new_cache(), random_graph()
    graph_id = add(cache, plain)
    first = cache.embeddings(graph_id)
    cache.remove_graph(graph_id)
    with pytest.raises(GraphError, match="no graph"):
        cache.embeddings(graph_id)
    before = made(cache)
    assert torch.equal(cache.embeddings(add(cache, plain)), first)
    assert made(cache) == before


# The core, and the command


def test_of_the_engine_it_uses_the_core_and_nothing_else():
    used = {
        node.module
        for path in EXAMPLE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("quire_")
    }
    assert used
    assert {module for module in used if module.startswith("quire_engine") and ".core." not in module} == set()


def test_the_command_prints_a_row_for_each_kind_of_work(capsys: pytest.CaptureFixture[str]):
    command.main(["--nodes", "300", "--features", "4", "--width", "4", "--device-blocks", "60", "--rounds", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 12
    assert rows[2].startswith("| a graph, the first time | 0.0% | 600 | 0 |")
    assert rows[3].startswith("| the same again | 100.0% | 0 | 0 |")
