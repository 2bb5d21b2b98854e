"""The attention interface: prepare once per step, then store and attend once per layer.

KV memory is block-major: a block holds the keys and values of all layers (see ``kv_cache_spec``) in one contiguous
piece, so that swapping it is one fast copy. The view of one layer, ``[blocks, 2, kv_heads, block_size, head_dim]``, is
FlashInfer's HND page layout with a larger page stride. The index arrays are FlashInfer's too, so every backend reads
the same plan.

Layers form groups, usually one. The layers of a group share the blocks of a sequence, and so one batch of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

MAX_GRAPH_BATCH_SIZE = 512
"""The largest batch size of a CUDA graph. FlashInfer's shared workspace has room for it, and beyond it the kernels are
long enough to hide their launches.
"""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer, which the layer calls.

    ``scale`` multiplies the scores. With a ``soft_cap`` a score becomes ``soft_cap * tanh(score / soft_cap)`` (Gemma
    2). ``window`` is as in ``AttentionBackend.forward``. ``kv_layer`` is the index of the earlier layer whose keys and
    values this layer reads (Gemma 4), or None if it has its own.
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
        """Stores keys and values in ``kv`` and attends with ``backend``. See ``AttentionBackend.forward``."""
        return backend.forward(query, key, value, kv.pages, self.window, group=kv.group, sinks=sinks)

    def shape(self, block_size: int) -> "AttentionShape":
        """Returns the shape of a backend for this layer."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, block_size, self.scale, self.soft_cap)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of a backend. See ``LayerAttention``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    soft_cap: float | None = None


class LayerKV(NamedTuple):
    """One layer's part of KV memory: ``pages`` [blocks, 2, kv_heads, block_size, row_size], and the ``group`` of layers
    whose batch lists the pages of each sequence.
    """

    pages: torch.Tensor
    group: int = 0


@dataclass(slots=True)
class AttentionBatch:
    """The ragged batch of one step for one group of layers, with B chunks and T tokens. All tensors are int32 on the
    host.

    * ``query_indptr`` [B+1] bounds each chunk's tokens in the packed batch.
    * ``page_indptr`` [B+1] bounds each chunk's pages in ``page_ids`` [sum of pages]. Only pages in use count.
    * ``last_page_len`` [B] is 1 to block_size, after this step's tokens are stored.
    * ``context_lens`` [B] are the tokens known to each chunk's attention, including this step's.
    * ``positions`` [T] is each token's index among them.

    In layers with a window, a chunk's context begins with the first page that the window of its first token reaches, or
    with an earlier page.
    """

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor


class AttentionBackend(Protocol):
    """One way to compute attention. Use it from one thread, one step at a time."""

    @property
    def batches(self) -> Sequence[AttentionBatch]:
        """The batches of the step that it is prepared for, one for each group of layers."""
        ...

    def prepare(self, *batches: AttentionBatch) -> None:
        """Takes the plan of a step: one batch per group of layers. Does all work that is the same for every layer of a
        group.
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
        """Stores this step's keys and values in one layer's pages, then attends causally. Returns [T, heads, head_dim].

        ``query`` [T, heads, head_dim], ``key`` and ``value`` [T, kv_heads, head_dim] are rotated already. ``kv`` is the
        layer's view [blocks, 2, kv_heads, block_size, row_size], of the same dtype or an 8-bit one (see ``kv_rows``).
        ``group`` is the layer's group. ``window`` limits each token to the last ``window`` tokens, including itself.
        ``sinks`` [heads] are additional scores in each head's softmax, like a key without a value (gpt-oss).
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in CUDA graphs."""

    def for_graph(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """Returns a backend for the graph of one batch size. Its ``forward`` can be captured and uses fixed addresses.

        ``batch_size`` is at most ``MAX_GRAPH_BATCH_SIZE``. ``prepare`` takes exactly that many chunks of one token,
        including pads, with at most ``max_pages`` page ids per batch. A pad is a chunk of the null page: position 0,
        context 1, last_page_len 1. Call ``prepare`` outside the graph, before the capture and before every replay, on
        the stream of the graph. Run ``forward`` once before the capture: this is where the backend learns the layers'
        windows.

        The backends of all graphs and this one share memory for plans and results, so only the backend that was
        prepared last may run.
        """
        ...
