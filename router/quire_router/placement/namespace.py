"""What decides that two prompts' blocks have the same names, and those names, each computed when it is asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_proto.hashing import ROOT, TOKEN_BYTES, extra_key, hash_packed, pack


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
        self._packed = pack(tokens)  # once: in pieces it takes half as long again
        self._block_bytes = block_size * TOKEN_BYTES
        self._extra = extra
        self._known: list[bytes] = []

    def __len__(self) -> int:
        """How many full blocks there are."""
        return len(self._packed) // self._block_bytes

    def __iter__(self) -> Iterator[bytes]:
        for index in range(len(self)):
            if index == len(self._known):
                self._known.append(self._compute(index))
            yield self._known[index]

    @property
    def computed(self) -> int:
        """How many names have been computed so far."""
        return len(self._known)

    def _compute(self, index: int) -> bytes:
        begin = index * self._block_bytes
        parent = self._known[-1] if self._known else ROOT
        return hash_packed(parent, self._packed[begin : begin + self._block_bytes], self._extra)
