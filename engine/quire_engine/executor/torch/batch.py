"""The tensors of one step, made from its chunks. Knows plans and numpy, no model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.scheduling.plan import PENDING, Chunk, Draw


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, packed in the order of its chunks: all that a forward pass needs, as plain numbers.

    ``token_ids`` [T] int64. ``sampled_rows`` [S] int64 are the places in the batch of the tokens whose logits are drawn
    from, the last of each chunk with draws; ``scored_rows`` [N] int64 those of the tokens that targets follow.
    ``pending_rows`` [P] int64 are the places of tokens that are not known yet, as they are drawn by the step before.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    sampled_rows: torch.Tensor
    scored_rows: torch.Tensor
    pending_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step computes and what is made of it.

    ``draws`` are all of the step's, and ``draw_rows`` says from which of the S sampled rows each one is. ``scored`` are
    the chunks with targets.
    """

    forward: ForwardBatch
    draws: list[Draw]
    draw_rows: list[int]
    scored: list[Chunk]


def pack(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    """The batch of ``chunks``, each of at least one token."""
    lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int64, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    queries, ends = _bounds(lengths), starts + lengths
    total = int(queries[-1])
    positions = np.arange(total) + np.repeat(starts - queries[:-1], lengths)
    page_counts = -(-ends // block_size)
    pages = _bounds(page_counts)
    page_lists = (chunk.block_ids[:count] for chunk, count in zip(chunks, page_counts.tolist(), strict=True))
    sampling = np.fromiter((bool(chunk.draws) for chunk in chunks), np.bool_, len(chunks))
    sampled = [chunk for chunk in chunks if chunk.draws]
    token_ids = torch.from_numpy(_flat((chunk.token_ids for chunk in chunks), np.int64, total))
    forward = ForwardBatch(
        token_ids=token_ids,
        attention=AttentionBatch(
            query_indptr=_int32(queries),
            page_indptr=_int32(pages),
            page_ids=torch.from_numpy(_flat(page_lists, np.int32, int(pages[-1]))),
            last_page_len=_int32(ends - (page_counts - 1) * block_size),
            context_lens=_int32(ends),
            positions=_int32(positions),
        ),
        sampled_rows=torch.from_numpy((queries[1:] - 1)[sampling]),
        scored_rows=_target_rows(chunks, queries[:-1]),
        pending_rows=(token_ids == PENDING).nonzero().squeeze(1),
    )
    return StepBatch(
        forward,
        draws=[draw for chunk in sampled for draw in chunk.draws],
        draw_rows=[row for row, chunk in enumerate(sampled) for _ in chunk.draws],
        scored=[chunk for chunk in chunks if chunk.targets],
    )


def _target_rows(chunks: Sequence[Chunk], firsts: np.ndarray) -> torch.Tensor:
    """The places of the tokens that targets follow: of each chunk, as many as it has, from its first token on."""
    counts = np.fromiter((len(chunk.targets) for chunk in chunks), np.int64, len(chunks))
    bounds = _bounds(counts)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], counts))


def _bounds(sizes: np.ndarray) -> np.ndarray:
    """[0, and the running sum of ``sizes``]."""
    return np.concatenate(([0], np.cumsum(sizes)))


def _flat(lists: Iterable[list[int]], dtype: type, total: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype, total)


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
