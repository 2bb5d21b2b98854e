"""The plan of one step as FlashInfer takes it: int32 arrays on the host and on the device. Knows no kernel."""

from dataclasses import dataclass

import numpy as np
import torch

from quire_engine.attention.base import AttentionBatch, int32
from quire_engine.device.transfers import stage_arrays


@dataclass(frozen=True, slots=True)
class PageArrays:
    """The arrays of an ``AttentionBatch``, all in one place, and ``chunk_ids`` [T], the chunk of each token."""

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    chunk_ids: torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token."""
        return len(self.positions) == len(self.last_page_len)


def stage(batch: AttentionBatch, device: torch.device) -> tuple[PageArrays, PageArrays]:
    """The batch on the host, where FlashInfer copies some of it from once more, and on the device. Nothing is waited
    for.
    """
    arrays = (
        *(batch.query_indptr, batch.page_indptr, batch.page_ids, batch.last_page_len),
        *(batch.context_lens, batch.positions, _chunk_ids(batch.query_indptr)),
    )
    host, on_device = stage_arrays([array.numpy() for array in arrays], device)
    return PageArrays(*host), PageArrays(*on_device)


def split_tokens(batch: AttentionBatch, block_size: int) -> AttentionBatch:
    """The same tokens, each as a chunk of its own, which sees its sequence up to itself."""
    context_lens = batch.positions.numpy() + 1
    page_counts = -(-context_lens // block_size)
    page_indptr = np.concatenate(([0], np.cumsum(page_counts)))
    first_pages = batch.page_indptr.numpy()[_chunk_ids(batch.query_indptr).numpy()]
    places = np.repeat(first_pages - page_indptr[:-1], page_counts) + np.arange(page_indptr[-1])
    return AttentionBatch(
        query_indptr=torch.arange(len(context_lens) + 1, dtype=torch.int32),
        page_indptr=int32(page_indptr),
        page_ids=int32(batch.page_ids.numpy()[places]),
        last_page_len=int32(context_lens - (page_counts - 1) * block_size),
        context_lens=int32(context_lens),
        positions=batch.positions,
    )


def _chunk_ids(query_indptr: torch.Tensor) -> torch.Tensor:
    lengths = np.diff(query_indptr.numpy())
    return int32(np.repeat(np.arange(len(lengths)), lengths))
