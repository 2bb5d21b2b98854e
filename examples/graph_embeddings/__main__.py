"""``python -m examples.graph_embeddings``: the cache on synthetic graphs, beside computing everything again.

Prints a row for each kind of work: the part of the blocks that were found, the rows that were computed and copied, the
blocks that went to the host and came back, and seconds, of which those of a change have its hashes. Each result is
compared with the whole graph's.
"""

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch

from examples.graph_embeddings.cache import EmbeddingCacheConfig, GraphEmbeddingCache
from examples.graph_embeddings.graph import Graph, Ints
from examples.graph_embeddings.model import GraphSage

COLUMNS = ("work", "hit rate", "rows computed", "copied", "blocks out", "in", "seconds", "all again", "times faster")
LARGEST_DIFFERENCE = 1e-5


def powerlaw_edges(num_nodes: int, num_edges: int, draws: np.random.Generator) -> Ints:
    """Random edges in both directions (at most ``2 * num_edges``); the degree of the node of rank r falls with
    ``r ** -0.5``, as in graphs whose degrees are distributed by a power law with the exponent 3. Ranks are shuffled.
    """
    weights = np.arange(1, num_nodes + 1) ** -0.5
    ends = draws.permutation(num_nodes)[draws.choice(num_nodes, (2, num_edges), p=weights / weights.sum())]
    return np.concatenate([ends, ends[::-1]], axis=1)


class Bench:
    """A cache, and what is measured of it. ``rounds``: how often a kind of change or query is repeated."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.draws = np.random.default_rng(arguments.seed)
        self.rounds: int = arguments.rounds
        self.model = GraphSage.random(arguments.features, arguments.width, arguments.layers, arguments.seed)
        config = EmbeddingCacheConfig(arguments.device_blocks, arguments.host_blocks, arguments.block_size)
        self.cache = GraphEmbeddingCache(self.model, config)
        self.rows: list[tuple[str, ...]] = []

    def features(self, num_nodes: int) -> torch.Tensor:
        """Random features."""
        return torch.from_numpy(self.draws.standard_normal((num_nodes, self.model.num_features), np.float32))

    def measure(
        self,
        what: str,
        *graph_ids: int,
        rounds: int = 1,
        change: Callable[[], None] = lambda: None,
        nodes: Callable[[], Ints | None] = lambda: None,
    ) -> None:
        """Changes and asks ``rounds`` times, of the graphs in turn, and computes everything again as often. Adds the
        row of the means.
        """
        before, seconds, again = self._counts(), 0.0, 0.0
        for number in range(rounds):
            graph_id = graph_ids[number % len(graph_ids)]
            chosen, begun = nodes(), perf_counter()
            change()
            result = self.cache.embeddings(graph_id, chosen)
            seconds += perf_counter() - begun
            begun = perf_counter()
            expected = self.model.embed(self.cache.graph(graph_id))
            again += perf_counter() - begun
            difference = (result - (expected if chosen is None else expected[torch.from_numpy(chosen)])).abs().max()
            if not difference <= LARGEST_DIFFERENCE:
                raise RuntimeError(f"The cache's embeddings differ by {difference}.")
        needed, found, *counts = (self._counts() - before).tolist()
        rate = f"{found / needed:.1%}" if needed else ""
        means = (f"{count / rounds:,.0f}" for count in counts)
        self.rows.append(
            (what, rate, *means, f"{seconds / rounds:.4f}", f"{again / rounds:.4f}", f"{again / seconds:.1f}")
        )

    def _counts(self) -> Ints:
        stats, rows, core = self.cache.stats, self.cache.row_counts, self.cache.scheduler_stats
        rows_and_blocks = [rows.computed, rows.copied, core.blocks_copied_out, core.blocks_copied_in]
        return np.array([stats.blocks_needed, stats.blocks_found, *rows_and_blocks])


def run(arguments: argparse.Namespace) -> Bench:
    """Measures everything."""
    bench = Bench(arguments)
    cache, draws, num_nodes = bench.cache, bench.draws, arguments.nodes
    edges = powerlaw_edges(num_nodes, num_nodes * arguments.degree // 2, draws)
    graph = Graph.of(edges, bench.features(num_nodes))
    begun = perf_counter()
    first = cache.add_graph(graph)
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, named in {perf_counter() - begun:.2f} s")
    bench.measure("a graph, the first time", first)
    bench.measure("the same again", first)
    forks = [cache.fork(first), cache.fork(first)]
    for fork in forks:

        def grow(fork: int = fork) -> None:
            added = cache.add_nodes(fork, bench.features(max(1, num_nodes // 100)))
            targets = draws.integers(0, num_nodes, len(added))
            cache.add_edges(fork, np.stack([np.append(added, targets), np.append(targets, added)]))

        bench.measure("a fork with 1 % more nodes", fork, change=grow)
    bench.measure("the three in turn", first, *forks, rounds=3)
    bench.measure("the three in turn again", first, *forks, rounds=3)

    def link() -> None:
        ends = draws.integers(0, num_nodes, (2, 1))
        cache.add_edges(first, np.concatenate([ends, ends[::-1]], axis=1))

    def alter() -> None:
        cache.set_features(first, draws.integers(0, num_nodes, 1), bench.features(1))

    def some() -> Ints:
        return draws.integers(0, num_nodes, 64)

    rounds = bench.rounds
    bench.measure("two edges more, all nodes", first, rounds=rounds, change=link)
    bench.measure("two edges more, 64 nodes", first, rounds=rounds, change=link, nodes=some)
    bench.measure("a node's features, all nodes", first, rounds=rounds, change=alter)
    bench.measure("a node's features, 64 nodes", first, rounds=rounds, change=alter, nodes=some)
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="examples.graph_embeddings", description=__doc__)
    for name, default, what in (
        ("nodes", 20_000, "nodes of the first graph"),
        ("degree", 16, "mean degree"),
        ("features", 256, "features of a node"),
        ("width", 256, "numbers of an embedding"),
        ("layers", 2, "layers of the model"),
        ("block-size", 16, "nodes of a block"),
        ("device-blocks", 3000, "blocks on the device"),
        ("host-blocks", 3000, "blocks on the host"),
        ("rounds", 10, "repetitions of a change or query"),
        ("seed", 0, "of everything random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    bench = run(parser.parse_args(argv))
    for row in (COLUMNS, ("---",) * len(COLUMNS), *bench.rows):
        print(f"| {' | '.join(row)} |")
    stats = bench.cache.stats
    print(
        f"{stats.hit_rate:.1%} of {stats.blocks_needed:,} blocks were found; {stats.stale_plans} plans were made twice."
    )


if __name__ == "__main__":
    main()
