"""HTTP/2 frame by frame, for what no client library would send."""

import struct
from collections.abc import Iterable

HEADERS, RST_STREAM, SETTINGS, DATA, PING, GOAWAY = 1, 3, 4, 0, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_FRAME = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of at most ``_MAX_FRAME`` bytes of payload."""
    assert len(payload) <= _MAX_FRAME
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def opening() -> bytes:
    """What a client says first: that it speaks HTTP/2, and that it has no settings of its own."""
    return PREFACE + frame(SETTINGS, 0, 0)


def integer(value: int, prefix: int, pattern: int = 0) -> bytes:
    """An integer of HPACK (RFC 7541, 5.1) with ``prefix`` bits in its first byte, behind the bits of ``pattern``."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((pattern | value,))
    rest, value = [], value - most
    while value >= 128:
        rest.append(value % 128 | 128)
        value //= 128
    return bytes((pattern | most, *rest, value))


def literal(name: str, value: str, *, indexed: bool = False) -> bytes:
    """A header in plain text, which is also put first into the receiver's dynamic table where it is ``indexed``."""
    texts = b"".join(integer(len(text), 7) + text.encode() for text in (name, value))
    return (b"\x40" if indexed else b"\x00") + texts


def call(method: str, headers: Iterable[bytes] = ()) -> bytes:
    """The header block of a gRPC call of ``method``, with ``headers`` that are encoded already."""
    fixed = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "test"}
    fixed |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(name, value) for name, value in fixed.items()) + b"".join(headers)


def repeated_headers(method: str, streams: int, *, value_bytes: int = 3_900, times: int = 16_000) -> bytes:
    """Calls of ``method`` that cost their receiver far more than their sender (RFC 7541, 7.3): one header is put into
    the dynamic table, and each call then names it so many ``times``, with one byte for each.
    """
    ends = END_HEADERS | END_STREAM
    first = frame(HEADERS, ends, 1, call(method, [literal("x-a", "a" * value_bytes, indexed=True)]))
    newest = integer(62, 7, 0x80)
    calls = (frame(HEADERS, ends, 3 + 2 * number, call(method, [newest * times])) for number in range(streams))
    return opening() + first + b"".join(calls)
