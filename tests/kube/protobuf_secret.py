"""Kubernetes' protobuf form of a Secret, the one object that Helm's library sends in it, read field by field."""

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_secret(message: bytes) -> dict[str, Any]:
    """The Secret as its JSON form has it. The message is a ``runtime.Unknown`` behind the magic number."""
    unknown = dict(fields(message.removeprefix(MAGIC)))
    secret = list(fields(unknown[2]))
    metadata = [value for number, value in secret if number == 1]
    kind = [value.decode() for number, value in secret if number == 3]
    return {
        "metadata": _metadata(metadata[0]),
        "data": {name: base64.b64encode(value).decode() for name, value in _entries(secret, 2)},
        **({"type": kind[0]} if kind else {}),
    }


def _metadata(message: bytes) -> dict[str, Any]:
    parts = list(fields(message))
    names = {1: "name", 3: "namespace", 6: "resourceVersion"}
    texts = {names[number]: value.decode() for number, value in parts if number in names and value}
    return {
        **texts,
        "labels": {name: value.decode() for name, value in _entries(parts, 11)},
        "annotations": {name: value.decode() for name, value in _entries(parts, 12)},
    }


def _entries(parts: list[tuple[int, Any]], wanted: int) -> Iterator[tuple[str, bytes]]:
    for number, value in parts:
        if number == wanted:
            entry = dict(fields(value))
            yield entry[1].decode(), entry.get(2, b"")


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and contents of a message's fields, in order; of a number the contents is an int, else bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == VARINT:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        size, position = _size(message, position, tag & 7)
        yield tag >> 3, message[position : position + size]
        position += size


def _size(message: bytes, position: int, wire: int) -> tuple[int, int]:
    if wire == BYTES:
        return _varint(message, position)
    return {FIXED64: 8, FIXED32: 4}[wire], position


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
