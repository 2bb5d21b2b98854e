"""The sampling parameters of the rows of one step, as columns. Lives on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from quire_proto.sampling import SamplingParams

from quire_engine.sampling.noise import row_keys


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """B rows: ``temperature`` [B] float32, ``top_k`` [B] int64 (0 is off), ``top_p`` [B] float64, ``keys``
    [B, 2] int32.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int]) -> "SamplingRows":
        """Rows for drawing the tokens at ``positions``."""
        return cls(
            temperature=torch.tensor([one.temperature for one in params], dtype=torch.float32),
            top_k=torch.tensor([one.top_k for one in params], dtype=torch.int64),
            top_p=torch.tensor([one.top_p for one in params], dtype=torch.float64),
            keys=row_keys([one.seed for one in params], positions),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, indices: torch.Tensor) -> "SamplingRows":
        """The rows at ``indices``."""
        columns = (self.temperature, self.top_k, self.top_p, self.keys)
        return SamplingRows(*(column[indices] for column in columns))

    def to(self, device: torch.device) -> "SamplingRows":
        """The same rows on another device."""
        columns = (self.temperature, self.top_k, self.top_p, self.keys)
        return SamplingRows(*(column.to(device) for column in columns))

    def greedy(self) -> torch.Tensor:
        """Which rows take the most probable token, [B] bool."""
        return self.temperature == 0

    def filtered(self, vocab_size: int) -> torch.Tensor:
        """Which rows have a top-k or top-p that can leave tokens out, [B] bool."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1)
