"""Log-probabilities of the tokens of prompts, computed for a bounded number of rows of logits at a time."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from quire_proto.logprobs import TokenLogprobs

from quire_engine.sampling.drawn import non_finite_error
from quire_engine.sampling.logprobs import max_rows_at_once, token_logprobs
from quire_engine.sampling.sampler import finite_rows
from quire_engine.scheduling.plan import ModelOutput, ScheduledChunk


def compute_prompt_logprobs(
    chunks: Sequence[ScheduledChunk],
    rows: torch.Tensor,
    vocab_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    result: ModelOutput,
) -> None:
    """Writes ``result.prompt_logprobs`` of ``chunks``, all of which have targets. ``rows`` [N] int64 are the batch rows
    of the tokens that the targets follow, chunk after chunk, and ``logits_of`` computes the logits [R, V] of some
    of them. If logits of a chunk are not finite, its sequence and those to be drawn from it get an error. Waits for
    the device after each part of the rows, so that only one part's logits are in memory.
    """
    targets = [target for chunk in chunks for target in chunk.prompt_logprob_targets]
    num_top = [chunk.num_prompt_logprobs for chunk in chunks for _ in chunk.prompt_logprob_targets]
    size, logprobs = max_rows_at_once(vocab_size), []
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        logprobs += _logprobs_if_finite(logits_of(rows[part]), targets[part], num_top[part])
    remaining = iter(logprobs)
    for chunk in chunks:
        _write_result(chunk, list(islice(remaining, len(chunk.prompt_logprob_targets))), result)


def _logprobs_if_finite(
    logits: torch.Tensor, targets: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs | None]:
    """The log-probabilities of each row; None where its logits are not finite."""
    finite = finite_rows(logits).tolist()
    made = token_logprobs(logits, targets, num_top)
    return [one if good else None for one, good in zip(made, finite, strict=True)]


def _write_result(chunk: ScheduledChunk, made: Sequence[TokenLogprobs | None], result: ModelOutput) -> None:
    logprobs = [one for one in made if one is not None]
    if len(logprobs) == len(made):
        result.prompt_logprobs[chunk.sequence_id] = logprobs
        return
    ids = (chunk.sequence_id, *(draw.sequence_id for draw in chunk.draws))
    result.errors.update((sequence_id, non_finite_error()) for sequence_id in ids)
