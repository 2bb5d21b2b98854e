"""Linear layers that the ranks of a model share (Megatron-LM, Shoeybi et al. 2019)."""

import torch

from quire_engine.distributed.communicator import Communicator, PendingSum
from quire_engine.quantization.base import Linear


class RowParallelLinear:
    """A ``Linear`` whose inputs are sharded. Each rank multiplies its shard. All ranks get the sum, or with ``scatter``
    each gets its own rows of the sum (sequence parallelism, Korthikanti et al. 2022).

    ``local`` is this rank's layer. Only one rank's layer has the bias.
    """

    def __init__(self, local: Linear, communicator: Communicator, *, scatter: bool = False) -> None:
        self._local = local
        self._reduce = communicator.reduce_scatter if scatter else communicator.all_reduce
        self._start = communicator.all_reduce_async
        self.in_features = local.in_features
        self.out_features = local.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [T, this rank's inputs] to [T, out], or to this rank's ``shard`` of these rows."""
        return self._reduce(self._local(x))

    def start(self, x: torch.Tensor) -> PendingSum:
        """Like a call without ``scatter``, but returns a pending sum."""
        return self._start(self._local(x))


def start_sum(layer: Linear, x: torch.Tensor) -> PendingSum:
    """Starts ``layer(x)`` of a ``RowParallelLinear``. Returns the pending sum."""
    assert isinstance(layer, RowParallelLinear), "no other ranks have a part of the layer"
    return layer.start(x)


class GatheredColumnParallelLinear:
    """A ``Linear`` whose outputs are sharded. Rank 0 gathers all of them; each other rank gets its own.

    ``local`` is this rank's layer. All ranks have the same number of outputs, with padding on the last ones, and
    together at least ``out_features``.
    """

    def __init__(self, local: Linear, out_features: int, communicator: Communicator) -> None:
        self._local = local
        self._communicator = communicator
        self.in_features = local.in_features
        self.out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [T, in] to [T, out] on rank 0."""
        return self._communicator.gather(self._local(x))[..., : self.out_features].contiguous()
