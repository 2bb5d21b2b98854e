"""What rank 0 tells the others to do, as messages. Knows batches and copies, not how they are computed."""

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum

import numpy as np
import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.executor.torch.batch import ModelInput
from quire_engine.executor.torch.ranks.wire import MessageError, RpcArray
from quire_engine.kv.copy import BlockCopy

Copies = tuple[Sequence[BlockCopy], Sequence[BlockCopy], Sequence[BlockCopy]]


class RpcMethod(IntEnum):
    """The messages of rank 0. Those up to ``MAKE_RUNNER`` are answered; of the others only a failure is reported."""

    LOAD = 1
    CONNECT = 2
    PROFILE_MEMORY = 3
    MAKE_RUNNER = 4
    END_PROFILE = 5
    CLOSE_RUNNER = 6
    COPY_BLOCKS = 7
    FORWARD = 8
    LOGITS = 9

    @property
    def has_reply(self) -> bool:
        """Whether rank 0 waits until it is done."""
        return self <= RpcMethod.MAKE_RUNNER


class RpcReply(IntEnum):
    """The messages of the other ranks, whose numbers are those of the calls that they answer."""

    DONE = 1
    FAILED = 2


_BATCH_FIELDS = [field.name for field in fields(ModelInput) if field.name != "attention"]
_ATTENTION_FIELDS = [field.name for field in fields(AttentionBatch)]


def copies_to_arrays(copies: Copies) -> list[RpcArray]:
    """Three lists of copies, as pairs of a source and a target."""
    return [np.array([(copy.source, copy.target) for copy in each], np.int64).reshape(-1) for each in copies]


def copies_from_arrays(arrays: Sequence[RpcArray]) -> Copies:
    """The inverse of ``copies_to_arrays``. Raises ``MessageError``."""
    if len(arrays) != 3 or any(array.dtype != np.int64 or len(array) % 2 for array in arrays):
        raise MessageError("Copies are not three lists of pairs.")
    out, within, into = ([BlockCopy(*pair) for pair in array.reshape(-1, 2).tolist()] for array in arrays)
    return out, within, into


def batch_to_arrays(batch: ModelInput) -> list[RpcArray]:
    """All tensors of the batch, which are on the host."""
    outer = [getattr(batch, name) for name in _BATCH_FIELDS]
    return [tensor.numpy() for tensor in (*outer, *(getattr(batch.attention, name) for name in _ATTENTION_FIELDS))]


def batch_from_arrays(arrays: Sequence[RpcArray]) -> ModelInput:
    """The inverse of ``batch_to_arrays``. Raises ``MessageError`` for what is no batch."""
    if [array.dtype for array in arrays] != [np.int64] * len(_BATCH_FIELDS) + [np.int32] * len(_ATTENTION_FIELDS):
        raise MessageError("A batch has other tensors.")
    tensors = [torch.from_numpy(array) for array in arrays]
    attention = AttentionBatch(**dict(zip(_ATTENTION_FIELDS, tensors[len(_BATCH_FIELDS) :], strict=True)))
    batch = ModelInput(attention=attention, **dict(zip(_BATCH_FIELDS, tensors, strict=False)))
    _check_batch(batch)
    return batch


def rows_from_arrays(arrays: Sequence[RpcArray]) -> torch.Tensor:
    """The rows whose logits are asked for. Raises ``MessageError``."""
    if [array.dtype for array in arrays] != [np.int64]:
        raise MessageError("Rows are not one list of numbers.")
    return torch.from_numpy(arrays[0])


def _check_batch(batch: ModelInput) -> None:
    tokens, attention = len(batch.token_ids), batch.attention
    chunks = len(attention.context_lens)
    bounds = (len(attention.query_indptr), len(attention.page_indptr), len(attention.last_page_len) + 1)
    rows = (batch.sampled_rows, batch.prompt_logprob_rows, batch.pending_rows)
    if (
        len(attention.positions) != tokens
        or any(bound != chunks + 1 for bound in bounds)
        or any(len(each) and not 0 <= int(each.min()) <= int(each.max()) < tokens for each in rows)
    ):
        raise MessageError("The tensors of a batch do not fit each other.")
