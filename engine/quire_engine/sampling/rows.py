"""The sampling parameters of the rows of one draw, as columns. Lives on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from quire_proto.sampling import SamplingParams

from quire_engine.sampling.noise import row_keys


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """B rows: ``temperature`` [B] float32, ``top_k`` [B] int64 (0 is off), ``top_p`` [B] float64, ``floor`` [B]
    float32 (the logarithm of min-p, -inf is off), ``keys`` [B, 2] int32.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> "SamplingRows":
        """Rows for drawing the tokens at ``positions`` with ``seeds``; the seeds in ``params`` are not read."""
        return cls(
            temperature=torch.tensor([one.temperature for one in params], dtype=torch.float32),
            top_k=torch.tensor([one.top_k for one in params], dtype=torch.int64),
            top_p=torch.tensor([one.top_p for one in params], dtype=torch.float64),
            floor=torch.tensor([log(one.min_p) if one.min_p else -inf for one in params], dtype=torch.float32),
            keys=row_keys(seeds, positions),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, indices: torch.Tensor) -> "SamplingRows":
        """The rows at ``indices``."""
        return self._map(lambda column: column[indices])

    def to(self, device: torch.device) -> "SamplingRows":
        """The same rows on another device."""
        return self._map(lambda column: column.to(device))

    def greedy(self) -> torch.Tensor:
        """Which rows take the most probable token, [B] bool."""
        return self.temperature == 0

    def filtered(self, vocab_size: int) -> torch.Tensor:
        """Which rows have a top-k, top-p or min-p that can leave tokens out, [B] bool."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1) | (self.floor > -inf)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SamplingRows":
        columns = (self.temperature, self.top_k, self.top_p, self.floor, self.keys)
        return SamplingRows(*map(change, columns))
