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

Array = npt.NDArray[Any]

MAX_ARRAYS = 32
MAX_BYTES = 1 << 28
_DTYPES = tuple(map(np.dtype, ("uint8", "int32", "int64")))
# What kind of message, how many arrays, which number; and of each array its dtype's place and its length.
_HEADER, _ARRAY = struct.Struct("<IIQ"), struct.Struct("<IQ")


class WireError(Exception):
    """What came in is no message."""


@dataclass(frozen=True, slots=True)
class Message:
    """``arrays`` are of one dimension, and of uint8, int32 or int64. What ``kind`` and ``number`` mean is agreed
    elsewhere.
    """

    kind: int
    number: int
    arrays: Sequence[Array] = ()


def as_json(value: object) -> Array:
    """A plain value as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_json(array: Array) -> Any:
    """The value of ``as_json``. Raises ``WireError``."""
    try:
        return json.loads(array.tobytes())
    except ValueError:
        raise WireError("The text of a message is not JSON.") from None


def send(link: socket.socket, message: Message) -> None:
    """Writes all of ``message``. Raises ``OSError`` where nobody reads any more."""
    heads = [_HEADER.pack(message.kind, len(message.arrays), message.number)]
    heads += [_ARRAY.pack(_DTYPES.index(array.dtype), len(array)) for array in message.arrays]
    link.sendall(b"".join((*heads, *(array.tobytes() for array in message.arrays))))


def receive(link: socket.socket) -> Message | None:
    """The next message, or None where the other side has ended. Raises ``WireError``."""
    head = _read(link, _HEADER.size)
    if not head:
        return None
    kind, count, number = _HEADER.unpack(head)
    if count > MAX_ARRAYS:
        raise WireError(f"A message of {count} arrays has more than {MAX_ARRAYS}.")
    table = _whole(link, count * _ARRAY.size)
    forms = [_form(*_ARRAY.unpack_from(table, place * _ARRAY.size)) for place in range(count)]
    sizes = [dtype.itemsize * length for dtype, length in forms]
    if sum(sizes) > MAX_BYTES:
        raise WireError(f"A message of {sum(sizes)} bytes has more than {MAX_BYTES}.")
    return Message(
        kind, number, [np.frombuffer(_whole(link, size), form[0]) for form, size in zip(forms, sizes, strict=True)]
    )


def _form(dtype: int, length: int) -> tuple[np.dtype[Any], int]:
    if dtype >= len(_DTYPES):
        raise WireError(f"There is no element type {dtype}.")
    return _DTYPES[dtype], length


def _whole(link: socket.socket, size: int) -> bytearray:
    data = _read(link, size)
    if len(data) < size:
        raise WireError("A message ends in the middle.")
    return data


def _read(link: socket.socket, size: int) -> bytearray:
    """``size`` bytes, or nothing where the stream has ended before the first one. Raises ``WireError`` where it ends
    between two.
    """
    data, place = bytearray(size), 0
    while place < size:
        count = link.recv_into(memoryview(data)[place:])
        if count == 0 and place == 0:
            return bytearray()
        if count == 0:
            raise WireError("A message ends in the middle.")
        place += count
    return data
