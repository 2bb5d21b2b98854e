"""The tensors of one step, made from its columns and what the worker knows of their rows."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quire_proto.pooling import PoolingParams

from quire_engine.attention.base import AttentionBatch
from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.step import SchedulerOutput
from quire_engine.device.accelerator import upload
from quire_engine.sampling.prompt_logprobs import PromptTargets
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
    drawn from: of each chunk with draws the last, and as many before it as it has drafts;
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

    ``num_draws`` are all of the step's. ``pending`` are the rows of the worker's state whose last token is pending, in
    the order of ``ModelInput``'s ``pending_rows``. ``appended`` says which draws are appended to their row. If the
    batch ``is_plain``, these are all draws, one of each sampled row and in their order, and all are plain (see
    ``SamplingColumns``); if not, ``draws`` has all that are no pooling. ``pooled`` are the chunks of prompts that are
    pooled.
    """

    model_input: ModelInput
    num_draws: int
    draws: "list[RowDraw]"
    appended: "AppendedDraws"
    is_plain: bool
    pending: Indices
    prompt_logprobs: list[PromptTargets]
    pooled: "list[PooledChunk]"


@dataclass(frozen=True, slots=True)
class RowDraw:
    """The step's draw ``number``: of the token at ``position`` of a ``row`` for one of its outputs, ``choice``, behind
    ``num_drafts`` guessed tokens, from the logits of the sampled row ``logits_row``. Of a row that ``awaits_token``,
    one before it is pending.
    """

    number: int
    row: int
    position: int
    logits_row: int
    choice: int = 0
    num_drafts: int = 0
    awaits_token: bool = False


@dataclass(frozen=True, slots=True)
class AppendedDraws:
    """Rows [D] of the worker's state, the position in each of the token that is appended to it, and the number of its
    draw.
    """

    rows: Indices
    positions: Indices
    numbers: Indices


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The step's chunk of a prompt that is pooled: its state's ``row`` and the ``first`` of its rows among the step's
    hidden states. ``draw`` is the number of the draw that the prompt ends with; None where it goes on.
    """

    row: int
    start: int
    length: int
    first: int
    params: PoolingParams
    draw: int | None

    @property
    def rows(self) -> slice:
        """The rows of its tokens."""
        return slice(self.first, self.first + self.length)

    @property
    def end(self) -> int:
        """Tokens of the prompt up to its end."""
        return self.start + self.length


def prepare_inputs(
    states: RequestStates,
    scheduler_output: SchedulerOutput,
    block_size: int,
    groups: Sequence[KVCacheGroup] = _ONE_GROUP,
    without_loras: Sequence[int] = (),
) -> InputBatch:
    """The batch of a step for a model with these ``groups`` of layers. Adapters ``without_loras`` count as none. Raises
    ``ValueError`` for a chunk without tokens.
    """
    rows, starts = _indices(scheduler_output.rows), _indices(scheduler_output.starts)
    lengths, num_draws = _indices(scheduler_output.lengths), _indices(scheduler_output.draws)
    if lengths.min() < 1:
        raise ValueError("a chunk has no tokens")
    query_indptr, draw_indptr = _indptr(lengths), _indptr(num_draws)
    token_ids = states.tokens.gather(rows, starts, lengths, query_indptr).astype(np.int64)
    positions = np.arange(len(token_ids)) + np.repeat(starts - query_indptr[:-1], lengths)
    pooled = _pooled_chunks(states, scheduler_output, query_indptr, draw_indptr) if states.pooling else []
    awaiting, lora_ids = _indices(scheduler_output.awaiting), states.lora_ids[rows]
    pending_rows = query_indptr[1:][awaiting] - 1
    token_ids[pending_rows] = PENDING_TOKEN_ID
    if without_loras:
        lora_ids[np.isin(lora_ids, without_loras)] = 0
    drafts = np.zeros_like(rows)
    for number, draft_token_ids in scheduler_output.drafts.items():
        drafts[number] = len(draft_token_ids)
    sampled = np.flatnonzero(num_draws)
    if pooled:
        sampled = sampled[~np.isin(rows[sampled], [each.row for each in pooled])]
    appending = sampled[drafts[sampled] == 0] if scheduler_output.drafts else sampled
    appended = AppendedDraws(rows[appending], (starts + lengths)[appending], draw_indptr[appending])
    is_plain = len(appending) == draw_indptr[-1] and states.sampling.are_plain(appended.rows)
    targets = _prompt_targets(states, scheduler_output) if states.prompt_logprobs else []
    model_input = ModelInput(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        attention=tuple(
            _attention_batch(blocks, rows, query_indptr, starts, positions, block_size=block_size, window=group.window)
            for group, blocks in zip(groups, states.blocks, strict=True)
        ),
        sampled_rows=_sampled_rows(sampled, drafts[sampled], query_indptr),
        prompt_logprob_rows=_prompt_logprob_rows(targets, query_indptr) if targets else _NO_ROWS,
        pending_rows=torch.from_numpy(pending_rows) if len(awaiting) else _NO_ROWS,
        lora_ids=torch.from_numpy(np.repeat(lora_ids, lengths)) if lora_ids.any() else _NO_ROWS,
    )
    return InputBatch(
        model_input,
        num_draws=int(draw_indptr[-1]),
        draws=[] if is_plain else list(_row_draws(scheduler_output, sampled.tolist(), draw_indptr.tolist())),
        appended=appended,
        is_plain=is_plain,
        pending=rows[awaiting],
        prompt_logprobs=targets,
        pooled=pooled,
    )


def _row_draws(scheduler_output: SchedulerOutput, sampled: list[int], firsts: list[int]) -> Iterator[RowDraw]:
    """Each draw of the chunks ``sampled``: those of one prompt are from one row, those at drafts each from its own."""
    awaiting, logits_row = set(scheduler_output.awaiting), 0
    for chunk in sampled:
        row, num_draws, number = scheduler_output.rows[chunk], scheduler_output.draws[chunk], firsts[chunk]
        end, num_drafts = scheduler_output.starts[chunk] + scheduler_output.lengths[chunk], 0
        if chunk in scheduler_output.drafts:
            num_drafts = num_draws - 1
            for behind in range(num_draws):
                yield RowDraw(number + behind, row, end - num_drafts + behind, logits_row + behind, num_drafts=behind)
        else:
            for choice in range(num_draws):
                yield RowDraw(number + choice, row, end, logits_row, choice, awaits_token=chunk in awaiting)
        logits_row += num_drafts + 1


def _prompt_targets(states: RequestStates, scheduler_output: SchedulerOutput) -> list[PromptTargets]:
    """What log-probabilities are asked for of the tokens that follow those of the step's chunks."""
    targets = []
    for number in np.flatnonzero(np.isin(_indices(scheduler_output.rows), list(states.prompt_logprobs))).tolist():
        row, start = scheduler_output.rows[number], scheduler_output.starts[number]
        end = min(start + scheduler_output.lengths[number] + 1, states.num_prompt_tokens(row))
        if start + 1 < end:
            token_ids = states.tokens.row(row)[start + 1 : end].tolist()
            targets.append(PromptTargets(number, token_ids, states.prompt_logprobs[row]))
    return targets


def _pooled_chunks(
    states: RequestStates, scheduler_output: SchedulerOutput, query_indptr: Indices, draw_indptr: Indices
) -> list[PooledChunk]:
    """The chunks of a step that are pooled."""
    firsts, draws = query_indptr.tolist(), draw_indptr.tolist()
    columns = zip(scheduler_output.rows, scheduler_output.starts, scheduler_output.lengths, strict=True)
    return [
        PooledChunk(
            *(row, start, length, firsts[number], states.pooling[row]),
            draws[number] if scheduler_output.draws[number] else None,
        )
        for number, (row, start, length) in enumerate(columns)
        if row in states.pooling
    ]


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


def _sampled_rows(sampled: Indices, drafts: Indices, query_indptr: Indices) -> torch.Tensor:
    """The indices of the tokens that are drawn behind, ``ModelInput.sampled_rows``: of each of the chunks ``sampled``
    the last, and as many before it as it has ``drafts``.
    """
    last = query_indptr[1:][sampled] - 1
    if not drafts.any():
        return torch.from_numpy(last)
    bounds = _indptr(drafts + 1)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(last - drafts - bounds[:-1], drafts + 1))


def _prompt_logprob_rows(targets: Sequence[PromptTargets], query_indptr: Indices) -> torch.Tensor:
    """The indices of the tokens that targets follow: of each chunk, as many as it has, from its first token on."""
    counts = np.array([len(each.token_ids) for each in targets], np.int64)
    firsts, bounds = query_indptr[[each.number for each in targets]], _indptr(counts)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], counts))


def _indices(numbers: "array[int]") -> Indices:
    return np.array(numbers, np.int64)


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
