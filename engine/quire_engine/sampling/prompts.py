"""Log-probabilities of the tokens of prompts, with as many rows of logits in memory as fit one piece."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from quire_proto.logprobs import TokenLogprobs

from quire_engine.sampling.drawn import not_finite
from quire_engine.sampling.logprobs import rows_at_once, token_logprobs
from quire_engine.sampling.sampler import finite_rows
from quire_engine.scheduling.plan import ModelOutput, ScheduledChunk


def score_prompts(
    chunks: Sequence[ScheduledChunk],
    rows: torch.Tensor,
    vocab_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    result: ModelOutput,
) -> None:
    """Writes ``result.prompt_logprobs`` of ``chunks``, all of which have targets. ``rows`` [N] int64 are the places in
    the batch of the tokens that the targets follow, chunk after chunk, and ``logits_of`` makes logits [R, V] of some of
    them. A chunk with logits that are not finite ends its sequence, and those that would be drawn from it. Waits for
    the device after each piece, so that no more than one is in memory.
    """
    targets = [target for chunk in chunks for target in chunk.targets]
    num_top = [chunk.num_top for chunk in chunks for _ in chunk.targets]
    size, made = rows_at_once(vocab_size), []
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        made += _piece(logits_of(rows[part]), targets[part], num_top[part])
    remaining = iter(made)
    for chunk in chunks:
        _report(chunk, list(islice(remaining, len(chunk.targets))), result)


def _piece(logits: torch.Tensor, targets: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs | None]:
    """None where a row is not finite."""
    finite = finite_rows(logits).tolist()
    made = token_logprobs(logits, targets, num_top)
    return [one if good else None for one, good in zip(made, finite, strict=True)]


def _report(chunk: ScheduledChunk, made: Sequence[TokenLogprobs | None], result: ModelOutput) -> None:
    logprobs = [one for one in made if one is not None]
    if len(logprobs) == len(made):
        result.prompt_logprobs[chunk.sequence_id] = logprobs
        return
    ids = (chunk.sequence_id, *(draw.sequence_id for draw in chunk.draws))
    result.errors.update((sequence_id, not_finite()) for sequence_id in ids)
