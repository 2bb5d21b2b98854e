"""Linear layers that the ranks of a model share (Megatron-LM, Shoeybi et al. 2019)."""

import torch

from quire_engine.distributed.communicator import Communicator, PendingSum
from quire_engine.quantization.base import Linear


class RowParallelLinear:
    """A ``Linear`` whose inputs are sharded: each rank multiplies its shard, and all ranks get the sum, or with
    ``scatter`` each its rows of the sum (sequence parallelism, Korthikanti et al. 2022).

    ``local`` is this rank's layer; a bias is in that of one rank alone.
    """

    def __init__(self, local: Linear, communicator: Communicator, *, scatter: bool = False) -> None:
        self._local = local
        self._reduce = communicator.reduce_scatter if scatter else communicator.all_reduce
        self._start = communicator.all_reduce_async
        self.in_features = local.in_features
        self.out_features = local.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, this rank's inputs] -> [T, out], or this rank's ``shard`` of these rows."""
        return self._reduce(self._local(x))

    def start(self, x: torch.Tensor) -> PendingSum:
        """As a call without ``scatter``, whose sum may be under way."""
        return self._start(self._local(x))


def start_sum(layer: Linear, x: torch.Tensor) -> PendingSum:
    """``layer(x)`` of a ``RowParallelLinear``, whose sum may be under way."""
    assert isinstance(layer, RowParallelLinear), "no other ranks have a part of the layer"
    return layer.start(x)


class GatheredColumnParallelLinear:
    """A ``Linear`` whose outputs are sharded: rank 0 gathers all of them, each other rank gets its own.

    ``local`` is this rank's layer. All ranks' have the same number of outputs, the last ones' padded; together they
    have at least ``out_features``.
    """

    def __init__(self, local: Linear, out_features: int, communicator: Communicator) -> None:
        self._local = local
        self._communicator = communicator
        self.in_features = local.in_features
        self.out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out] on rank 0."""
        return self._communicator.gather(self._local(x))[..., : self.out_features].contiguous()
