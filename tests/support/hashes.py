"""The names of a prompt's blocks, each computed by itself, as an engine does it."""

from collections.abc import Sequence

from quire_proto.hashing import ROOT, hash_block


def hash_blocks(tokens: Sequence[int], block_size: int, extra: bytes) -> list[bytes]:
    """The names of all full blocks of ``tokens``, in order."""
    hashes: list[bytes] = []
    parent = ROOT
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end], extra)
        hashes.append(parent)
    return hashes
