"""Log-probabilities of prompt tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from quire_proto.sampling import TokenLogprobs

from quire_engine.core.step import ModelOutput
from quire_engine.sampling.sample_ops import finite_rows, max_rows_at_once, token_logprobs
from quire_engine.sampling.sampler import non_finite_error


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The log-probability targets of the step's chunk ``number``: ``token_ids[i]`` follows the chunk's token i, and no
    target follows the prompt. ``num_top`` most probable tokens are returned with each.
    """

    number: int
    token_ids: list[int]
    num_top: int


def compute_prompt_logprobs(
    chunks: Sequence[PromptTargets],
    rows: torch.Tensor,
    vocab_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    model_output: ModelOutput | None,
) -> Exception | None:
    """Writes ``model_output.prompt_logprobs`` of ``chunks``, all of which have targets.

    ``rows`` [N] int64 are the batch rows of the tokens before the targets, chunk after chunk. ``logits_of`` computes
    the logits [R, V] of some of them. A chunk whose logits are not all finite gets an error. Waits for the device after
    each span of rows, so that only one span's logits are in memory. Without a ``model_output`` it only computes the
    logits, for the rank that has one.

    Returns the error if log-probabilities failed. All logits are computed even then, because other ranks take part in
    each span. Raises what ``logits_of`` raises.
    """
    targets = [target for chunk in chunks for target in chunk.token_ids]
    num_top = [chunk.num_top for chunk in chunks for _ in chunk.token_ids]
    size, logprobs = max_rows_at_once(vocab_size), list[TokenLogprobs | None]()
    failure: Exception | None = None
    for start in range(0, len(targets), size):
        span = slice(start, start + size)
        logits = logits_of(rows[span])
        if model_output is not None and failure is None:
            try:
                logprobs += _logprobs_if_finite(logits, targets[span], num_top[span])
            except Exception as error:  # noqa: BLE001 - the caller raises it
                failure = error
    if model_output is None or failure is not None:
        return failure
    remaining = iter(logprobs)
    for chunk in chunks:
        found = list(islice(remaining, len(chunk.token_ids)))
        finite = [each for each in found if each is not None]
        if len(finite) == len(found):
            model_output.prompt_logprobs[chunk.number] = finite
        else:
            model_output.errors[chunk.number] = non_finite_error()
    return None


def _logprobs_if_finite(
    logits: torch.Tensor, targets: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Returns the log-probabilities of each row, or None for a row whose logits are not all finite."""
    finite = finite_rows(logits).tolist()
    logprobs = token_logprobs(logits, targets, num_top)
    return [each if is_finite else None for each, is_finite in zip(logprobs, finite, strict=True)]
