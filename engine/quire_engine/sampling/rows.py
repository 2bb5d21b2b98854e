"""The sampling parameters of a batch of rows, as one array each: on the host, where they can be read without waiting,
and on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
import numpy.typing as npt
import torch
from quire_proto.sampling import SamplingParams

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import FloatArray, TokenArray
from quire_engine.sampling.noise import row_keys

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DeviceSamplingMetadata:
    """The arrays of ``SamplingMetadata`` as tensors on the device."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    keys: torch.Tensor

    def select(self, indices: torch.Tensor) -> "DeviceSamplingMetadata":
        """The rows at ``indices``."""
        columns = (self.temperature, self.top_k, self.top_p, self.log_min_p, self.keys)
        return DeviceSamplingMetadata(*(column[indices] for column in columns))


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """B rows: ``temperature`` [B] float32, ``top_k`` [B] int64 (0 is off), ``top_p`` [B] float64, ``log_min_p`` [B]
    float32 (the logarithm of min-p, -inf is off), ``keys`` [B, 2] int32.
    """

    temperature: FloatArray
    top_k: TokenArray
    top_p: npt.NDArray[np.float64]
    log_min_p: FloatArray
    keys: npt.NDArray[np.int32]

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
    ) -> "SamplingMetadata":
        """Rows for drawing the tokens at ``positions`` with ``seeds``; the seeds in ``params`` are not read."""
        return cls(
            temperature=np.array([one.temperature for one in params], dtype=np.float32),
            top_k=np.array([one.top_k for one in params], dtype=np.int64),
            top_p=np.array([one.top_p for one in params], dtype=np.float64),
            log_min_p=np.array([log(one.min_p) if one.min_p else -inf for one in params], dtype=np.float32),
            keys=row_keys(seeds, positions),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def has_top_p(self) -> bool:
        """Whether any row has a top-p."""
        return bool((self.top_p < 1).any())

    def select(self, indices: TokenArray) -> "SamplingMetadata":
        """The rows at ``indices``."""
        return SamplingMetadata(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.log_min_p[indices],
            self.keys[indices],
        )

    def to(self, device: torch.device) -> DeviceSamplingMetadata:
        """The same rows on ``device``, in one copy."""
        return DeviceSamplingMetadata(
            *upload_arrays((self.temperature, self.top_k, self.top_p, self.log_min_p, self.keys), device)
        )

    def is_greedy(self) -> BoolArray:
        """Which rows take the most probable token, [B]."""
        return np.equal(self.temperature, 0)

    def is_filtered(self, vocab_size: int) -> BoolArray:
        """Which rows have a top-k, top-p or min-p that can leave tokens out, [B]."""
        filtered: BoolArray = (
            ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1) | (self.log_min_p > -inf)
        )
        return filtered

    def has_threshold_within(self, width: int, vocab_size: int) -> BoolArray:
        """For which rows the ``width`` highest scores certainly include the lowest score that is kept, [B]."""
        unlimited = (self.top_k == 0) | (self.top_k >= vocab_size)
        within: BoolArray = ((self.top_k > 0) & (self.top_k <= width)) | (unlimited & (self.top_p >= 1))
        return within | (width >= vocab_size)
