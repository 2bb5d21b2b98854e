"""The bytes that single tokens write. Text comes from the detokeniser.

A token may hold a part of a character, which has no text, but always the same bytes.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from quire_proto.text.detokenizer import REPLACEMENT, Decode

_CACHED = 1 << 16
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Called with a token id, gives the token's bytes, or None for an id that the tokenizer does not have.

    The bytes of a text's tokens together are the text in UTF-8. A special token's are its name's. ``decode`` is the
    tokenizer's, special tokens included, and ``written`` gives a token as its vocabulary has it.
    """

    def __init__(self, decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> None:
        self._decode = decode
        self._written = written
        self._before = _letter(decode, written, vocab_size)
        self._find = lru_cache(_CACHED)(self._look_up)

    def __call__(self, token_id: int) -> bytes | None:
        """The bytes of one token."""
        return self._find(token_id)

    def _look_up(self, token_id: int) -> bytes | None:
        written = self._written(token_id)
        if written is None:
            return None
        text = self._text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return _bytes_written(written) or text.encode()

    def _text(self, token_id: int) -> str:
        """The token's text after a letter: at a text's beginning, decoders of the sentencepiece kind drop a space."""
        before = "" if self._before is None else self._decode([self._before])
        together = self._decode([token_id] if self._before is None else [self._before, token_id])
        return together[len(before) :] if together.startswith(before) else self._decode([token_id])


def _letter(decode: Decode, written: Callable[[int], str | None], vocab_size: int) -> int | None:
    """A token that is one letter of ASCII, and not as a byte: bytes that follow each other are decoded together."""
    for token_id in range(vocab_size):
        name = written(token_id) or ""
        if len(name) == 1 and name.isascii() and name.isalpha() and decode([token_id]) == name:
            return token_id
    return None


def _bytes_written(written: str) -> bytes | None:
    """The bytes of a token that is no whole text: one of the 256 that sentencepiece falls back to, or what byte-level
    vocabularies write with a letter for each byte; None for anything else.
    """
    byte = _FALLBACK.fullmatch(written)
    if byte is not None:
        return bytes.fromhex(byte[1])
    if all(letter in _BYTES for letter in written):
        return bytes(_BYTES[letter] for letter in written)
    return None


def _alphabet() -> dict[str, int]:
    """The letter of each byte in byte-level vocabularies, as GPT-2 introduced them: printable bytes are themselves, and
    the others, in order, the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _alphabet()
