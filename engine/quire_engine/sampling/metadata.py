"""The sampling parameters of a batch, one array per parameter: on the host, where reading them needs no wait, and on
the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
import numpy.typing as npt
import torch
from quire_proto.sampling import SamplingParams

from quire_engine.device.accelerator import upload_arrays
from quire_engine.sampling.exact_math import exponential_of_uniform, log_of_parts, split

TokenArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
KnownTokens = npt.NDArray[np.int32]


def token_array(token_ids: Sequence[int], vocab_size: int) -> TokenArray:
    """Returns the token ids as int64, without ids outside the vocabulary."""
    array = np.array(token_ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)]


def flat_indices(scores: torch.Tensor, rows: Sequence[int], token_ids: Sequence[TokenArray]) -> TokenArray:
    """Returns the indices [N] of ``token_ids[i]`` in row ``rows[i]`` of the flattened ``scores`` [R, V], row after
    row.
    """
    starts = np.repeat(np.array(rows, dtype=np.int64) * scores.shape[1], [len(ids) for ids in token_ids])
    indices: TokenArray = np.concatenate(token_ids) + starts
    return indices


def repeat_per_index(values: Sequence[float], lengths: Sequence[int]) -> FloatArray:
    """Repeats ``values[i]`` ``lengths[i]`` times, float32 [N]: a row's value for each of the row's indices."""
    return np.repeat(np.array(values, dtype=np.float32), lengths)


# Gumbel noise that is a pure function of (seed, position, token id).
#
# The host mixes the seed (all 64 bits) and the position of the sampled token into one 64-bit key per row, with the
# finalizer of MurmurHash3 (Appleby). That is a bijection: at one position, different seeds never share a key. On the
# device each token id meets both halves of the key in MurmurHash3's 32-bit finalizer, in wrapping int32 arithmetic:
#
# x = (id * GOLDEN) ^ low;  x ^= x >>> 16;  x *= A;  x += high;  x ^= x >>> 13;  x *= B;  x ^= x >>> 16
#
# The low 31 bits n give u = (n + 0.5) / 2^31, clamped below 1, and the noise is -log(-log(1 - u)). With 1 - u instead
# of u, float32 is finest where the noise is large, so improbable tokens keep their probability down to 2^-32. The
# logarithms come from ``exact_math``, so the noise has the same bits on every processor and device.
#
# vLLM's second model runner and SGLang's deterministic mode also draw without state. Preemption, another batch or
# another engine cannot change the noise.


GOLDEN = 0x9E3779B9
MIX_A, MIX_B = 0x85EBCA6B, 0xC2B2AE35
MIX64_A, MIX64_B = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = 1 - 2**-24

Uint64 = npt.NDArray[np.uint64]


def row_keys(seeds: "Sequence[int] | Uint64", positions: Sequence[int] | TokenArray) -> npt.NDArray[np.int32]:
    """Returns the keys [B, 2] int32, low and high half, of B draws, from seeds below 2^64 and the positions of the
    tokens to sample.
    """
    mixed = _mix64(np.array(positions, dtype=np.uint64) + GOLDEN64)
    keys = _mix64(np.array(seeds, dtype=np.uint64) ^ mixed)
    halves = np.stack((keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)), axis=1)
    return halves.view(np.int32)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise [B, N] float32 for keys [B, 2] and int32 token ids, [N] for all rows or [B, N]."""
    return gumbel_from_bits(hash_tokens(keys, token_ids))


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise float32, always finite, from random int32 bits. Overwrites the bits."""
    return gumbel_from_uniform(uniform_from_bits(bits))


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Returns uniform float32 numbers strictly between 0 and 1 from random int32 bits. Overwrites the bits."""
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


def gumbel_from_uniform(uniform: torch.Tensor) -> torch.Tensor:
    """Returns the Gumbel noise of uniform numbers."""
    return log_of_parts(*split(exponential_of_uniform(uniform))).neg_()


def noise_bound(uniform: torch.Tensor) -> torch.Tensor:
    """Returns an upper bound of the noise of uniform numbers, at a fraction of its cost.

    The noise is below ``-log(uniform)``. The bits of a float32, read as an integer, are linear between powers of two
    and never above the logarithm. The bound is at most 0.06 above the noise where the noise is large.
    """
    return uniform.view(torch.int32).float().mul_(-log(2) / (1 << 23)).add_(127 * log(2) + 0.001)


def hash_tokens(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the 32 random bits [B, N] int32 of the noise."""
    bits = (token_ids * _signed(GOLDEN)) ^ keys[:, :1]
    shifted = torch.empty_like(bits)
    _xor_shift(bits, 16, shifted).mul_(_signed(MIX_A)).add_(keys[:, 1:])
    _xor_shift(bits, 13, shifted).mul_(_signed(MIX_B))
    return _xor_shift(bits, 16, shifted)


def _xor_shift(bits: torch.Tensor, count: int, shifted: torch.Tensor) -> torch.Tensor:
    """Computes ``bits ^= bits >>> count`` in place. int32 shifts keep the sign, hence the mask. ``shifted`` is
    scratch.
    """
    torch.bitwise_right_shift(bits, count, out=shifted)
    return bits.bitwise_xor_(shifted.bitwise_and_((1 << (32 - count)) - 1))


def _signed(constant: int) -> int:
    """Returns the int32 with the same 32 bits."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _mix64(values: Uint64) -> Uint64:
    values = (values ^ (values >> np.uint64(33))) * MIX64_A
    values = (values ^ (values >> np.uint64(33))) * MIX64_B
    return values ^ (values >> np.uint64(33))


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
        """Returns the rows at ``indices``."""
        columns = (self.temperature, self.top_k, self.top_p, self.log_min_p, self.keys)
        return DeviceSamplingMetadata(*(column[indices] for column in columns))


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling parameters of B rows: ``temperature`` [B] float32, ``top_k`` [B] int64 (0 is off), ``top_p`` [B]
    float64, ``log_min_p`` [B] float32 (the logarithm of min-p, -inf is off), ``keys`` [B, 2] int32.
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
        """Makes the rows to sample the tokens at ``positions`` with ``seeds``. Ignores the seeds in ``params``."""
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
        """Returns the rows at ``indices``."""
        return SamplingMetadata(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.log_min_p[indices],
            self.keys[indices],
        )

    def to(self, device: torch.device) -> DeviceSamplingMetadata:
        """Returns the same rows on ``device``, in one copy."""
        return DeviceSamplingMetadata(
            *upload_arrays((self.temperature, self.top_k, self.top_p, self.log_min_p, self.keys), device)
        )

    def is_greedy(self) -> BoolArray:
        """Returns which rows take the most probable token, [B]."""
        return np.equal(self.temperature, 0)

    def is_filtered(self, vocab_size: int) -> BoolArray:
        """Returns which rows have a top-k, top-p or min-p that can exclude tokens, [B]."""
        filtered: BoolArray = (
            ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1) | (self.log_min_p > -inf)
        )
        return filtered

    def has_threshold_within(self, width: int, vocab_size: int) -> BoolArray:
        """Returns for which rows the ``width`` highest scores certainly include the lowest kept score, [B]."""
        unlimited = (self.top_k == 0) | (self.top_k >= vocab_size)
        within: BoolArray = ((self.top_k > 0) & (self.top_k <= width)) | (unlimited & (self.top_p >= 1))
        return within | (width >= vocab_size)
