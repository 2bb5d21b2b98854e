"""What blocks of embeddings are called: by all that they are computed from, so that equal names hold equal embeddings.

The key of a node at layer k is a hash of its k-hop neighbourhood: of its own key at layer k - 1 and those of its
sources, down to the bytes of features. The computation reads the same tree of values, so two nodes with one key, of one
graph or of two, have the same embedding. (As Weisfeiler and Lehman refine colours, but with the sources in an order,
that of their numbers, so that sums are rounded alike.) The name of a block is a hash of the model and its nodes' keys,
in their order; a key of layer k is of a tree that is k deep, so that it tells the layer. Graphs and places have no
part in it.

Tokens are named by a chain, because a token depends on all before it. A node depends on its neighbourhood and on
nothing else, so a chain would part what is equal: one changed node would rename everything behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from quire_proto.hashing import HASH_BYTES

from examples.graph_embeddings.graph import Graph, Ints, distinct

Keys = NDArray[np.uint64]
_WORDS = HASH_BYTES // 8


@dataclass(frozen=True, slots=True)
class Naming:
    """What names depend on beside a graph: the model's digest and its layers, and the nodes of a block."""

    model: bytes
    num_layers: int
    block_size: int

    def name(self, graph: Graph) -> "Content":
        """The keys and names of a graph. O(layers * (nodes + edges))."""
        none = np.empty((0, _WORDS), np.uint64)
        layers = self.num_layers + 1
        return Content(tuple([none] * layers), tuple([[] for _ in range(layers)])).changed(
            self, graph, np.arange(graph.num_nodes), np.empty(0, np.int64)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Of one graph: ``keys[k][v]`` is the key of node v at layer k, two words, and ``block_hashes[k][b]`` the name of
    the block of layer k that holds nodes ``b * block_size`` and on; none for layer 0, as the features are in no block.
    """

    keys: tuple[Keys, ...]
    block_hashes: tuple[list[bytes], ...]

    def changed(self, naming: Naming, graph: Graph, nodes: Ints, targets: Ints) -> "Content":
        """That of ``graph``, which differs from this one's by the features of ``nodes``, further nodes among them, and
        by edges to ``targets``. Hashes only what may have changed, and follows it only where it did: O(edges) for
        looking, whatever the change.
        """
        keys = [_grown(each, graph.num_nodes) for each in self.keys]
        block_hashes = [self.block_hashes[0]]
        changed = _store(keys[0], nodes, _hash_features(graph, nodes))
        for layer in range(1, naming.num_layers + 1):
            touched = distinct(np.concatenate([changed, graph.targets_of(changed), targets]), graph.num_nodes)
            changed = _store(keys[layer], touched, _hash_neighbourhoods(graph, keys[layer - 1], touched))
            block_hashes.append(_renamed(self.block_hashes[layer], naming, keys[layer], changed))
        return Content(tuple(keys), tuple(block_hashes))


def _grown(keys: Keys, num_nodes: int) -> Keys:
    return np.concatenate([keys, np.zeros((num_nodes - len(keys), _WORDS), np.uint64)])


def _store(keys: Keys, nodes: Ints, fresh: Keys) -> Ints:
    """Writes the keys of ``nodes``; returns those that got another one."""
    is_other: NDArray[np.bool_] = (keys[nodes] != fresh).any(axis=1)
    keys[nodes] = fresh
    changed: Ints = nodes[is_other]
    return changed


def _hash_features(graph: Graph, nodes: Ints) -> Keys:
    rows, size = graph.features.numpy()[nodes].tobytes(), graph.features.shape[1] * 4
    return _to_keys(
        blake2b(rows[start : start + size], digest_size=HASH_BYTES, person=b"features").digest()
        for start in range(0, len(nodes) * size, size)
    )


def _hash_neighbourhoods(graph: Graph, below: Keys, nodes: Ints) -> Keys:
    flat, starts = graph.sources_of(nodes)
    own, sources = below[nodes].tobytes(), below[flat].tobytes()
    ends = [*starts[1:].tolist(), len(flat)] if len(nodes) else []
    bounds = zip(range(0, len(own), HASH_BYTES), starts.tolist(), ends, strict=True)
    return _to_keys(
        blake2b(
            own[at : at + HASH_BYTES] + sources[start * HASH_BYTES : end * HASH_BYTES], digest_size=HASH_BYTES
        ).digest()
        for at, start, end in bounds
    )


def _to_keys(digests: Iterator[bytes]) -> Keys:
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, _WORDS)


def _renamed(block_hashes: list[bytes], naming: Naming, keys: Keys, changed: Ints) -> list[bytes]:
    size = naming.block_size
    renamed = block_hashes + [b""] * (-(-len(keys) // size) - len(block_hashes))
    for block in distinct(changed // size, len(renamed)).tolist():
        nodes = keys[block * size : (block + 1) * size]
        renamed[block] = blake2b(naming.model + nodes.tobytes(), digest_size=HASH_BYTES).digest()
    return renamed
