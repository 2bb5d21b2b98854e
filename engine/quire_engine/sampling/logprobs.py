"""Log-probabilities of tokens under the model's own distribution: a float32 log-softmax of its logits.

Computed for a bounded number of rows at a time, so that long prompts and wide vocabularies cost time but no memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from quire_proto.logprobs import TokenLogprobs

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.ranking import stable_topk

MAX_ROWS, MAX_VALUES = 256, 1 << 24


def max_rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are normalised at a time."""
    return max(1, min(MAX_ROWS, MAX_VALUES // vocab_size))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row i of ``logits`` [R, V], any float dtype and finite: the log-probability of ``token_ids[i]``, and the
    ``num_prompt_logprobs[i]`` most probable tokens, best first, equal ones by rising id. Waits for the device.
    """
    (ids,) = upload_arrays((np.array(token_ids, dtype=np.int64),), logits.device)
    return to_token_logprobs(compute_logprobs(logits, ids, max(num_top, default=0)), num_top)


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, *, allow_sync: bool = True
) -> list[torch.Tensor]:
    """The log-probability of the token of each row [R] float32, and with ``num_prompt_logprobs`` above 0 those of the
    most probable tokens and their ids, both [R, min(num_top, V)].
    """
    size, chunks = max_rows_at_once(logits.shape[1]), []
    for start in range(0, len(token_ids), size):
        part = slice(start, start + size)
        logprobs = logits[part].float().log_softmax(-1)
        own = logprobs.gather(1, token_ids[part][:, None]).squeeze(1)
        chunks.append((own, *stable_topk(logprobs, num_top, allow_sync=allow_sync)) if num_top else (own,))
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def to_token_logprobs(measured: Sequence[torch.Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The tensors of ``compute_logprobs`` as one object a row, row i with ``num_prompt_logprobs[i]`` most probable
    tokens. Waits for the device.
    """
    if not num_top:
        return []
    own = measured[0].tolist()
    if len(measured) == 1:
        return [TokenLogprobs(logprob) for logprob in own]
    values, ids = measured[1:]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True))
    return [TokenLogprobs(logprob, top[:count]) for logprob, top, count in zip(own, tops, num_top, strict=True)]
