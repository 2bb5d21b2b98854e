"""``ModelRunner``: one model, its KV memory and its attention backend on one device. Every rank has one.

It knows batches and block copies: neither plans nor what is made of logits.
"""

from collections.abc import Sequence

import torch

from quire_engine.executor.torch.batch import ForwardBatch
from quire_engine.executor.torch.parts import Parts
from quire_engine.executor.torch.sizing import Pools
from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.copy import BlockCopy


class ModelRunner:
    """Copies blocks and computes batches, one after the other. Used by one thread, in inference mode."""

    def __init__(self, parts: Parts, pools: Pools) -> None:
        self._model = parts.model
        self._attention = parts.attention
        self._kv = parts.kv_cache(pools)

    @property
    def capacity(self) -> KvCapacity:
        """Blocks of both pools; constant."""
        return self._kv.capacity

    @property
    def dtype(self) -> torch.dtype:
        """What weights and KV memory are held in."""
        return self._model.dtype

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Copies blocks to the host, within the device, and from the host, in this order. Raises ``CopyError``."""
        self._kv.copy_out(out)
        self._kv.copy_within(within)
        self._kv.copy_in(into)

    def forward(self, batch: ForwardBatch, pending: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [T, hidden] of the batch, on the device. ``pending`` [P] int64, on the device too, are the
        tokens at ``batch.pending_rows``.
        """
        self._attention.prepare(batch.attention)
        kv = self._kv.device
        token_ids, positions = batch.token_ids.to(kv.device), batch.attention.positions.to(kv.device)
        if pending is not None:
            token_ids[batch.pending_rows.to(kv.device)] = pending
        return self._model.forward(token_ids, positions, kv, self._attention)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits [R, vocabulary] of the hidden states at ``rows`` [R]."""
        return self._model.logits(hidden[rows.to(hidden.device)])

    def close(self) -> None:
        """Gives the KV memory back. Nothing can be computed any more."""
        self._kv.close()
