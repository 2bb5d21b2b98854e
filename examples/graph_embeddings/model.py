"""A GraphSAGE model with mean aggregation, and the computation of a whole graph without any cache.

After Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017), algorithm 1 without its sampling and
normalisation. PyTorch Geometric's ``SAGEConv`` computes the same.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F

from examples.graph_embeddings.graph import Graph, Ints


@dataclass(frozen=True, slots=True, eq=False)
class GraphSage:
    """``h_v = act([h_v, mean of h_u over the sources u of v] @ weight + bias)`` for each layer, where ``act`` is ReLU
    but for the last layer, which has none; the mean of no sources is 0.

    ``weights[0]`` is [2 * features, width] and the others [2 * width, width], ``biases`` [width] each, all float32: the
    embeddings of all layers have one width, so that blocks of all layers are equal.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        width = self.width
        shapes = [(2 * self.num_features, width), *[(2 * width, width)] * (self.num_layers - 1)]
        if [tuple(each.shape) for each in self.weights] != shapes or len(self.biases) != len(shapes):
            raise ValueError(f"The layers' weights must have the shapes {shapes}, and each a bias.")
        if any(each.dtype != torch.float32 for each in (*self.weights, *self.biases)):
            raise ValueError("Weights and biases must be float32.")

    @classmethod
    def random(cls, num_features: int, width: int, num_layers: int, seed: int = 0) -> "GraphSage":
        """A model of random weights, drawn so that embeddings of all layers are of about the size of the features."""
        draws = torch.Generator().manual_seed(seed)
        inputs = [2 * num_features, *[2 * width] * (num_layers - 1)]
        weights = tuple(torch.randn(rows, width, generator=draws) * (2 / rows) ** 0.5 for rows in inputs)
        return cls(weights, tuple(torch.randn(width, generator=draws) * 0.1 for _ in inputs))

    @property
    def num_layers(self) -> int:
        """Layers, counted from 1; layer 0 are the features."""
        return len(self.weights)

    @property
    def num_features(self) -> int:
        """Features of a node."""
        return len(self.weights[0]) // 2

    @property
    def width(self) -> int:
        """Numbers of an embedding, in each layer."""
        return len(self.biases[0])

    @property
    def digest(self) -> bytes:
        """A hash of all weights, which is a part of the name of what they compute."""
        digest = blake2b(digest_size=16)
        for each in (*self.weights, *self.biases):
            digest.update(str(tuple(each.shape)).encode() + each.contiguous().numpy().tobytes())
        return digest.digest()

    def to(self, device: str) -> "GraphSage":
        """The model on another device."""
        return GraphSage(tuple(w.to(device) for w in self.weights), tuple(b.to(device) for b in self.biases))

    def apply(self, layer: int, own: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """The embeddings at ``layer`` of nodes whose embeddings below are the rows of ``own``, and ``means`` those of
        their sources.
        """
        made = torch.addmm(self.biases[layer - 1], torch.cat([own, means], 1), self.weights[layer - 1])
        return made if layer == self.num_layers else made.relu_()

    def embed(self, graph: Graph) -> torch.Tensor:
        """The embeddings of all nodes, computed at once: [N, width]."""
        rows = graph.features.to(self.biases[0].device)
        for layer in range(1, self.num_layers + 1):
            rows = self.apply(layer, rows, mean_of_rows(rows, graph.sources, graph.indptr[:-1]))
        return rows


def mean_of_rows(rows: torch.Tensor, indexes: Ints, offsets: Ints) -> torch.Tensor:
    """The mean of ``rows[indexes[offsets[i] : offsets[i + 1]]]`` for each i; 0 for none."""
    return F.embedding_bag(index_tensor(indexes, rows), rows, index_tensor(offsets, rows), mode="mean")


def index_tensor(indexes: Ints, like: torch.Tensor) -> torch.Tensor:
    """Row numbers as a tensor where ``like`` is."""
    return torch.from_numpy(np.ascontiguousarray(indexes)).to(like.device)
