"""Checks, when a model is loaded, that it computes the same in paged memory as in transformers alone.

Two short sequences are run in chunks, in one batch and in blocks out of order. This shows failures that would otherwise
be silent as different logits: a state in addition to keys and values, positions counted by the model itself, a bias
that only its own attention adds.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.attention.mixed import attention_of
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.attention.state_cache import RecurrentRunner, StateCache, StateChunks
from quire_engine.errors import ModelError
from quire_engine.models.base import Model

BLOCK_SIZE, NUM_BLOCKS = 4, 12
SAMPLE_LENGTHS = (21, 10)
BLOCK_TABLES = ((3, 8, 1, 6, 10, 4), (7, 2, 9))
STATE_BLOCK_SIZE, NUM_STATES = 8, 7
STATE_TABLES = ((4, 1, 6), (5, 2))
# The allowed relative error of a row of logits. Measured with small random models of fifty architectures: 1e-6 in
# float32, 0.03 in bfloat16.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


class TokenRange(NamedTuple):
    """Tokens ``[start, end)`` of a sequence."""

    sequence: int
    start: int
    end: int


def sample_sequences(vocab_size: int, max_length: int) -> list[torch.Tensor]:
    """Returns two sequences of tokens from the whole vocabulary."""
    lengths = [min(length, max_length) for length in SAMPLE_LENGTHS]
    return [(torch.arange(length) * 7919 + 11 * length) % vocab_size for length in lengths]


def reference_logits(causal: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits [T, vocabulary] of a sequence in float32, computed by transformers' own attention."""
    causal.set_attn_implementation("eager")
    logits: torch.Tensor = causal(input_ids=tokens[None].to(causal.device), use_cache=False).logits[0]
    return logits.float()


def check_paged_logits(model: Model, sequences: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises ``ModelError`` if the logits of ``model`` differ from the ``expected`` ones.

    With few bits, two implementations of attention round differently, and a router of experts may then choose
    differently for some tokens. Whole sequences are therefore judged by the median over their tokens. Chunks of a
    sequence round like the whole sequence, and are judged by every token.
    """
    reference = torch.cat(list(expected))
    whole, chunked = (
        _paged_logits(model, sequences, steps, reference.device) for steps in _step_plans(*map(len, sequences))
    )
    if whole.shape != reference.shape:
        raise ModelError(f"It makes {whole.shape[-1]} logits for a vocabulary of {reference.shape[-1]}.")
    tolerance = TOLERANCE[model.dtype]
    if not (
        _relative_errors(whole, reference).median() < tolerance and _relative_errors(chunked, whole).max() < tolerance
    ):
        raise ModelError("In paged memory it makes other logits than by itself.")


def _relative_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Returns the relative error of each row."""
    return (logits - reference).norm(dim=-1) / reference.norm(dim=-1)


def _step_plans(first: int, second: int) -> tuple[list[list[TokenRange]], list[list[TokenRange]]]:
    """Returns two ways to run two sequences of ``first`` and ``second`` tokens: one after the other, and in chunks. The
    first sequence has three chunks, the last of one token. The whole second sequence is in a batch with the first
    chunk.
    """
    bounds = [0, first // 2, first - 1, first]
    chunked = [[TokenRange(0, start, end)] for start, end in pairwise(bounds) if start < end]
    chunked[0].append(TokenRange(1, 0, second))
    return [[TokenRange(0, 0, first)], [TokenRange(1, 0, second)]], chunked


def _paged_logits(
    model: Model, sequences: Sequence[torch.Tensor], steps: Sequence[Sequence[TokenRange]], device: torch.device
) -> torch.Tensor:
    """Returns the float32 logits of all tokens of the first sequence, then of the second."""
    layers = model.attention_layers
    layout = BlockLayout.of(layers, BLOCK_SIZE, model.dtype)
    kv = layout.views(torch.zeros(NUM_BLOCKS, layout.elements, dtype=model.dtype, device=device))
    recurrent = _recurrent_runner(model, device)
    attention = attention_of(layers, BLOCK_SIZE, ReferenceAttention)
    by_sequence: list[list[torch.Tensor]] = [[], []]
    for spans in steps:
        batch = _attention_batch(spans)
        attention.prepare(batch)
        tokens = torch.cat([sequences[one.sequence][one.start : one.end] for one in spans])
        with nullcontext() if recurrent is None else recurrent.step(_state_chunks(spans)):
            hidden = model.forward(tokens.to(device), batch.positions.to(device), kv, attention)
        logits = model.logits(hidden).float().split([one.end - one.start for one in spans])
        for span, part in zip(spans, logits, strict=True):
            by_sequence[span.sequence].append(part)
    return torch.cat([part for parts in by_sequence for part in parts])


def _attention_batch(spans: Sequence[TokenRange]) -> AttentionBatch:
    pages = [BLOCK_TABLES[one.sequence][: -(-one.end // BLOCK_SIZE)] for one in spans]
    return AttentionBatch(
        query_indptr=_int32([0, *accumulate(one.end - one.start for one in spans)]),
        page_indptr=_int32([0, *accumulate(map(len, pages))]),
        page_ids=_int32([page for table in pages for page in table]),
        last_page_len=_int32([(one.end - 1) % BLOCK_SIZE + 1 for one in spans]),
        context_lens=_int32([one.end for one in spans]),
        positions=_int32([position for one in spans for position in range(one.start, one.end)]),
    )


def _recurrent_runner(model: Model, device: torch.device) -> RecurrentRunner | None:
    layers = model.recurrent_layers
    if layers is None:
        return None
    rows = torch.zeros(NUM_STATES + len(SAMPLE_LENGTHS), layers.num_bytes, dtype=torch.uint8, device=device)
    return RecurrentRunner(layers, StateCache(rows, rows[:0], NUM_STATES, STATE_BLOCK_SIZE))


def _state_chunks(spans: Sequence[TokenRange]) -> StateChunks:
    size = STATE_BLOCK_SIZE
    tables = [STATE_TABLES[one.sequence][max(0, one.start - 1) // size : -(-one.end // size)] for one in spans]
    return StateChunks(
        starts=np.array([one.start for one in spans]),
        query_indptr=np.array([0, *accumulate(one.end - one.start for one in spans)]),
        blocks=np.array([block for table in tables for block in table]),
        indptr=np.array([0, *accumulate(map(len, tables))]),
    )


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
