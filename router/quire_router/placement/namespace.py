"""What decides that two prompts' blocks have the same names, and those names, each computed when it is asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_proto.hashing import TOKEN_BYTES, extra_key, hash_chain, pack


@dataclass(frozen=True, slots=True)
class Namespace:
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
        self._more = hash_chain(pack(tokens), block_size * TOKEN_BYTES, extra)
        self._known: list[bytes] = []

    def __len__(self) -> int:
        """How many full blocks there are."""
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        known = self._known
        for index in range(self._count):
            if index == len(known):
                known.append(next(self._more))
            yield known[index]
