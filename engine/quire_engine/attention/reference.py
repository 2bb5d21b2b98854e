"""The oracle: attention as the formula says it, one chunk after the other. Clear, not fast; any device and
dtype.
"""

from itertools import pairwise

import torch

from quire_engine.attention.base import AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import load_pages, store_rows
from quire_engine.device.accelerator import upload


class ReferenceAttention:
    """Softmax of scaled products in float32, over exactly the keys that each token may see.

    Pages are cut to the sequence's length before anything is computed: what lies behind it was left by
    others, and may be NaN.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(self, batch: AttentionBatch) -> None:
        """Keeps the bounds of the chunks, and works out the slot of every token."""
        size = self._shape.block_size
        self._queries = _slices(batch.query_indptr)
        self._pages = [batch.page_ids[pages].long() for pages in _slices(batch.page_indptr)]
        self._context_lens: list[int] = batch.context_lens.tolist()
        self._positions = batch.positions.long()
        pages = [
            pages[self._positions[tokens] // size] for pages, tokens in zip(self._pages, self._queries, strict=True)
        ]
        self._slot_pages = torch.cat(pages) if pages else self._positions
        self._slot_offsets = self._positions % size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        window: int | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        pages, offsets = upload(self._slot_pages, kv.device), upload(self._slot_offsets, kv.device)
        store_rows(kv, 0, pages, offsets, key)
        store_rows(kv, 1, pages, offsets, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunk, tokens in enumerate(self._queries):
            rows = self._gather(chunk, kv)
            hidden = upload(~_visible(self._positions[tokens], rows.shape[2], window), rows.device)
            output[tokens] = self._attend(query[tokens], rows, hidden, sinks)
        return output

    def _gather(self, chunk: int, kv: torch.Tensor) -> torch.Tensor:
        """Keys and values [2, kv_heads, context, head_dim] of one chunk's sequence, in float32."""
        pages = load_pages(kv, upload(self._pages[chunk], kv.device), self._shape.head_dim).permute(1, 2, 0, 3, 4)
        return pages.flatten(2, 3)[:, :, : self._context_lens[chunk]].float()

    def _attend(
        self, query: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of ``query`` [T, heads, head_dim] to one sequence's keys and values but for those ``hidden``
        [T, context].
        """
        keys, values = rows.repeat_interleave(self._shape.num_heads // self._shape.num_kv_heads, 1)
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self._shape.scale
        weights = softmax_weights(scores, hidden, self._shape.soft_cap, sinks)
        return (weights @ values).transpose(0, 1).to(query.dtype)


def softmax_weights(
    scores: torch.Tensor, hidden: torch.Tensor, soft_cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The weights of keys, [heads, T, context], of their ``scores`` before the cap, those that are ``hidden`` being 0.
    With ``sinks`` [heads], weights add up to less than 1.
    """
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:2], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _visible(positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
    """Which of ``context`` tokens each position sees: those up to itself, no older than the window. [T, context]."""
    distance = positions[:, None] - torch.arange(context)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _slices(indptr: torch.Tensor) -> list[slice]:
    bounds = indptr.tolist()
    return [slice(*pair) for pair in pairwise(bounds)]
