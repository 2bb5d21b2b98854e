"""What decides that two prompts' blocks have the same names, and those names, each computed when it is asked for."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from sys import byteorder

from quire_proto.hashing import TOKEN_BYTES, extra_key, hash_chain, pack


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """Engines with one revision of a model and one block size give equal names to equal blocks, and no others do."""

    model_revision: str
    block_size: int

    def hashes(self, tokens: Sequence[int], salt: bytes = b"") -> "BlockHashes":
        """The names of the full blocks of ``tokens``, in order, as ``quire_proto.hashing`` computes them."""
        return BlockHashes(tokens, self.block_size, extra_key(self.model_revision, salt))


class BlockHashes:
    """Can be gone through again and again: a name is computed when it is first reached, and kept.

    So a long prompt of which nothing is cached costs one name, and noting what the chosen engine will have costs
    none of them twice.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, extra: bytes) -> None:
        self._count = len(tokens) // block_size
        self._more = hash_chain(_packed(tokens), block_size * TOKEN_BYTES, extra)
        self._known: list[bytes] = []

    def extend(self, count: int) -> bytes | None:
        """Computes up to ``count`` more names; the last of them, None where none was left."""
        more = list(islice(self._more, count))
        self._known += more
        return more[-1] if more else None

    def __len__(self) -> int:
        """How many full blocks there are."""
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        known = self._known
        for index in range(self._count):
            if index == len(known):
                known.append(next(self._more))
            yield known[index]


def _packed(tokens: Sequence[int]) -> bytes | memoryview:
    """As ``pack``, and without a copy where the tokens are in memory that way: the names are kept for as long as their
    request.
    """
    if isinstance(tokens, array) and tokens.typecode == "i" and byteorder == "little":
        return memoryview(tokens).cast("B")
    return pack(tokens)


HashesByNamespace = dict[BlockNamespace, BlockHashes]
"""The names of one prompt's blocks, as each namespace has them."""
