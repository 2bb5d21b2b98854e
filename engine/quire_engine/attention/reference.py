"""The reference for other backends: attention computed by the formula, one chunk at a time. Clear, not fast. Works on
any device and dtype.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from quire_engine.attention.base import AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import load_pages, store_rows
from quire_engine.device.accelerator import upload


class ReferenceAttention:
    """Softmax of scaled products in float32, over exactly the keys that each token may see.

    Pages are cut to the sequence's length before any computation: the rest was left by other sequences and may be NaN.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self.batches: Sequence[AttentionBatch] = ()

    def prepare(self, *batches: AttentionBatch) -> None:
        """See ``AttentionBackend.prepare``."""
        self.batches = batches
        self._plans = [_ChunkPlan(batch, self._shape.block_size) for batch in batches]

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
        plan = self._plans[group]
        pages, offsets = upload(plan.slot_pages, kv.device), upload(plan.slot_offsets, kv.device)
        store_rows(kv, 0, pages, offsets, key)
        store_rows(kv, 1, pages, offsets, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunk, tokens in enumerate(plan.queries):
            rows = self._gather(plan, chunk, kv)
            hidden = upload(~_visible(plan.positions[tokens], rows.shape[2], window), rows.device)
            output[tokens] = self._attend(query[tokens], rows, hidden, sinks)
        return output

    def _gather(self, plan: "_ChunkPlan", chunk: int, kv: torch.Tensor) -> torch.Tensor:
        """Returns the keys and values [2, kv_heads, context, head_dim] of one chunk's sequence, in float32."""
        pages = load_pages(kv, upload(plan.pages[chunk], kv.device), self._shape.head_dim).permute(1, 2, 0, 3, 4)
        return pages.flatten(2, 3)[:, :, : plan.context_lens[chunk]].float()

    def _attend(
        self, query: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes the attention of ``query`` [T, heads, head_dim] to one sequence's keys and values, except the
        ``hidden`` [T, context].
        """
        keys, values = rows.repeat_interleave(self._shape.num_heads // self._shape.num_kv_heads, 1)
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self._shape.scale
        weights = softmax_weights(scores, hidden, self._shape.soft_cap, sinks)
        return (weights @ values).transpose(0, 1).to(query.dtype)


class _ChunkPlan:
    """The bounds of the chunks in one group's batch, and the slot of every token."""

    def __init__(self, batch: AttentionBatch, block_size: int) -> None:
        self.queries = _slices(batch.query_indptr)
        self.pages = [batch.page_ids[pages].long() for pages in _slices(batch.page_indptr)]
        self.context_lens: list[int] = batch.context_lens.tolist()
        self.positions = batch.positions.long()
        pages = [
            pages[self.positions[tokens] // block_size] for pages, tokens in zip(self.pages, self.queries, strict=True)
        ]
        self.slot_pages = torch.cat(pages) if pages else self.positions
        self.slot_offsets = self.positions % block_size


def softmax_weights(
    scores: torch.Tensor, hidden: torch.Tensor, soft_cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Returns the weights [heads, T, context] of keys from their ``scores`` before the cap. Keys in ``hidden`` get
    weight 0. With ``sinks`` [heads], weights add up to less than 1.
    """
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:2], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _visible(positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
    """Returns which of ``context`` tokens each position sees, [T, context]: tokens up to itself within the window."""
    distance = positions[:, None] - torch.arange(context)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _slices(indptr: torch.Tensor) -> list[slice]:
    bounds = indptr.tolist()
    return [slice(*pair) for pair in pairwise(bounds)]
