"""Attention for models whose layers differ in heads: one backend per shape, all on one plan."""

from collections.abc import Callable, Sequence

import torch

from quire_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape, LayerAttention


class MixedAttention:
    """An ``AttentionBackend`` that dispatches to several by the heads of the queries and keys. Each backend plans every
    step.
    """

    def __init__(self, backends: dict[tuple[int, int, int], AttentionBackend]) -> None:
        self._backends = backends
        self.batches: Sequence[AttentionBatch] = ()

    def prepare(self, *batches: AttentionBatch) -> None:
        """See ``AttentionBackend.prepare``."""
        self.batches = batches
        for backend in self._backends.values():
            backend.prepare(*batches)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        window: int | None,
        *,
        group: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        backend = self._backends[query.shape[1], key.shape[1], query.shape[2]]
        return backend.forward(query, key, value, kv, window, group=group, sinks=sinks)


def attention_of(
    layers: Sequence[LayerAttention],
    block_size: int,
    make: Callable[[AttentionShape], AttentionBackend],
) -> AttentionBackend:
    """Returns the backend for ``layers``, made by ``make``: one alone if all have the same heads, else a
    ``MixedAttention``.

    Raises ``ValueError`` if layers of the same heads differ in scale or soft cap, which nothing tells apart.
    """
    shapes = list(dict.fromkeys(layer.shape(block_size) for layer in layers))
    if len(shapes) == 1:
        return make(shapes[0])
    kinds = [(shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in shapes]
    if len(set(kinds)) < len(kinds):
        raise ValueError("layers of the same heads differ in scale or soft cap")
    return MixedAttention({kind: make(shape) for kind, shape in zip(kinds, shapes, strict=True)})
