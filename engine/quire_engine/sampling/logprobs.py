"""Log-probabilities of tokens under the model's own distribution: a float32 log-softmax of its logits.

Worked out for a bounded piece of rows at a time, so that long prompts and wide vocabularies cost time but no memory.
"""

from collections.abc import Sequence

import torch
from quire_proto.logprobs import TokenLogprobs

from quire_engine.sampling.ranking import best

MAX_ROWS, MAX_VALUES = 256, 1 << 24


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits make one piece."""
    return max(1, min(MAX_ROWS, MAX_VALUES // vocab_size))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row of ``logits`` [R, V], any float dtype and finite: the log-probability of that row's token, and of its
    so many most probable tokens, best first, equal ones in the order of their ids.
    """
    size, made = rows_at_once(logits.shape[1]), []
    for start in range(0, len(token_ids), size):
        part = slice(start, start + size)
        made += _piece(logits[part].float().log_softmax(-1), token_ids[part], num_top[part])
    return made


def _piece(logprobs: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    places = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device)
    own = logprobs.gather(1, places[:, None]).squeeze(1).tolist()
    if not any(num_top):
        return [TokenLogprobs(logprob) for logprob in own]
    values, ids = best(logprobs, max(num_top))
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True))
    return [TokenLogprobs(logprob, top[:count]) for logprob, top, count in zip(own, tops, num_top, strict=True)]
