"""What a query needs: which blocks there are already, and which rows are computed or copied to make the others.

A plan is a sequence in the sense of the engine's core. Its block table begins with the blocks that are cached (the
*sources*), which the core finds by their names as it finds a prompt's prefix; behind them come those to be made (the
*targets*), layer by layer, so that each follows all that it is computed from. A slot of a target is what a token is to
a language model: the unit of the step's budget. The last position, in a block of its own, is the readout: what is a
drawn token there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from examples.graph_embeddings.content import Content, Keys
from examples.graph_embeddings.graph import Graph, Ints, distinct


@dataclass(frozen=True, slots=True)
class Version:
    """A graph as a query sees it, and what its blocks are called."""

    graph: Graph
    content: Content


@dataclass(frozen=True, slots=True)
class Predecessor:
    """A block as it was before its graph was changed: its name, and its nodes' keys."""

    block_hash: bytes
    keys: Keys


Predecessors = Mapping[tuple[int, int], Predecessor]
"""By layer and block: those from which rows that have not changed can be copied."""


@dataclass(slots=True)
class Plan:
    """``block_hashes`` name the blocks of the table, ``num_sources`` of them sources.

    ``index_of[k][b]`` is the place in the table of the block of layer k that holds nodes ``b * block_size`` and on, or
    -1. For each slot of the targets, ``nodes`` is the node to compute there, or -1, and ``copies`` the slot of the
    table to copy, or -1; both are -1 behind a graph's last node. ``layer_ends[k]`` is the end of layer k among them.
    ``readout`` are the slots of what was asked for. ``num_needed`` counts the blocks that the query needs, sources that
    are only copied from aside, and ``num_found`` those of them that are cached.
    """

    version: Version
    block_size: int
    block_hashes: list[bytes]
    num_sources: int
    index_of: list[Ints]
    nodes: Ints
    copies: Ints
    layer_ends: list[int]
    readout: Ints
    num_needed: int
    num_found: int

    @property
    def num_tokens(self) -> int:
        """Slots of all blocks, and the readout."""
        return len(self.block_hashes) * self.block_size + 1

    @property
    def first_target(self) -> int:
        """The slot that the targets begin with."""
        return self.num_sources * self.block_size

    def slots(self, layer: int, nodes: Ints) -> Ints:
        """Where the embeddings of ``nodes`` at ``layer`` are."""
        return _slots(self.index_of[layer], nodes, self.block_size)


def _slots(index_of: Ints, nodes: Ints, block_size: int) -> Ints:
    return index_of[nodes // block_size] * block_size + nodes % block_size


@dataclass(slots=True)
class _Layer:
    """What a plan has of one layer. ``targets`` holds each name once, with its place among the layer's targets."""

    index_of: Ints
    needed: Ints
    missing: Ints
    targets: dict[bytes, int]
    nodes: Ints
    copies: Ints


class Planner:
    """Makes one plan. ``is_cached`` says whether a block of some name is in memory. At most ``max_copied`` blocks are
    taken as sources only because rows can be copied from them.
    """

    def __init__(
        self,
        version: Version,
        block_size: int,
        is_cached: Callable[[bytes], bool],
        predecessors: Predecessors,
        max_copied: int,
    ) -> None:
        self._graph, self._content = version.graph, version.content
        self._version = version
        self._size = block_size
        self._is_cached = is_cached
        self._predecessors = predecessors
        self._max_copied = max_copied
        self._sources: dict[bytes, int] = {}  # each with its place in the table

    def plan(self, nodes: Ints) -> Plan:
        """A plan for the embeddings of ``nodes`` at the last layer. Works downwards: what is cached needs nothing below
        it, and of a block that is not, only the rows that have to be computed do. Called once.
        """
        layers = list[_Layer]()
        needed = self._blocks_of(nodes)
        for layer in range(len(self._content.keys) - 1, 0, -1):
            made = self._plan_layer(layer, needed)
            layers.insert(0, made)
            computed = made.nodes[made.nodes >= 0]
            needed = self._blocks_of(np.concatenate([computed, self._graph.sources_of(computed)[0]]))
        return self._assemble(nodes, layers)

    def _blocks_of(self, nodes: Ints) -> Ints:
        return distinct(nodes // self._size, -(-self._graph.num_nodes // self._size))

    def _plan_layer(self, layer: int, needed: Ints) -> _Layer:
        block_hashes = self._content.block_hashes[layer]
        index_of = np.full(len(block_hashes), -1)
        index_of[needed] = [self._place(block_hashes[block]) for block in needed.tolist()]
        missing = needed[index_of[needed] < 0]
        targets, first = dict[bytes, int](), list[int]()
        for block in missing.tolist():  # blocks of one name are made once
            if block_hashes[block] not in targets:
                targets[block_hashes[block]] = len(targets)
                first.append(block)
        nodes = np.array(first, np.int64)[:, None] * self._size + np.arange(self._size)
        nodes[nodes >= self._graph.num_nodes] = -1
        copies = np.full_like(nodes, -1)
        for row, block in enumerate(first):
            self._copy_what_is_equal(layer, block, nodes[row], copies[row])
        return _Layer(index_of, needed, missing, targets, nodes.ravel(), copies.ravel())

    def _copy_what_is_equal(self, layer: int, block: int, nodes: Ints, copies: Ints) -> None:
        """Has rows of a block copied, if what it was before a change is cached and has some that are the same."""
        before = self._predecessors.get((layer, block))
        if before is None or not self._max_copied:
            return
        keys = self._content.keys[layer][block * self._size :][: len(before.keys)]
        equal = np.flatnonzero((keys == before.keys).all(axis=1))
        num_sources = len(self._sources)
        place = self._place(before.block_hash) if len(equal) else -1
        self._max_copied -= len(self._sources) - num_sources
        if place >= 0:
            nodes[equal], copies[equal] = -1, place * self._size + equal

    def _place(self, block_hash: bytes) -> int:
        """A source's place in the table, which it gets here if it has none; -1 if it is not cached."""
        if block_hash not in self._sources and not self._is_cached(block_hash):
            return -1
        return self._sources.setdefault(block_hash, len(self._sources))

    def _assemble(self, nodes: Ints, layers: list[_Layer]) -> Plan:
        """Puts the targets of all layers behind the sources."""
        block_hashes, layer_ends = list(self._sources), [0]
        for layer, made in enumerate(layers, 1):
            names, first = self._content.block_hashes[layer], len(block_hashes)
            made.index_of[made.missing] = [first + made.targets[names[block]] for block in made.missing.tolist()]
            block_hashes += made.targets
            layer_ends.append((len(block_hashes) - len(self._sources)) * self._size)
        return Plan(
            version=self._version,
            block_size=self._size,
            block_hashes=block_hashes,
            num_sources=len(self._sources),
            index_of=[np.empty(0, np.int64), *(made.index_of for made in layers)],
            nodes=np.concatenate([made.nodes for made in layers]),
            copies=np.concatenate([made.copies for made in layers]),
            layer_ends=layer_ends,
            readout=_slots(layers[-1].index_of, nodes, self._size),
            num_needed=sum(len(made.needed) for made in layers),
            num_found=sum(len(made.needed) - len(made.missing) for made in layers),
        )
