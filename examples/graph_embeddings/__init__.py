"""A paged cache for embeddings of graph nodes, on the engine's core: see README.md."""

from examples.graph_embeddings.cache import EmbeddingCacheConfig, GraphEmbeddingCache
from examples.graph_embeddings.graph import Graph, GraphError
from examples.graph_embeddings.model import GraphSage

__all__ = ["EmbeddingCacheConfig", "Graph", "GraphEmbeddingCache", "GraphError", "GraphSage"]
