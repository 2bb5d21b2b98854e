"""Linear layers of which each rank holds a part (Megatron-LM, Shoeybi et al. 2019). Knows no names and no files."""

import torch

from quire_engine.models.linear import Linear
from quire_engine.models.ranks import Communicator


class RowParallelLinear:
    """A layer whose inputs are divided: each rank computes what its inputs add, and every rank gets the sum. A
    ``Linear``.

    The bias, if there is one, is in the ``part`` of one rank alone.
    """

    def __init__(self, part: Linear, ranks: Communicator) -> None:
        self._shard = part
        self._communicator = ranks
        self.in_features = part.in_features
        self.out_features = part.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, this rank's inputs] -> [T, out]."""
        return self._communicator.all_reduce(self._shard(x))

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing that is gated is divided by its inputs."""
        raise NotImplementedError


class GatheredColumnParallelLinear:
    """A layer whose outputs are divided: rank 0 gets all of them, another rank its own. A ``Linear``.

    Every rank's ``part`` has the same number of outputs, those of the last ones padded; together they have at least
    ``out_features``.
    """

    def __init__(self, part: Linear, out_features: int, ranks: Communicator) -> None:
        self._shard = part
        self._communicator = ranks
        self.in_features = part.in_features
        self.out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out] on rank 0."""
        return self._communicator.gather(self._shard(x))[..., : self.out_features].contiguous()

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing that is gated is needed by rank 0 alone."""
        raise NotImplementedError
