"""Steps of random sequences on scattered pages, as a model hands them to an attention backend, on any device."""

from dataclasses import dataclass, replace

import torch
from quire_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import encode_rows

LAYER, LAYERS = 1, 3


@dataclass
class RaggedStep:
    """A step and the KV memory before it, in which all that belongs to nobody is NaN. Queries, keys and values are
    slices of one tensor, as a fused projection makes them.
    """

    shape: AttentionShape
    batch: AttentionBatch
    heads: torch.Tensor  # [T, heads + 2 * kv_heads, head_dim]
    kv: torch.Tensor  # [blocks, layers, 2, kv_heads, block_size, head_dim]

    def run(self, backend: AttentionBackend, *windows: int | None) -> list[torch.Tensor]:
        """What one layer for each window gives, and the KV memory after it."""
        backend.prepare(self.batch)
        return [result for window in windows for result in self.forward(backend, window)]

    def forward(
        self, backend: AttentionBackend, window: int | None, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.kv.clone()
        parts = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        return backend.forward(*self.heads.split(parts, dim=1), kv[:, LAYER], window, sinks=sinks), kv

    def to(self, device: torch.device) -> "RaggedStep":
        return replace(self, heads=self.heads.to(device), kv=self.kv.to(device))


def make_step(
    shape: AttentionShape,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    *,
    pads: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> RaggedStep:
    """A chunk for each of ``lengths``, its tokens and the tokens before them; then pads on the null page. KV memory is
    of ``kv_dtype``, by default of ``dtype``.
    """
    noise = torch.Generator().manual_seed(seed)
    size = shape.block_size
    contexts = [tokens + past for tokens, past in lengths]
    counts = [-(-context // size) for context in contexts]
    ids = (torch.randperm(sum(counts) + 2, generator=noise) + 1)[: sum(counts)]
    kv = torch.full((sum(counts) + 3, LAYERS, 2, shape.num_kv_heads, size, shape.head_dim), torch.nan, dtype=dtype)
    kv[0] = 0
    for pages, (_, past) in zip(ids.split(counts), lengths, strict=True):
        for position in range(past):
            slot = kv[pages[position // size], LAYER, :, :, position % size]
            slot.copy_(torch.randn(slot.shape, generator=noise))
    tokens = sum(tokens for tokens, _ in lengths) + pads
    heads = torch.randn(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=noise).to(dtype)
    return RaggedStep(shape, _batch(lengths, counts, ids, size, pads), heads, encode_rows(kv, kv_dtype or dtype))


def _batch(
    lengths: list[tuple[int, int]], counts: list[int], ids: torch.Tensor, size: int, pads: int
) -> AttentionBatch:
    lengths, counts = lengths + [(1, 0)] * pads, counts + [1] * pads
    contexts = torch.tensor([tokens + past for tokens, past in lengths])
    return AttentionBatch(
        query_indptr=torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0).int(),
        page_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        page_ids=torch.cat([ids, torch.zeros(pads)]).int(),
        last_page_len=((contexts - 1) % size + 1).int(),
        context_lens=contexts.int(),
        positions=torch.cat([torch.arange(past, past + tokens) for tokens, past in lengths]).int(),
    )


def beside(*steps: RaggedStep) -> RaggedStep:
    """The chunks of several steps as one step, in KV memory that is all of theirs."""
    batches = [step.batch for step in steps]
    blocks = [0, *torch.tensor([len(step.kv) for step in steps]).cumsum(0).tolist()]
    shifted = [batch.page_ids + first for batch, first in zip(batches, blocks, strict=False)]
    batch = AttentionBatch(
        query_indptr=_chained([batch.query_indptr for batch in batches]),
        page_indptr=_chained([batch.page_indptr for batch in batches]),
        page_ids=torch.cat(shifted).int(),
        last_page_len=torch.cat([batch.last_page_len for batch in batches]),
        context_lens=torch.cat([batch.context_lens for batch in batches]),
        positions=torch.cat([batch.positions for batch in batches]),
    )
    heads, kv = (torch.cat([getattr(step, name) for step in steps]) for name in ("heads", "kv"))
    return RaggedStep(steps[0].shape, batch, heads, kv)


def _chained(bounds: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(1), *(each.diff() for each in bounds)]).cumsum(0).int()
