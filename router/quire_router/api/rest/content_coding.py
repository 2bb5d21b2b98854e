"""Bodies in a content coding (RFC 9110, ``Content-Encoding``): ``decoding`` reads gzip and deflate as they arrive, in
pieces of bounded size, so that the limits of bodies hold for what comes out.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from starlette.types import Message, Receive

from quire_router.api.rest.http import body_malformed, body_too_large, unsupported_coding

_PIECE: Final = 64 * 1024  # bytes that are decoded at once
_INLINE: Final = 16 * 1024  # bytes that are decoded on the event loop: what is longer would stall other streams
_MAX_CODINGS: Final = 2
_MAX_BETWEEN: Final = 256 * 2**20  # bytes between two codings
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_WINDOWS: Final[Mapping[str, int | None]] = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": None}


def decoding(receive: Receive, values: Sequence[str]) -> Receive:
    """Returns what receives a body whose ``Content-Encoding`` has these ``values``, decoded. Raises ``HttpError`` 415
    for other codings than gzip and deflate. Receiving raises 400 for a body that is not in them.
    """
    names = [name.strip().lower() for value in values for name in value.split(",")]
    codings = [name for name in names if name not in ("", "identity")]
    if not codings:
        return receive
    if len(codings) > _MAX_CODINGS or not all(name in _WINDOWS for name in codings):
        raise unsupported_coding(", ".join(codings))
    return _DecodedBody(receive, [_Decoder(_WINDOWS[name]) for name in reversed(codings)]).receive


async def decode_whole(body: bytes, values: Sequence[str], limit: int, reserve: Callable[[int], None]) -> bytes:
    """Returns a whole ``body``, decoded to at most ``limit`` bytes; ``reserve`` is called with each size of it.
    Raises ``HttpError``, and what ``reserve`` raises.
    """

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    receiving, decoded, more = decoding(receive, values), bytearray(), True
    while more:
        message = await receiving()
        more = message.get("more_body", False)
        if len(decoded) + len(message["body"]) > limit:
            raise body_too_large(limit)
        reserve(len(body) + len(decoded) + len(message["body"]))
        decoded += message["body"]
    return bytes(decoded)


class _DecodedBody:
    """The messages of a request, with its body decoded by ``decoders``, one after the other."""

    def __init__(self, receive: Receive, decoders: Sequence["_Decoder"]) -> None:
        self._receive = receive
        self._decoders = decoders
        self._pieces: Iterator[bytes] = iter(())
        self._arrived = self._sent = 0
        self._arriving = True
        self._ended = False

    async def receive(self) -> Message:
        """Returns the next message."""
        while (piece := await self._next_piece()) is None:
            if self._ended:
                return await self._receive()
            if not self._arriving:
                self._ended = True
                if self._arrived and not all(decoder.is_whole for decoder in self._decoders):
                    raise body_malformed("it ends too early")
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._arriving = message.get("more_body", False)
            self._arrived += len(data)
            self._pieces = _decoded(data, self._decoders)
        self._sent += len(piece)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def _next_piece(self) -> bytes | None:
        if max(self._arrived, self._sent) <= _INLINE:
            return next(self._pieces, None)
        return await asyncio.to_thread(next, self._pieces, None)


def _decoded(data: bytes, decoders: Sequence["_Decoder"]) -> Iterator[bytes]:
    """Yields what ``data`` becomes in all decoders, in pieces that are not empty."""
    if not decoders:
        yield data
        return
    first, *others = decoders
    for piece in first.push(data):
        if others and first.size > _MAX_BETWEEN:
            raise body_too_large(_MAX_BETWEEN)
        yield from _decoded(piece, others)


class _Decoder:
    """Decodes one coding. ``size`` is how many bytes came out."""

    def __init__(self, window: int | None) -> None:
        """``window`` is zlib's; None for deflate, which may be with zlib's head, as RFC 9110 says, or without one."""
        self._window = window
        self._inflater = None if window is None else zlib.decompressobj(window)
        self._head = b""
        self.size = 0

    @property
    def is_whole(self) -> bool:
        """Whether what came so far is complete."""
        return self._inflater is not None and self._inflater.eof

    def push(self, data: bytes) -> Iterator[bytes]:
        """Yields what comes out, at most ``_PIECE`` bytes at a time. Raises ``HttpError``."""
        if self._inflater is None:
            self._head += data
            if len(self._head) < 2:
                return
            data, self._head = self._head, b""
            has_head = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0
            self._inflater = zlib.decompressobj(_ZLIB if has_head else _RAW)
        piece = b""
        while data or len(piece) == _PIECE:
            if self._inflater.eof:
                self._begin_member()
            try:
                piece = self._inflater.decompress(data, _PIECE)
            except zlib.error:
                raise body_malformed("its bytes cannot be decoded") from None
            data = self._inflater.unconsumed_tail or self._inflater.unused_data
            self.size += len(piece)
            if piece:
                yield piece

    def _begin_member(self) -> None:
        """A body in gzip may have several members (RFC 1952); one in deflate ends once."""
        if self._window is None:
            raise body_malformed("something follows its end")
        self._inflater = zlib.decompressobj(self._window)
