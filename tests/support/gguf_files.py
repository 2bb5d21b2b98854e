"""GGUF files with more metadata than those that are kept for tests."""

import struct
from typing import Any

_ALIGNMENT = 32
_HEADER = 24  # magic, version, counts of tensors and of values
_WORDS = ["the", "\u2581the", "ow", "ox", "th", "owl", "\u2581t", "\u2581f", "\u2581fo", "\u2581fox", "\u2581owl"]
_LETTERS = ["<s>", "</s>", "<unk>", "\u2581", *_WORDS, *"abcdefghijklmnopqrstuvwxyz"]
PIECES = [*_LETTERS, *(f"<0x{byte:02X}>" for byte in range(64 - len(_LETTERS)))]
"""SentencePiece's kind of vocabulary, as small as the models in ``tests/model/quantized``."""


def pieces_metadata() -> dict[str, Any]:
    """The metadata of a tokenizer of ``PIECES``."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(PIECES))],
        "tokenizer.ggml.token_type": [3, 3, 2] + [6 if piece.startswith("<0x") else 1 for piece in PIECES[3:]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }


def with_metadata(contents: bytes, values: dict[str, Any]) -> bytes:
    """The file with ``values`` too: strings, bools, ints, and lists of strings, floats or ints. What it says itself of
    these keys is renamed.
    """
    for key in values:  # it is found once, behind its length
        contents = contents.replace(_text(key), _text(key[::-1]))
    added = b"".join(_text(key) + _value(value) for key, value in values.items())
    padding = _text("padding")
    length = -(len(added) + len(padding) + 12) % _ALIGNMENT  # so that the tensors stay aligned
    added += padding + _value("x" * length)
    tensors, entries = struct.unpack("<QQ", contents[8:_HEADER])
    counts = struct.pack("<QQ", tensors, entries + len(values) + 1)
    return contents[:8] + counts + added + contents[_HEADER:]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(value)
