"""The tensors of one step, made from its chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.step import SampleRequest, ScheduledChunk
from quire_engine.device.accelerator import upload
from quire_engine.worker.request_states import Indices, RaggedRows, RequestStates

PENDING_TOKEN_ID = -1
"""Stands in a batch for a token that the step before draws."""
_NO_ROWS = torch.empty(0, dtype=torch.int64)
_ONE_GROUP = (KVCacheGroup(),)
WINDOW_ALIGNMENT = 512
"""The context of a chunk in layers with a window begins at a multiple of so many tokens. No kernel has larger tiles of
keys, so that the tiles, and with them the order of every sum, are the same wherever chunks begin.
"""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of a step, packed in the order of its chunks: all that a forward pass needs, as plain numbers.

    ``token_ids`` [T] int64, and ``positions`` [T] int32, each one's index in its sequence. ``attention`` has the batch
    of each group of layers. ``sampled_rows`` [S] int64 are the indices in the batch of the tokens whose logits are
    drawn from: of each chunk with sample requests the last, and as many before it as it has drafts;
    ``prompt_logprob_rows`` [N] int64 those of the tokens that targets follow. ``pending_rows`` [P] int64 are the
    indices of tokens that are not known yet, as they are drawn by the step before. ``lora_ids`` [T] int64 are the
    numbers of the tokens' adapters, 0 where there is none; [0] if none has one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    sampled_rows: torch.Tensor
    prompt_logprob_rows: torch.Tensor
    pending_rows: torch.Tensor
    lora_ids: torch.Tensor = _NO_ROWS

    @property
    def is_decode(self) -> bool:
        """Whether each chunk is one token."""
        return len(self.token_ids) == len(self.attention[0].context_lens)

    @property
    def has_loras(self) -> bool:
        """Whether any token has an adapter."""
        return len(self.lora_ids) > 0

    @property
    def logits_rows(self) -> torch.Tensor:
        """The indices [R] int64, rising, of the tokens whose logits are asked for."""
        if not len(self.prompt_logprob_rows):
            return self.sampled_rows
        return torch.cat((self.sampled_rows, self.prompt_logprob_rows)).unique()

    @property
    def is_drawn_from_whole(self) -> bool:
        """Whether a token is drawn behind every token: each chunk is one token, or one and its drafts."""
        return len(self.token_ids) == len(self.sampled_rows)

    def check_vocabulary(self, size: int) -> None:
        """Raises ``IndexError`` for a token that is none of the first ``size``: a GPU could not go on after it."""
        bounds = self.token_ids.aminmax()
        lowest, highest = int(bounds.min), int(bounds.max)
        if lowest < PENDING_TOKEN_ID or highest >= size or (lowest == PENDING_TOKEN_ID and not len(self.pending_rows)):
            raise IndexError(f"A token between {lowest} and {highest} is none of the vocabulary's {size}.")


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What a step computes and what is made of it.

    ``sample_requests`` are all of the step's; ``logits_rows`` says from which of the S sampled rows each one draws, and
    ``awaits_token`` whether a token before it is pending. ``prompt_logprob_chunks`` are those with
    targets. ``pending_sequence_ids`` are the sequences whose last token is pending, in the order of ``ModelInput``'s
    ``pending_rows``. ``drawn`` are the rows that a token is drawn for which is appended to
    them. If the batch ``is_plain``, that is one for each of the sampled rows, in their order, and all draws are plain
    (see ``SamplingColumns``): then there are no ``sample_requests``. ``pooled`` are the chunks of prompts that are
    pooled.
    """

    model_input: ModelInput
    sample_requests: list[SampleRequest]
    logits_rows: list[int]
    awaits_token: list[bool]
    prompt_logprob_chunks: list[ScheduledChunk]
    pending_sequence_ids: list[int]
    drawn: "DrawnRows"
    is_plain: bool
    pooled: "list[PooledChunk]"


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows [D] that a token is drawn for, its position in each, and the sequences that they are of."""

    rows: Indices
    positions: Indices
    sequence_ids: list[int]


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk of a prompt that is pooled, and the row of its first token among the step's hidden states."""

    chunk: ScheduledChunk
    row: int

    @property
    def rows(self) -> slice:
        """The rows of its tokens."""
        return slice(self.row, self.row + self.chunk.length)


def prepare_inputs(
    states: RequestStates,
    chunks: Sequence[ScheduledChunk],
    block_size: int,
    groups: Sequence[KVCacheGroup] = _ONE_GROUP,
) -> InputBatch:
    """The batch of ``chunks``, each of at least one token, for a model with these ``groups`` of layers."""
    rows = np.array([chunk.row for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    query_indptr = _indptr(lengths)
    num_tokens = int(query_indptr[-1])
    token_ids = states.tokens.gather(rows, starts, lengths, query_indptr).astype(np.int64)
    positions = np.arange(num_tokens) + np.repeat(starts - query_indptr[:-1], lengths)
    sampled = [chunk for chunk in chunks if chunk.sample_requests]
    appending = [chunk for chunk in sampled if not chunk.draft_token_ids]
    drawn = DrawnRows(
        np.array([chunk.row for chunk in appending], np.int64),
        np.array([chunk.start + chunk.length for chunk in appending], np.int64),
        [chunk.sequence_id for chunk in appending],
    )
    num_draws = sum([len(chunk.sample_requests) for chunk in sampled])
    is_plain = len(appending) == len(sampled) == num_draws and states.sampling.are_plain(drawn.rows)
    pending = [index for index, chunk in enumerate(chunks) if chunk.awaits_token]
    pending_rows = query_indptr[1:][pending] - 1
    token_ids[pending_rows] = PENDING_TOKEN_ID
    prompt_logprob_chunks = [chunk for chunk in chunks if chunk.prompt_logprob_targets]
    lora_ids = np.array([chunk.lora_int_id for chunk in chunks], np.int64)
    model_input = ModelInput(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        attention=tuple(
            _attention_batch(blocks, rows, query_indptr, starts, positions, block_size=block_size, window=group.window)
            for group, blocks in zip(groups, states.blocks, strict=True)
        ),
        sampled_rows=_sampled_rows(chunks, query_indptr),
        prompt_logprob_rows=_prompt_logprob_rows(chunks, query_indptr) if prompt_logprob_chunks else _NO_ROWS,
        pending_rows=torch.from_numpy(pending_rows) if pending else _NO_ROWS,
        lora_ids=torch.from_numpy(np.repeat(lora_ids, lengths)) if lora_ids.any() else _NO_ROWS,
    )
    return InputBatch(
        model_input,
        sample_requests=[] if is_plain else [request for chunk in sampled for request in chunk.sample_requests],
        logits_rows=[] if is_plain else _logits_rows(sampled),
        awaits_token=[] if is_plain else [chunk.awaits_token for chunk in sampled for _ in chunk.sample_requests],
        prompt_logprob_chunks=prompt_logprob_chunks,
        pending_sequence_ids=[chunks[index].sequence_id for index in pending],
        drawn=drawn,
        is_plain=is_plain,
        pooled=[
            PooledChunk(chunk, row)
            for chunk, row in zip(chunks, query_indptr[:-1].tolist(), strict=True)
            if chunk.pooling is not None
        ],
    )


def _attention_batch(
    blocks: RaggedRows,
    rows: Indices,
    query_indptr: Indices,
    starts: Indices,
    positions: Indices,
    *,
    block_size: int,
    window: int | None,
) -> AttentionBatch:
    """The batch of one group of layers, whose block tables these are. With a ``window`` the context of a chunk begins
    where that of its first token does, or before it, at a multiple of ``WINDOW_ALIGNMENT``.
    """
    lengths = np.diff(query_indptr)
    context_lens, firsts = starts + lengths, np.zeros_like(starts)
    if window is not None:
        alignment = math.lcm(WINDOW_ALIGNMENT, block_size)
        skipped = np.maximum(starts + 1 - window, 0) // alignment * alignment
        context_lens, positions = context_lens - skipped, positions - np.repeat(skipped, lengths)
        firsts = skipped // block_size
    page_counts = -(-context_lens // block_size)
    page_indptr, last_page_len = _indptr(page_counts), context_lens - (page_counts - 1) * block_size
    page_ids = blocks.gather(rows, firsts, page_counts, page_indptr)
    arrays = query_indptr, page_indptr, page_ids, last_page_len, context_lens, positions
    return AttentionBatch(*[torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays])


def _indptr(sizes: Indices) -> Indices:
    """[0, and the running sum of ``sizes``]."""
    indptr = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=indptr[1:])
    return indptr


def _sampled_rows(chunks: Sequence[ScheduledChunk], query_indptr: Indices) -> torch.Tensor:
    """The indices of the tokens that are drawn behind, ``ModelInput.sampled_rows``."""
    last = (query_indptr[1:] - 1)[[bool(chunk.sample_requests) for chunk in chunks]]
    drafts = np.array([chunk.num_draft_tokens for chunk in chunks if chunk.sample_requests], np.int64)
    if not drafts.any():
        return torch.from_numpy(last)
    bounds = _indptr(drafts + 1)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(last - drafts - bounds[:-1], drafts + 1))


def _logits_rows(sampled: Sequence[ScheduledChunk]) -> list[int]:
    """Which of the sampled rows each sample request draws from: outputs of one prompt all from one, drafts each from
    its own.
    """
    rows: list[int] = []
    first = 0
    for chunk in sampled:
        count = chunk.num_draft_tokens + 1
        rows += range(first, first + count) if count > 1 else [first] * len(chunk.sample_requests)
        first += count
    return rows


def _prompt_logprob_rows(chunks: Sequence[ScheduledChunk], query_indptr: Indices) -> torch.Tensor:
    """The indices of the tokens that targets follow: of each chunk, as many as it has, from its first token on."""
    counts = np.array([len(chunk.prompt_logprob_targets) for chunk in chunks], np.int64)
    bounds = _indptr(counts)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(query_indptr[:-1] - bounds[:-1], counts))


def pad_decode(batch: AttentionBatch, size: int) -> AttentionBatch:
    """The same batch, of chunks of one token, with as many more as make it ``size``: each the first token of a sequence
    whose only page is the null page. What they store there is never read.
    """
    missing = size - len(batch.context_lens)
    if not missing:
        return batch
    zeros, ones = torch.zeros(missing, dtype=torch.int32), torch.ones(missing, dtype=torch.int32)
    counts = ones.cumsum(0, dtype=torch.int32)
    return AttentionBatch(
        query_indptr=torch.cat((batch.query_indptr, batch.query_indptr[-1] + counts)),
        page_indptr=torch.cat((batch.page_indptr, batch.page_indptr[-1] + counts)),
        page_ids=torch.cat((batch.page_ids, zeros)),
        last_page_len=torch.cat((batch.last_page_len, ones)),
        context_lens=torch.cat((batch.context_lens, ones)),
        positions=torch.cat((batch.positions, zeros)),
    )


def dummy_decode(size: int) -> AttentionBatch:
    """A batch of nothing but pads, for one group of layers."""
    start, nothing = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    return pad_decode(AttentionBatch(start, start, nothing, nothing, nothing, nothing), size)


def scatter_pending(token_ids: torch.Tensor, rows: torch.Tensor, pending: torch.Tensor) -> None:
    """Writes ``pending`` [P] into ``token_ids`` [T], both int64 on the device, at ``rows`` [P], which rise."""
    if len(rows) == len(token_ids):
        token_ids.copy_(pending)
    else:
        token_ids.index_copy_(0, upload(rows, token_ids.device), pending)
