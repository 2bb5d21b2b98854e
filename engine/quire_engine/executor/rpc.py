"""Messages between the processes of ranks: arrays of numbers, framed on a stream socket. Rank 0 sends ``RpcMethod``
messages, with batches and block copies as arrays, and the others answer with ``RpcReply``.

Nothing is pickled, and sizes are checked against bounds before memory is allocated for a message.
"""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.attention.kv_cache_spec import MAX_GROUPS
from quire_engine.core.block_pool import BlockCopies, BlockCopy, DiskTransfer
from quire_engine.core.kv_disk import DiskContents, TransferOutcome, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.worker.input_batch import ModelInput

RpcArray = npt.NDArray[Any]
_BATCH_FIELDS = [field.name for field in fields(ModelInput) if field.name != "attention"]
_ATTENTION_FIELDS = [field.name for field in fields(AttentionBatch)]
MAX_ARRAYS = len(_BATCH_FIELDS) + MAX_GROUPS * len(_ATTENTION_FIELDS)
"""Of a batch with as many groups of layers as a model may have: other messages have few."""

MAX_BYTES = 1 << 28
_DTYPES = tuple(map(np.dtype, ("uint8", "int32", "int64")))
# A message's code, number of arrays and call number; each array's index in ``_DTYPES`` and its length.
_MESSAGE_HEADER, _ARRAY_HEADER = struct.Struct("<IIQ"), struct.Struct("<IQ")
_HASH = struct.Struct("<qq")


class RpcMethod(IntEnum):
    """The calls that rank 0 sends. Those up to ``MAKE_RUNNER`` are answered; of the others only a failure is."""

    LOAD = 1
    CONNECT = 2
    PROFILE_MEMORY = 3
    MAKE_RUNNER = 4
    END_PROFILE = 5
    CLOSE_RUNNER = 6
    COPY_BLOCKS = 7
    FORWARD = 8
    LOGITS = 9
    ADD_LORA = 10
    REMOVE_LORA = 11
    STORE = 12
    OPEN_DISK = 13
    EXECUTE_DUMMY_BATCH = 14
    SLEEP = 15
    WAKE_UP = 16

    @property
    def has_reply(self) -> bool:
        """Whether success is answered too: rank 0 waits for it."""
        return self <= RpcMethod.MAKE_RUNNER or self in _ANSWERED


_ANSWERED = frozenset((RpcMethod.ADD_LORA, RpcMethod.OPEN_DISK, RpcMethod.SLEEP, RpcMethod.WAKE_UP))


class RpcReply(IntEnum):
    """The messages of the other ranks; their call numbers are those of the calls that they answer, and 0 where a value
    is stored for all ranks or a transfer to or from the disk has ended.
    """

    DONE = 1
    FAILED = 2
    STORED = 3
    TRANSFERRED = 4


class MessageError(Exception):
    """The bytes that came in are not a valid message."""


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """``code`` is an ``RpcMethod`` or ``RpcReply``, ``call_number`` counts rank 0's calls. ``arrays`` have one
    dimension, and are uint8, int32 or int64.
    """

    code: int
    call_number: int
    arrays: Sequence[RpcArray] = ()


def send(link: socket.socket, message: RpcMessage) -> None:
    """Writes all of ``message``. Raises ``OSError`` when the other side has closed the link."""
    assert len(message.arrays) <= MAX_ARRAYS, "no rank would take it"
    heads = [_MESSAGE_HEADER.pack(message.code, len(message.arrays), message.call_number)]
    heads += [_ARRAY_HEADER.pack(_DTYPES.index(array.dtype), len(array)) for array in message.arrays]
    link.sendall(b"".join((*heads, *(array.tobytes() for array in message.arrays))))


def receive(link: socket.socket) -> RpcMessage | None:
    """The next message; None when the other side has closed the link. Raises ``MessageError``."""
    head = _read_up_to(link, _MESSAGE_HEADER.size)
    if not head:
        return None
    code, count, number = _MESSAGE_HEADER.unpack(head)
    if count > MAX_ARRAYS:
        raise MessageError(f"A message of {count} arrays has more than {MAX_ARRAYS}.")
    table = _read_exactly(link, count * _ARRAY_HEADER.size)
    forms = [_array_form(*_ARRAY_HEADER.unpack_from(table, index * _ARRAY_HEADER.size)) for index in range(count)]
    sizes = [dtype.itemsize * length for dtype, length in forms]
    if sum(sizes) > MAX_BYTES:
        raise MessageError(f"A message of {sum(sizes)} bytes has more than {MAX_BYTES}.")
    return RpcMessage(
        code,
        number,
        [np.frombuffer(_read_exactly(link, size), form[0]) for form, size in zip(forms, sizes, strict=True)],
    )


def _array_form(dtype: int, length: int) -> tuple[np.dtype[Any], int]:
    if dtype >= len(_DTYPES):
        raise MessageError(f"Unknown element type {dtype}.")
    return _DTYPES[dtype], length


def _read_exactly(link: socket.socket, size: int) -> bytearray:
    data = _read_up_to(link, size)
    if len(data) < size:
        raise MessageError("A message ends in the middle.")
    return data


def _read_up_to(link: socket.socket, size: int) -> bytearray:
    """``size`` bytes, or none when the stream ends before the first one. Raises ``MessageError`` when it ends between
    two.
    """
    data, read = bytearray(size), 0
    while read < size:
        count = link.recv_into(memoryview(data)[read:])
        if count == 0 and read == 0:
            return bytearray()
        if count == 0:
            raise MessageError("A message ends in the middle.")
        read += count
    return data


def json_to_array(value: object) -> RpcArray:
    """``value`` as JSON, in an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def json_from_array(array: RpcArray) -> Any:
    """The value of ``json_to_array``. Raises ``MessageError``."""
    try:
        return json.loads(array.tobytes())
    except ValueError:
        raise MessageError("The text of a message is not JSON.") from None


def stored_to_arrays(key: str, value: bytes) -> list[RpcArray]:
    """A value of a ``RankStore``."""
    return [json_to_array(key), np.frombuffer(value, np.uint8)]


def stored_from_arrays(arrays: Sequence[RpcArray]) -> tuple[str, bytes]:
    """The inverse of ``stored_to_arrays``. Raises ``MessageError``."""
    if len(arrays) != 2 or not isinstance(key := json_from_array(arrays[0]), str):
        raise MessageError("A stored value is not a key and its bytes.")
    return key, arrays[1].tobytes()


_BATCH_DTYPES = [np.int32 if name == "positions" else np.int64 for name in _BATCH_FIELDS]


def batch_to_arrays(batch: ModelInput) -> list[RpcArray]:
    """All tensors of ``batch``, which are on the host."""
    tensors = [getattr(batch, name) for name in _BATCH_FIELDS]
    tensors += [getattr(group, name) for group in batch.attention for name in _ATTENTION_FIELDS]
    return [tensor.numpy() for tensor in tensors]


def batch_from_arrays(arrays: Sequence[RpcArray]) -> ModelInput:
    """The inverse of ``batch_to_arrays``. Raises ``MessageError`` when the arrays do not make a batch."""
    outer, width = len(_BATCH_FIELDS), len(_ATTENTION_FIELDS)
    num_groups = max(1, (len(arrays) - outer) // width)
    if [array.dtype for array in arrays] != _BATCH_DTYPES + [np.int32] * width * num_groups:
        raise MessageError("A batch has other tensors.")
    tensors = [torch.from_numpy(array) for array in arrays]
    parts = [tensors[first : first + width] for first in range(outer, len(tensors), width)]
    attention = tuple(AttentionBatch(**dict(zip(_ATTENTION_FIELDS, part, strict=True))) for part in parts)
    batch = ModelInput(attention=attention, **dict(zip(_BATCH_FIELDS, tensors, strict=False)))
    _check_batch(batch)
    return batch


def _check_batch(batch: ModelInput) -> None:
    tokens, chunks = len(batch.token_ids), len(batch.attention[0].context_lens)
    bounds = [len(bound) for each in batch.attention for bound in (each.query_indptr, each.page_indptr)]
    bounds += [1 + len(count) for each in batch.attention for count in (each.last_page_len, each.context_lens)]
    rows = (batch.sampled_rows, batch.prompt_logprob_rows, batch.pending_rows)
    if (
        any(len(each) != tokens for each in (batch.positions, *(each.positions for each in batch.attention)))
        or len(batch.lora_ids) not in (0, tokens)
        or any(bound != chunks + 1 for bound in bounds)
        or any(len(each) and not 0 <= int(each.min()) <= int(each.max()) < tokens for each in rows)
    ):
        raise MessageError("The tensors of a batch do not fit each other.")


def rows_to_arrays(rows: torch.Tensor, age: int) -> list[RpcArray]:
    """The rows [R] int64 of a LOGITS call, and how many FORWARD calls came after the one that they are of."""
    return [rows.numpy(), np.array([age], np.int64)]


def rows_from_arrays(arrays: Sequence[RpcArray]) -> tuple[torch.Tensor, int]:
    """The inverse of ``rows_to_arrays``. Raises ``MessageError``."""
    if [array.dtype for array in arrays] != [np.int64] * 2 or len(arrays[1]) != 1:
        raise MessageError("Rows are not a list of numbers and one more.")
    return torch.from_numpy(arrays[0]), int(arrays[1][0])


_COPIES_FIELDS = ("blocks_to_swap_out", "blocks_to_copy", "blocks_to_swap_in", "blocks_to_swap_ahead")
_TRANSFER_FIELDS = ("blocks_to_store", "blocks_to_load")
_PAIR, _TRANSFER = 2, 5  # numbers of a copy, and of a transfer, of which two are its hash of 16 bytes


def copies_to_arrays(copies: BlockCopies) -> list[RpcArray]:
    """Each list of ``copies`` as numbers: a source and a target, or the fields of a transfer."""
    lists: list[list[BlockCopy]] = [getattr(copies, name) for name in _COPIES_FIELDS]
    pairs = [[(copy.source, copy.target) for copy in each] for each in lists]
    transfers: list[list[DiskTransfer]] = [getattr(copies, name) for name in _TRANSFER_FIELDS]
    fields = [[_transfer_to_numbers(transfer) for transfer in each] for each in transfers]
    return [np.array(rows, np.int64).reshape(-1) for rows in (*pairs, *fields)]


def copies_from_arrays(arrays: Sequence[RpcArray]) -> BlockCopies:
    """The inverse of ``copies_to_arrays``. Raises ``MessageError``."""
    widths = [_PAIR] * len(_COPIES_FIELDS) + [_TRANSFER] * len(_TRANSFER_FIELDS)
    if len(arrays) != len(widths) or any(
        array.dtype != np.int64 or len(array) % width for array, width in zip(arrays, widths, strict=True)
    ):
        raise MessageError(f"Copies are not {len(_COPIES_FIELDS)} lists of pairs and {len(_TRANSFER_FIELDS)} of fives.")
    rows = [array.reshape(-1, width).tolist() for array, width in zip(arrays, widths, strict=True)]
    out, within, into, ahead = ([BlockCopy(*pair) for pair in each] for each in rows[: len(_COPIES_FIELDS)])
    store, load = ([_transfer_from_numbers(*each) for each in part] for part in rows[len(_COPIES_FIELDS) :])
    return BlockCopies(out, within, into, ahead, store, load)


def _transfer_to_numbers(transfer: DiskTransfer) -> tuple[int, ...]:
    return transfer.transfer_id, transfer.host_block, transfer.disk_block, *_HASH.unpack(transfer.block_hash)


def _transfer_from_numbers(transfer_id: int, host_block: int, disk_block: int, *halves: int) -> DiskTransfer:
    return DiskTransfer(transfer_id, host_block, disk_block, _HASH.pack(*halves))


def result_to_array(result: TransferResult) -> RpcArray:
    """What came of a rank's part of a transfer."""
    return json_to_array(asdict(result))


def result_from_array(array: RpcArray) -> TransferResult:
    """The inverse of ``result_to_array``. Raises ``MessageError``."""
    plain = json_from_array(array)
    try:
        return TransferResult(**{**plain, "outcome": TransferOutcome(plain["outcome"])})
    except (KeyError, TypeError, ValueError):
        raise MessageError("This is not the result of a transfer.") from None


def disk_to_plain(contents: DiskContents) -> dict[str, Any]:
    """What a rank's disk has, as values that JSON has."""
    stored = [(disk_block, block_hash.hex()) for disk_block, block_hash in contents.stored]
    return {**asdict(contents), "stored": stored}


def disk_from_plain(plain: dict[str, Any]) -> DiskContents:
    """The inverse of ``disk_to_plain``."""
    stored = [(disk_block, bytes.fromhex(block_hash)) for disk_block, block_hash in plain["stored"]]
    return DiskContents(**{**plain, "stored": stored})


def lora_to_arrays(lora: LoRARequest) -> list[RpcArray]:
    """An adapter, whose folder all ranks can read."""
    plain = {**asdict(lora), "lora_path": str(lora.lora_path), "digest": lora.digest.hex()}
    return [json_to_array(plain)]


def lora_from_arrays(arrays: Sequence[RpcArray]) -> LoRARequest:
    """The inverse of ``lora_to_arrays``."""
    plain = json_from_array(arrays[0])
    return LoRARequest(**{**plain, "digest": bytes.fromhex(plain["digest"])})
