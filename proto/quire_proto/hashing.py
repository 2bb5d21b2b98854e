"""Names of KV blocks: a hash chain over tokens, the same bytes in the router and in every engine.

``hash(block) = blake2b-128(hash(parent) ‖ tokens as little-endian int32 ‖ extra)``, where ``extra`` holds what else
decides the block's contents or who may share it: the model's revision and the tenant's salt. The first block's parent
is ``ROOT``.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from sys import byteorder

HASH_BYTES = 16
TOKEN_BYTES = 4
ROOT = bytes(HASH_BYTES)


def extra_key(model_revision: str, salt: bytes = b"") -> bytes:
    """The ``extra`` of every block of a request: each part with its length before it, so that no two pairs
    collide.
    """
    revision = model_revision.encode()
    return len(revision).to_bytes(4, "little") + revision + len(salt).to_bytes(4, "little") + salt


def hash_block(parent: bytes, tokens: Sequence[int], extra: bytes) -> bytes:
    """The 16-byte name of one full block of ``tokens`` (each below 2^31) that follows ``parent``."""
    return blake2b(parent + pack(tokens) + extra, digest_size=HASH_BYTES).digest()


def hash_chain(packed: bytes | memoryview, block_bytes: int, extra: bytes) -> Iterator[bytes]:
    """The names of the full blocks of tokens that ``pack`` has packed, in order, each computed when it is asked for: in
    one loop, as a router names each prompt's blocks and a call for each takes as long as the hash.
    """
    name = ROOT
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        name = blake2b(name + packed[end - block_bytes : end] + extra, digest_size=HASH_BYTES).digest()
        yield name


def pack(tokens: Sequence[int]) -> bytes:
    """Little-endian int32."""
    packed = array("i", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
