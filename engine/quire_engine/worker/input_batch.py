"""The tensors of one step, made from the step's columns and the worker's row states."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quire_proto.pooling import PoolingParams

from quire_engine.attention.base import AttentionBatch
from quire_engine.attention.state_cache import StateChunks
from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.step import SchedulerOutput
from quire_engine.device.accelerator import upload
from quire_engine.sampling.prompt_logprobs import PromptTargets
from quire_engine.worker.request_states import Indices, RaggedRows, RequestStates, StateRows

PENDING_TOKEN_ID = -1
"""Stands in a batch for a pending token, which the previous step samples."""
_NO_ROWS = torch.empty(0, dtype=torch.int64)
_ONE_GROUP = (KVCacheGroup(),)
WINDOW_ALIGNMENT = 512
"""In layers with a window, the context of a chunk begins at a multiple of this many tokens. No kernel has larger key
tiles, so the tiles, and with them the order of every sum, do not depend on where chunks begin.
"""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of a step, packed in chunk order: all that a forward pass needs, as plain numbers.

    * ``token_ids`` [T] int64.
    * ``positions`` [T] int32: the index of each token in its sequence.
    * ``attention``: the batch of each KV cache group.
    * ``sampled_rows`` [S] int64: the indices of the tokens whose logits are sampled from. A chunk with draws has its
      last token here, and one token before it per draft.
    * ``prompt_logprob_rows`` [N] int64: the indices of the tokens before each prompt log-probability target.
    * ``pending_rows`` [P] int64: the indices of tokens that the previous step has yet to sample.
    * ``lora_ids`` [T] int64: the adapter ids of the tokens, 0 for none; [0] if no token has an adapter.
    * ``states``: the chunks' blocks of states, if the model has recurrent layers.
    * ``token_types`` [T] int64: 1 for the tokens of the second text of a pair, else 0; [0] if no prompt is a pair.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    sampled_rows: torch.Tensor
    prompt_logprob_rows: torch.Tensor
    pending_rows: torch.Tensor
    lora_ids: torch.Tensor = _NO_ROWS
    states: StateChunks | None = None
    token_types: torch.Tensor = _NO_ROWS

    @property
    def is_decode(self) -> bool:
        """Whether each chunk has one token."""
        return len(self.token_ids) == len(self.attention[0].context_lens)

    @property
    def has_loras(self) -> bool:
        """Whether any token has an adapter."""
        return len(self.lora_ids) > 0

    def check_vocabulary(self, size: int) -> None:
        """Raises ``IndexError`` for a token outside the vocabulary of ``size``. On a GPU such a token would break the
        device context.
        """
        token_ids = self.token_ids.numpy()
        lowest, highest = token_ids.min(), token_ids.max()
        if lowest < PENDING_TOKEN_ID or highest >= size or (lowest == PENDING_TOKEN_ID and not len(self.pending_rows)):
            raise IndexError(f"A token between {lowest} and {highest} is none of the vocabulary's {size}.")


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What a step computes, and what is done with the result. Made for each step: what vLLM's ``InputBatch`` keeps
    between steps is in ``RequestStates``.

    ``num_draws`` counts all draws of the step. ``needs_logits`` says whether it draws from logits, or reads the logits
    of prompt tokens. ``pending`` are the worker's rows whose last token is pending, in the order of
    ``ModelInput.pending_rows``. ``appended`` lists the draws whose token is appended to its row. ``pooled``
    are the chunks of pooled prompts.

    If ``is_plain``, ``appended`` has all draws, one per sampled row in order, all plain (see ``SamplingColumns``).
    Otherwise ``row_draws`` has all draws that do not pool.
    """

    model_input: ModelInput
    num_draws: int
    needs_logits: bool
    row_draws: "list[RowDraw]"
    appended: "AppendedDraws"
    is_plain: bool
    pending: Indices
    prompt_logprobs: list[PromptTargets]
    pooled: "list[PooledChunk]"


@dataclass(frozen=True, slots=True)
class RowDraw:
    """Draw ``number`` of the step: samples the token at ``position`` of ``row`` for the row's output ``choice``. It
    reads the logits of sampled row ``logits_row`` and follows ``num_drafts`` draft tokens. ``awaits_token`` says that a
    token before it is pending.
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
    """For each appended token [D]: the worker's row, the position in that row, and the number of the draw."""

    rows: Indices
    positions: Indices
    numbers: Indices


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk of a pooled prompt. ``row`` is the worker's row, and ``first`` the chunk's first row in the step's hidden
    states. ``draw`` is the number of the draw that ends the prompt, or None if the prompt continues.
    """

    row: int
    start: int
    length: int
    first: int
    params: PoolingParams
    draw: int | None

    @property
    def rows(self) -> slice:
        """The rows of its tokens in the hidden states."""
        return slice(self.first, self.first + self.length)

    @property
    def end(self) -> int:
        """The number of prompt tokens up to the end of the chunk."""
        return self.start + self.length


def prepare_inputs(
    states: RequestStates,
    scheduler_output: SchedulerOutput,
    block_size: int,
    groups: Sequence[KVCacheGroup] = _ONE_GROUP,
    without_loras: Sequence[int] = (),
) -> InputBatch:
    """Makes the batch of a step for a model with these KV cache ``groups``. Rows whose adapter is in ``without_loras``
    run without one. Raises ``ValueError`` for a chunk without tokens.
    """
    columns = scheduler_output.rows, scheduler_output.starts, scheduler_output.lengths, scheduler_output.num_draws
    rows, starts, lengths, num_draws, awaiting = (
        np.array(column, np.int64) for column in (*columns, scheduler_output.awaiting)
    )
    if lengths.min() < 1:
        raise ValueError("a chunk has no tokens")
    query_indptr, draw_indptr = _indptr(lengths), _indptr(num_draws)
    token_ids = states.tokens.gather(rows, starts, lengths, query_indptr).astype(np.int64)
    positions = np.arange(len(token_ids)) + np.repeat(starts - query_indptr[:-1], lengths)
    pooled = _pooled_chunks(states, scheduler_output, query_indptr, draw_indptr) if states.pooling else []
    lora_ids = states.lora_ids[rows]
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
    last_rows = query_indptr[1:][sampled] - 1
    appended = AppendedDraws(rows[appending], (starts + lengths)[appending], draw_indptr[appending])
    is_plain = len(appending) == draw_indptr[-1] and bool(states.sampling.is_plain[appended.rows].all())
    targets = _prompt_targets(states, scheduler_output) if states.prompt_logprobs else []
    model_input = ModelInput(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        attention=tuple(
            _attention_batch(blocks, rows, query_indptr, starts, positions, block_size=block_size, window=group.window)
            for group, blocks in zip(groups, states.block_tables, strict=True)
        ),
        sampled_rows=torch.from_numpy(
            _sampled_rows(last_rows, drafts[sampled]) if scheduler_output.drafts else last_rows
        ),
        prompt_logprob_rows=_prompt_logprob_rows(targets, query_indptr) if targets else _NO_ROWS,
        pending_rows=torch.from_numpy(pending_rows) if len(awaiting) else _NO_ROWS,
        lora_ids=torch.from_numpy(np.repeat(lora_ids, lengths)) if lora_ids.any() else _NO_ROWS,
        states=None if states.states is None else _state_chunks(states.states, rows, query_indptr, starts),
        token_types=_token_types(pooled, positions) if pooled else _NO_ROWS,
    )
    return InputBatch(
        model_input,
        num_draws=int(draw_indptr[-1]),
        needs_logits=bool(len(sampled) or targets),
        row_draws=[] if is_plain else list(_row_draws(scheduler_output, sampled.tolist(), draw_indptr.tolist())),
        appended=appended,
        is_plain=is_plain,
        pending=rows[awaiting],
        prompt_logprobs=targets,
        pooled=pooled,
    )


def _row_draws(scheduler_output: SchedulerOutput, sampled: list[int], firsts: list[int]) -> Iterator[RowDraw]:
    """Yields each draw of the chunks ``sampled``. The draws of a prompt share one row of logits; the draws of drafts
    have one each.
    """
    awaiting, logits_row = set(scheduler_output.awaiting), 0
    for chunk in sampled:
        row, num_draws, number = scheduler_output.rows[chunk], scheduler_output.num_draws[chunk], firsts[chunk]
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
    """Returns the log-probability targets of the step's chunks: the prompt tokens that follow the tokens of each
    chunk.
    """
    targets = []
    wanted = np.isin(np.array(scheduler_output.rows, np.int64), list(states.prompt_logprobs))
    for number in np.flatnonzero(wanted).tolist():
        row, start = scheduler_output.rows[number], scheduler_output.starts[number]
        end = min(start + scheduler_output.lengths[number] + 1, states.num_prompt_tokens(row))
        if start + 1 < end:
            token_ids = states.tokens.row(row)[start + 1 : end].tolist()
            targets.append(PromptTargets(number, token_ids, states.prompt_logprobs[row]))
    return targets


def _pooled_chunks(
    states: RequestStates, scheduler_output: SchedulerOutput, query_indptr: Indices, draw_indptr: Indices
) -> list[PooledChunk]:
    """Returns the pooled chunks of a step."""
    firsts, draws = query_indptr.tolist(), draw_indptr.tolist()
    columns = zip(scheduler_output.rows, scheduler_output.starts, scheduler_output.lengths, strict=True)
    return [
        PooledChunk(
            *(row, start, length, firsts[number], states.pooling[row]),
            draws[number] if scheduler_output.num_draws[number] else None,
        )
        for number, (row, start, length) in enumerate(columns)
        if row in states.pooling
    ]


def _token_types(pooled: Sequence[PooledChunk], positions: Indices) -> torch.Tensor:
    """Returns ``ModelInput.token_types``. ``positions`` are the indices of all tokens in their sequences."""
    pairs = [each for each in pooled if each.params.second_text_start]
    types = np.zeros_like(positions if pairs else positions[:0])
    for each in pairs:
        types[each.rows] = positions[each.rows] >= each.params.second_text_start
    return torch.from_numpy(types)


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
    """Makes the batch of one KV cache group, whose block tables are ``blocks``. With a ``window``, the context of a
    chunk begins at the multiple of ``WINDOW_ALIGNMENT`` at or before the window of its first token.
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


def _state_chunks(states: StateRows, rows: Indices, query_indptr: Indices, starts: Indices) -> StateChunks:
    """Returns the blocks of states that the chunks read and write."""
    size = states.block_size
    firsts = np.maximum(starts - 1, 0) // size
    counts = (starts + np.diff(query_indptr) - 1) // size + 1 - firsts
    indptr = _indptr(counts)
    blocks = states.gather(rows, firsts, counts, indptr).astype(np.int64)
    return StateChunks(starts, query_indptr, blocks, indptr)


def _indptr(sizes: Indices) -> Indices:
    """Returns 0 followed by the running sum of ``sizes``."""
    indptr = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=indptr[1:])
    return indptr


def _sampled_rows(last_rows: Indices, drafts: Indices) -> Indices:
    """Returns ``ModelInput.sampled_rows``: of each chunk that draws the last row, and before it one for each of its
    ``drafts``.
    """
    bounds = _indptr(drafts + 1)
    return np.arange(bounds[-1]) + np.repeat(last_rows - drafts - bounds[:-1], drafts + 1)


def _prompt_logprob_rows(targets: Sequence[PromptTargets], query_indptr: Indices) -> torch.Tensor:
    """Returns ``ModelInput.prompt_logprob_rows``: for each chunk with targets, one token per target from the chunk's
    first.
    """
    counts = np.array([len(each.token_ids) for each in targets], np.int64)
    firsts, bounds = query_indptr[[each.number for each in targets]], _indptr(counts)
    return torch.from_numpy(np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], counts))


def pad_decode(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Pads a batch of one-token chunks to ``size`` chunks. Each pad is the first token of a sequence whose only page is
    the null page. What pads store there is never read.
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
    """Returns a batch of ``size`` pads, for one KV cache group."""
    start, nothing = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    return pad_decode(AttentionBatch(start, start, nothing, nothing, nothing, nothing), size)


def scatter_pending(token_ids: torch.Tensor, rows: torch.Tensor, pending: torch.Tensor) -> None:
    """Writes ``pending`` [P] into ``token_ids`` [T] at the ascending ``rows`` [P]. Both are int64 on the device."""
    if len(rows) == len(token_ids):
        token_ids.copy_(pending)
    else:
        token_ids.index_copy_(0, upload(rows, token_ids.device), pending)
