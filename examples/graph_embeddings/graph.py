"""Directed graphs with features. A graph is a value: whoever changes it gets another one, and who reads it is never
disturbed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

_NODE_BITS = 32
_NODE_MASK = (1 << _NODE_BITS) - 1


class GraphError(ValueError):
    """A graph, a change of it or a query cannot be taken. The text is one sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes ``0 .. N - 1`` with ``features`` (float32, [N, dim]) and a set of edges from sources to targets: a target's
    embedding is computed from its sources'.

    ``edges`` are the edges as sorted numbers, the target in the upper half, so that ``sources`` and ``indptr`` are the
    CSR form by target: those of node v are ``sources[indptr[v]:indptr[v + 1]]``, by number.
    """

    features: torch.Tensor
    edges: Ints
    sources: Ints
    indptr: Ints

    @classmethod
    def of(cls, edge_index: ArrayLike, features: torch.Tensor) -> "Graph":
        """A graph of the edges ``edge_index`` ([2, E]: sources, then targets, as in PyTorch Geometric); one that is
        there twice counts once. Raises ``GraphError`` for what is no graph.
        """
        features = _checked_features(features)
        return _from_edges(features, np.unique(_encode(edge_index, len(features))))

    @classmethod
    def of_csr(cls, indptr: ArrayLike, sources: ArrayLike, features: torch.Tensor) -> "Graph":
        """As ``of``, from the CSR form by target."""
        starts, flat = _integers(indptr), _integers(sources)
        is_csr = starts.ndim == flat.ndim == 1 and len(starts) == len(features) + 1
        if not is_csr or starts[0] != 0 or starts[-1] != len(flat) or (np.diff(starts) < 0).any():
            raise GraphError(
                "indptr must rise from 0 to the number of sources, with an entry more than there are nodes."
            )
        targets = np.repeat(np.arange(len(features)), np.diff(starts))
        return cls.of(np.stack([flat, targets]), features)

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.features)

    @property
    def num_edges(self) -> int:
        """Edges."""
        return len(self.edges)

    @property
    def edge_index(self) -> Ints:
        """The edges as ``of`` takes them."""
        return np.stack([self.sources, self.edges >> _NODE_BITS])

    def sources_of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """The sources of each of ``nodes``, one node's after the other's, and where each node's begin."""
        starts, counts = self.indptr[nodes], self.indptr[nodes + 1] - self.indptr[nodes]
        offsets = np.cumsum(counts) - counts
        return self.sources[np.repeat(starts - offsets, counts) + np.arange(counts.sum())], offsets

    def targets_of(self, nodes: Ints) -> Ints:
        """The nodes that have one of ``nodes`` as a source. O(E)."""
        is_source = np.zeros(self.num_nodes, dtype=bool)
        is_source[nodes] = True
        return distinct(self.edges[is_source[self.sources]] >> _NODE_BITS, self.num_nodes)

    def with_edges(self, edge_index: ArrayLike) -> "Graph":
        """The graph with these edges too; those that it has already change nothing."""
        given = np.unique(_encode(edge_index, self.num_nodes))
        places, is_there = self._find(given)
        return _from_edges(self.features, np.insert(self.edges, places[~is_there], given[~is_there]))

    def without_edges(self, edge_index: ArrayLike) -> "Graph":
        """The graph without these edges; those that it has not change nothing."""
        places, is_there = self._find(np.unique(_encode(edge_index, self.num_nodes)))
        return _from_edges(self.features, np.delete(self.edges, places[is_there]))

    def with_features(self, nodes: ArrayLike, features: torch.Tensor) -> "Graph":
        """The graph with other features of ``nodes``, a row for each. Of a node's rows the last counts."""
        chosen, rows = self.checked_nodes(nodes), _checked_features(features)
        if rows.shape != (len(chosen), self.features.shape[1]):
            raise GraphError(f"{len(chosen)} nodes need as many rows of {self.features.shape[1]} features.")
        changed = self.features.clone()
        last = {node: row for row, node in enumerate(chosen.tolist())}
        changed[torch.tensor(list(last), dtype=torch.int64)] = rows[
            torch.tensor(list(last.values()), dtype=torch.int64)
        ]
        return Graph(changed, self.edges, self.sources, self.indptr)

    def with_nodes(self, features: torch.Tensor) -> "Graph":
        """The graph with further nodes behind its own, without edges yet."""
        rows = _checked_features(features)
        if rows.shape[1] != self.features.shape[1]:
            raise GraphError(f"Nodes of this graph have {self.features.shape[1]} features.")
        return _from_edges(torch.cat([self.features, rows]), self.edges)

    def checked_nodes(self, nodes: ArrayLike) -> Ints:
        """``nodes`` as numbers of this graph's nodes. Raises ``GraphError`` if one is not."""
        chosen = _integers(nodes)
        if chosen.ndim != 1 or (len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.num_nodes)):
            raise GraphError(f"Nodes are numbers from 0 to {self.num_nodes - 1}, in one dimension.")
        return chosen

    def _find(self, edges: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Where each of ``edges`` is among the graph's, or would be, and whether it is there."""
        places = np.searchsorted(self.edges, edges)
        is_there = places < len(self.edges)
        is_there[is_there] = self.edges[places[is_there]] == edges[is_there]
        return places, is_there


def distinct(numbers: Ints, limit: int) -> Ints:
    """The different ones of ``numbers``, all below ``limit``, in their order. O(numbers + limit), without sorting."""
    is_there = np.zeros(limit, dtype=bool)
    is_there[numbers] = True
    return np.flatnonzero(is_there)


def _from_edges(features: torch.Tensor, edges: Ints) -> Graph:
    bounds = np.arange(len(features) + 1, dtype=np.int64) << _NODE_BITS
    return Graph(features, edges, edges & _NODE_MASK, np.searchsorted(edges, bounds))


def _encode(edge_index: ArrayLike, num_nodes: int) -> Ints:
    pairs = _integers(edge_index)
    if pairs.ndim != 2 or len(pairs) != 2:
        raise GraphError("Edges are two rows: sources and targets.")
    if pairs.size and not (pairs.min() >= 0 and pairs.max() < num_nodes):
        raise GraphError(f"Edges lead from and to nodes from 0 to {num_nodes - 1}.")
    edges: Ints = (pairs[1] << _NODE_BITS) | pairs[0]
    return edges


def _integers(values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise GraphError("Nodes are whole numbers.")
    return array.astype(np.int64)


def _checked_features(features: torch.Tensor) -> torch.Tensor:
    """A copy of its own, so that a graph does not change with its caller's tensor."""
    if features.dim() != 2 or not features.shape[1]:
        raise GraphError("Features are a row of at least one number for each node.")
    if len(features) >= 1 << (_NODE_BITS - 1):
        raise GraphError(f"A graph has less than {1 << (_NODE_BITS - 1)} nodes.")
    rows = features.detach().to("cpu", torch.float32, copy=True).contiguous()
    if not torch.isfinite(rows).all():
        raise GraphError("Features must be finite.")
    return rows
