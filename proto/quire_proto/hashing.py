"""Hashes of KV blocks: a hash chain over tokens, the same bytes in the router and in every engine.

``hash(block) = blake2b-128(hash(parent) ‖ tokens as little-endian int32 ‖ extra)``, where ``extra`` is what else
determines the block's contents, or who may share it: the model's revision, the tenant's salt and the digest of the
adapter, where there is one. The first block's parent is ``ROOT``.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from sys import byteorder

HASH_BYTES = 16
TOKEN_BYTES = 4
ROOT = bytes(HASH_BYTES)


def extra_key(model_revision: str, salt: bytes = b"", lora_digest: bytes = b"") -> bytes:
    """The ``extra`` of every block of a request: each part with its length before it, so that no two requests collide
    that differ in one. A request without an adapter has two parts.
    """
    parts = (model_revision.encode(), salt, lora_digest) if lora_digest else (model_revision.encode(), salt)
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def hash_block(parent: bytes, tokens: Sequence[int], extra: bytes) -> bytes:
    """The 16-byte hash of one full block of ``tokens`` (each below 2^31) that follows ``parent``."""
    return blake2b(parent + pack(tokens) + extra, digest_size=HASH_BYTES).digest()


def hash_chain(packed: bytes | memoryview, block_bytes: int, extra: bytes, parent: bytes = ROOT) -> Iterator[bytes]:
    """Yields the hashes of the full blocks of tokens that ``pack`` has packed, in order, after ``parent``. Lazy, and
    one loop instead of a call of ``hash_block`` for each block, which would take as long as the hash: a router hashes
    every prompt.
    """
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        parent = blake2b(parent + packed[end - block_bytes : end] + extra, digest_size=HASH_BYTES).digest()
        yield parent


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian int32."""
    packed = array("i", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
