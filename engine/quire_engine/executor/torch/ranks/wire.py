"""Messages between the ranks' processes: numbers in arrays, framed on a stream socket. Knows no meaning of them.

Nothing is pickled. What comes in is checked against bounds before memory is taken for it.
"""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RpcArray = npt.NDArray[Any]

MAX_ARRAYS = 32
MAX_BYTES = 1 << 28
_DTYPES = tuple(map(np.dtype, ("uint8", "int32", "int64")))
# What kind of message, how many arrays, which number; and of each array its dtype's place and its length.
_MESSAGE_HEADER, _ARRAY_HEADER = struct.Struct("<IIQ"), struct.Struct("<IQ")


class MessageError(Exception):
    """What came in is no message."""


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """``arrays`` are of one dimension, and of uint8, int32 or int64. What ``kind`` and ``number`` mean is agreed
    elsewhere.
    """

    code: int
    call_number: int
    arrays: Sequence[RpcArray] = ()


def json_to_array(value: object) -> RpcArray:
    """A plain value as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def json_from_array(array: RpcArray) -> Any:
    """The value of ``json_to_array``. Raises ``MessageError``."""
    try:
        return json.loads(array.tobytes())
    except ValueError:
        raise MessageError("The text of a message is not JSON.") from None


def send(link: socket.socket, message: RpcMessage) -> None:
    """Writes all of ``message``. Raises ``OSError`` where nobody reads any more."""
    heads = [_MESSAGE_HEADER.pack(message.code, len(message.arrays), message.call_number)]
    heads += [_ARRAY_HEADER.pack(_DTYPES.index(array.dtype), len(array)) for array in message.arrays]
    link.sendall(b"".join((*heads, *(array.tobytes() for array in message.arrays))))


def receive(link: socket.socket) -> RpcMessage | None:
    """The next message, or None where the other side has ended. Raises ``MessageError``."""
    head = _read_up_to(link, _MESSAGE_HEADER.size)
    if not head:
        return None
    kind, count, number = _MESSAGE_HEADER.unpack(head)
    if count > MAX_ARRAYS:
        raise MessageError(f"A message of {count} arrays has more than {MAX_ARRAYS}.")
    table = _read_exactly(link, count * _ARRAY_HEADER.size)
    forms = [_array_form(*_ARRAY_HEADER.unpack_from(table, place * _ARRAY_HEADER.size)) for place in range(count)]
    sizes = [dtype.itemsize * length for dtype, length in forms]
    if sum(sizes) > MAX_BYTES:
        raise MessageError(f"A message of {sum(sizes)} bytes has more than {MAX_BYTES}.")
    return RpcMessage(
        kind,
        number,
        [np.frombuffer(_read_exactly(link, size), form[0]) for form, size in zip(forms, sizes, strict=True)],
    )


def _array_form(dtype: int, length: int) -> tuple[np.dtype[Any], int]:
    if dtype >= len(_DTYPES):
        raise MessageError(f"There is no element type {dtype}.")
    return _DTYPES[dtype], length


def _read_exactly(link: socket.socket, size: int) -> bytearray:
    data = _read_up_to(link, size)
    if len(data) < size:
        raise MessageError("A message ends in the middle.")
    return data


def _read_up_to(link: socket.socket, size: int) -> bytearray:
    """``size`` bytes, or nothing where the stream has ended before the first one. Raises ``MessageError`` where it ends
    between two.
    """
    data, place = bytearray(size), 0
    while place < size:
        count = link.recv_into(memoryview(data)[place:])
        if count == 0 and place == 0:
            return bytearray()
        if count == 0:
            raise MessageError("A message ends in the middle.")
        place += count
    return data
