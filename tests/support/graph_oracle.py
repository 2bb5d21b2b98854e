"""Embeddings of a graph's nodes by one matrix product for each layer, and a graph that is kept as plain sets."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from examples.graph_embeddings.content import Naming
from examples.graph_embeddings.graph import Graph
from examples.graph_embeddings.model import GraphSage


@dataclass
class PlainGraph:
    """Features, and edges as pairs of source and target."""

    features: torch.Tensor
    edges: set[tuple[int, int]] = field(default_factory=set)

    @property
    def edge_index(self) -> list[list[int]]:
        return edge_index(sorted(self.edges))

    def layers(self, model: GraphSage) -> list[torch.Tensor]:
        """The embeddings of all nodes at each layer, the features first."""
        adjacency = torch.zeros(len(self.features), len(self.features))
        for source, target in self.edges:
            adjacency[target, source] = 1.0
        mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1.0)
        layers = [self.features]
        for number, (weight, bias) in enumerate(zip(model.weights, model.biases, strict=True), 1):
            below, half = layers[-1], len(weight) // 2
            made = below @ weight[:half] + mean @ below @ weight[half:] + bias
            layers.append(made if number == model.num_layers else torch.relu(made))
        return layers

    def stale_after(self, before: "PlainGraph", num_layers: int) -> list[set[int]]:
        """For each layer, the features first, the nodes whose value depends on what is not as it was ``before``."""
        nodes = range(len(self.features))
        fresh = [v for v in nodes if v >= len(before.features) or not torch.equal(self.features[v], before.features[v])]
        sources = {v: {s for s, t in self.edges if t == v} for v in nodes}
        earlier = {v: {s for s, t in before.edges if t == v} for v in nodes}
        stale = [set(fresh)]
        for _ in range(num_layers):
            stale.append({v for v in nodes if v in stale[-1] or sources[v] & stale[-1] or sources[v] != earlier[v]})
        return stale


def edge_index(edges: list[tuple[int, int]]) -> list[list[int]]:
    return [[source for source, _ in edges], [target for _, target in edges]]


def named_blocks(graph: Graph, plain: PlainGraph, model: GraphSage, block_size: int) -> dict[bytes, torch.Tensor]:
    """What the blocks of a graph have to hold, by their names, which are computed from nothing here."""
    content = Naming(model.digest, model.num_layers, block_size).name(graph)
    bounds = list(pairwise([*range(0, graph.num_nodes, block_size), graph.num_nodes]))
    return {
        name: rows[begin:end]
        for names, rows in zip(content.block_hashes[1:], plain.layers(model)[1:], strict=True)
        for name, (begin, end) in zip(names, bounds, strict=True)
    }


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To a millionth of the largest number: a small one may be the difference of large ones."""
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * max(1.0, largest))


def powerlaw_edges(num_nodes: int, num_edges: int, seed: int) -> list[tuple[int, int]]:
    draws = np.random.default_rng(seed)
    weights = 1 / np.arange(1, num_nodes + 1)
    ends = draws.choice(num_nodes, (num_edges, 2), p=weights / weights.sum())
    return [(int(source), int(target)) for source, target in ends]
