"""Messages between rank processes: JSON and number arrays, framed on a stream socket. Rank 0 sends ``RpcMethod``
messages, one per step, and the other ranks answer with ``RpcReply``.

Nothing is pickled. Sizes are checked against bounds before memory is allocated for a message.
"""

import json
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from quire_proto.errors import QuireError

from quire_engine.core.block_pool import Transfer
from quire_engine.core.kv_transfer.transfer import TransferOutcome, TransferResult
from quire_engine.core.step import GrammarMatcher, ModelOutput, SchedulerOutput
from quire_engine.core.step_plain import (
    error_from_plain,
    error_to_plain,
    output_from_plain,
    output_to_plain,
    step_from_plain,
    step_to_plain,
)
from quire_engine.sampling.grammar_bitmask import GrammarBitmask

RpcArray = npt.NDArray[Any]
MAX_ARRAYS = 1 << 16
"""A step has an array per column and a few per new sequence."""

MAX_BYTES = 1 << 28
_DTYPES = tuple(map(np.dtype, ("uint8", "int32", "int64")))
# A message's code, number of arrays and call number; each array's index in ``_DTYPES`` and its length.
_MESSAGE_HEADER, _ARRAY_HEADER = struct.Struct("<IIQ"), struct.Struct("<IQ")
_ARRAY = "$array"  # key of the JSON object that stands for an array


class RpcMethod(IntEnum):
    """The calls that rank 0 sends. Methods up to ``CALL`` are always answered, the others only if they fail."""

    LOAD = 1
    CONNECT = 2
    PROFILE_MEMORY = 3
    MAKE_RUNNER = 4
    CALL = 5
    END_PROFILE = 6
    CLOSE_RUNNER = 7
    EXECUTE = 8
    BITMASK = 9
    EXECUTE_DUMMY_BATCH = 10
    STORE = 11

    @property
    def has_reply(self) -> bool:
        """Whether success is answered too, because rank 0 waits for it."""
        return self <= RpcMethod.CALL


class RpcReply(IntEnum):
    """The messages of the other ranks. ``DONE``, ``FAILED`` and ``NO_LOGITS`` have the number of the call that they
    answer. All others have number 0:

    * ``STORED``: the rank stored a value for all ranks.
    * ``TRANSFERRED``: a disk transfer ended.
    * ``OUTPUT``: the output of the oldest step without one, from the rank that samples.
    * ``NO_OUTPUT``: why that step has no output.
    * ``NO_LOGITS``: why the logits of a pipeline's step failed on a rank of the last stage. From the rank that samples
      it is the answer in place of ``OUTPUT`` too.
    """

    DONE = 1
    FAILED = 2
    STORED = 3
    TRANSFERRED = 4
    OUTPUT = 5
    NO_OUTPUT = 6
    NO_LOGITS = 7


class MessageError(Exception):
    """The received bytes are not a valid message."""


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """``code`` is an ``RpcMethod`` or ``RpcReply``, and ``call_number`` counts rank 0's calls. ``arrays`` have one
    dimension and dtype uint8, int32 or int64.
    """

    code: int
    call_number: int
    arrays: Sequence[RpcArray] = ()


def send(link: socket.socket, message: RpcMessage) -> None:
    """Writes all of ``message``. Raises ``OSError`` if the other side has closed the link."""
    assert len(message.arrays) <= MAX_ARRAYS, "no rank would take it"
    heads = [_MESSAGE_HEADER.pack(message.code, len(message.arrays), message.call_number)]
    heads += [_ARRAY_HEADER.pack(_DTYPES.index(array.dtype), len(array)) for array in message.arrays]
    link.sendall(b"".join((*heads, *(array.tobytes() for array in message.arrays))))


def receive(link: socket.socket) -> RpcMessage | None:
    """Reads the next message. Returns None if the other side has closed the link. Raises ``MessageError``."""
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
    """Reads ``size`` bytes. Returns no bytes if the stream ends before the first one. Raises ``MessageError`` if it
    ends later.
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
    """Returns ``value`` as JSON text in a uint8 array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def json_from_array(text: RpcArray) -> Any:
    """The inverse of ``json_to_array``. Raises ``MessageError``."""
    try:
        return json.loads(text.tobytes())
    except ValueError:
        raise MessageError("The text of a message is not JSON.") from None


def stored_to_arrays(key: str, value: bytes) -> list[RpcArray]:
    """Encodes a value of a ``RankStore``."""
    return [json_to_array(key), np.frombuffer(value, np.uint8)]


def stored_from_arrays(arrays: Sequence[RpcArray]) -> tuple[str, bytes]:
    """The inverse of ``stored_to_arrays``. Raises ``MessageError``."""
    if len(arrays) != 2 or not isinstance(key := json_from_array(arrays[0]), str):
        raise MessageError("A stored value is not a key and its bytes.")
    return key, arrays[1].tobytes()


def plain_to_arrays(value: object) -> list[RpcArray]:
    """Returns ``value`` as JSON in a uint8 array, followed by one array for each bytes object or array in it."""
    arrays: list[RpcArray] = []

    def take_array(part: Any) -> dict[str, int]:
        arrays.append(np.frombuffer(part, np.uint8 if isinstance(part, bytes) else part.typecode))
        return {_ARRAY: len(arrays) - 1}

    text = json.dumps(value, separators=(",", ":"), default=take_array).encode()
    return [np.frombuffer(text, np.uint8), *arrays]


def plain_from_arrays(message: Sequence[RpcArray]) -> Any:
    """The inverse of ``plain_to_arrays``. Raises ``ValueError`` or ``LookupError``."""
    text, *arrays = message

    def put_array(value: dict[str, Any]) -> Any:
        if _ARRAY not in value:
            return value
        taken = arrays[value[_ARRAY]]
        return taken.tobytes() if taken.itemsize == 1 else array("q" if taken.itemsize == 8 else "i", taken.tobytes())

    return json.loads(text.tobytes(), object_hook=put_array)


class _UnknownGrammar:
    """Stands for a grammar that only rank 0 knows. Rank 0 sends its bitmasks."""

    def new_matcher(self) -> GrammarMatcher:
        """See ``Grammar``."""
        raise AssertionError("rank 0 fills the bitmasks")


UNKNOWN_GRAMMAR = _UnknownGrammar()


def step_to_arrays(output: SchedulerOutput, sampled: "array[int]", without_loras: Sequence[int]) -> list[RpcArray]:
    """Encodes a step for the other ranks. ``sampled`` has the tokens sampled since the last step, as triples like those
    in ``output.new_tokens``. Rows whose adapter is in ``without_loras`` run without one.
    """
    transfers = list(map(_transfer_to_plain, output.copies.transfers))
    plain = {"sampled": sampled, "without_loras": without_loras, "transfers": transfers, **step_to_plain(output)}
    return plain_to_arrays(plain)


def step_from_arrays(message: Sequence[RpcArray]) -> "tuple[SchedulerOutput, array[int], list[int]]":
    """The inverse of ``step_to_arrays``, with ``UNKNOWN_GRAMMAR`` for each grammar. Raises ``MessageError``."""
    with _refusing("step"):
        plain = plain_from_arrays(message)
        output = step_from_plain(plain, UNKNOWN_GRAMMAR)
        output.copies.transfers.extend(map(_transfer_from_plain, plain["transfers"]))
        return output, plain["sampled"], plain["without_loras"]


def output_to_arrays(output: ModelOutput) -> list[RpcArray]:
    """Encodes the output of a step."""
    return plain_to_arrays(output_to_plain(output))


def output_from_arrays(message: Sequence[RpcArray]) -> ModelOutput:
    """The inverse of ``output_to_arrays``. Raises ``MessageError``."""
    with _refusing("output of a step"):
        return output_from_plain(plain_from_arrays(message))


def bitmask_to_arrays(bitmask: GrammarBitmask) -> list[RpcArray]:
    """Encodes the bitmask of a step."""
    errors = {number: error_to_plain(error) for number, error in bitmask.errors.items()}
    plain = {"rows": bitmask.rows, "errors": errors, "words": array("i", bitmask.words.tobytes())}
    return plain_to_arrays(plain)


def bitmask_from_arrays(message: Sequence[RpcArray]) -> GrammarBitmask:
    """The inverse of ``bitmask_to_arrays``. Raises ``MessageError``."""
    with _refusing("bitmask"):
        plain = plain_from_arrays(message)
        rows = {int(number): row for number, row in plain["rows"].items()}
        errors = {int(number): error_from_plain(fields) for number, fields in plain["errors"].items()}
        return GrammarBitmask(np.frombuffer(plain["words"], np.int32).reshape(len(rows), -1), rows, errors)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, QuireError) as error:
        raise MessageError(f"This is not a {name}: {error!r}.") from None


def _transfer_to_plain(transfer: Transfer) -> list[Any]:
    return [*astuple(transfer)[:-1], transfer.block_hash.hex()]


def _transfer_from_plain(fields: Sequence[Any]) -> Transfer:
    transfer_id, tier, is_load, host_block, tier_block, block_hash = fields
    return Transfer(transfer_id, tier, is_load, host_block, tier_block, bytes.fromhex(block_hash))


def result_to_array(result: TransferResult) -> RpcArray:
    """Encodes the result of a rank's part of a transfer."""
    return json_to_array(asdict(result))


def result_from_array(text: RpcArray) -> TransferResult:
    """The inverse of ``result_to_array``. Raises ``MessageError``."""
    plain = json_from_array(text)
    try:
        return TransferResult(**{**plain, "outcome": TransferOutcome(plain["outcome"])})
    except (KeyError, TypeError, ValueError):
        raise MessageError("This is not the result of a transfer.") from None
