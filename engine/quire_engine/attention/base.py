"""The attention interface: prepare once a step, then store and attend once a layer.

KV memory is block-major: a block has the keys and values of all layers (see ``kv_cache_spec``) and is one contiguous
copy, which is what makes swapping pay. The view of one layer, ``[blocks, 2, kv_heads, block_size, head_dim]``, is
FlashInfer's HND paged form with a larger page stride. The index arrays are FlashInfer's too, so that every backend
reads the same plan.

Layers are in groups, most often in one: those of a group share the blocks of a sequence, and so one batch of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

MAX_GRAPH_BATCH_SIZE = 512
"""The largest batch size of a CUDA graph: FlashInfer's shared workspace has room for it, and beyond it the kernels are
long enough to hide their launches.
"""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer of a model, which the layer calls.

    ``scale`` multiplies the scores. With a ``soft_cap`` a score becomes ``soft_cap * tanh(score / soft_cap)`` (Gemma
    2). ``window`` is as in ``AttentionBackend.forward``. ``kv_layer`` is the layer whose keys and values it reads: one
    before it that has made them for both (Gemma 4); None for itself.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    kv_layer: int | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: "LayerKV",
        backend: "AttentionBackend",
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores keys and values in ``kv`` and attends on ``backend``. See ``AttentionBackend.forward``."""
        return backend.forward(query, key, value, kv.pages, self.window, group=kv.group, sinks=sinks)

    def shape(self, block_size: int) -> "AttentionShape":
        """What a backend for this layer is made of."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, block_size, self.scale, self.soft_cap)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is constant over the life of a backend: see ``LayerAttention``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    soft_cap: float | None = None


class LayerKV(NamedTuple):
    """One layer's part of KV memory: ``pages`` [blocks, 2, kv_heads, block_size, row_size], and the ``group`` of layers
    whose batch says which of them are a sequence's.
    """

    pages: torch.Tensor
    group: int = 0


@dataclass(slots=True)
class AttentionBatch:
    """The ragged batch of one step, for one group of layers. All tensors are int32 on the host; B chunks, T tokens.

    ``query_indptr`` [B+1] bounds each chunk's tokens in the packed batch. ``page_indptr`` [B+1] bounds each chunk's
    pages in ``page_ids`` [sum of pages], and counts only the pages in use. ``last_page_len`` [B] is 1..block_size,
    after this step's tokens are stored. ``context_lens`` [B] are the tokens known to each chunk's attention, this
    step's included. ``positions`` [T] is each token's index among them. Of layers with a window, a chunk's context
    begins with a page that the window of its first token still reaches, or before it.
    """

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor


class AttentionBackend(Protocol):
    """One way to compute attention. Used by one thread, one step at a time."""

    @property
    def batches(self) -> Sequence[AttentionBatch]:
        """The batches of the step that it is prepared for, one for each group of layers."""
        ...

    def prepare(self, *batches: AttentionBatch) -> None:
        """Takes the plan of the step, a batch for each group of layers; everything that is equal for all layers of a
        group happens here.
        """
        ...

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
        """Stores this step's keys and values into one layer's pages, then attends causally.

        ``query`` [T, heads, head_dim], ``key`` and ``value`` [T, kv_heads, head_dim], after rotation; ``kv`` is the
        layer's view [blocks, 2, kv_heads, block_size, row_size] of the same dtype, or of one with eight bits (see
        ``kv_rows``), and ``group`` the one that it is of. ``window`` limits each token to the last ``window`` tokens,
        itself included. ``sinks`` [heads] are scores that take part in the softmax of each
        head as if of one more key, which has no value (gpt-oss). Returns [T, heads, head_dim].
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in CUDA graphs."""

    def for_graph(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """A backend for the graph of one batch size: its ``forward`` can be captured, on memory that never moves.

        ``batch_size`` is at most ``MAX_GRAPH_BATCH_SIZE``. ``prepare`` takes exactly that many chunks of one token with
        at most ``max_pages`` page ids in each batch, pads included. A pad is a chunk of the null page: position 0,
        context 1, last_page_len 1. ``prepare`` runs outside of the graph, before the capture and before every replay,
        on the stream that the graph runs on. ``forward`` has to run once uncaptured before the capture, as every window
        that a layer asks for is learned there.

        The backends of all graphs and this one share memory for what is planned and computed: only what was prepared
        last may run.
        """
        ...
