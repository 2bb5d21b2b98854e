"""The processes that share one model, as the model sees them. Knows neither how they talk nor what they compute."""

from typing import Protocol

import torch


class Communicator(Protocol):
    """Processes of which each holds a part of the weights and computes a part of every layer.

    All ranks call the same methods in the same order with tensors of the same shape and dtype.
    """

    @property
    def rank(self) -> int:
        """The place of this process; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, which may be ``part`` itself, overwritten. Equal on all ranks, bit for bit."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts beside each other in the last dimension, in the order of the ranks, for rank 0. The others
        get their own part back.
        """
        ...


class SingleRankCommunicator:
    """One process that holds everything. A ``Communicator``."""

    rank = 0
    size = 1

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """``part`` itself."""
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """``part`` itself."""
        return part


SINGLE_RANK = SingleRankCommunicator()


def shard(total: int, ranks: Communicator) -> slice:
    """Which of ``total`` things are this rank's: as many for each, in the order of the ranks, and for the last ones
    what is left, which may be nothing.
    """
    each = largest_shard_size(total, ranks)
    return slice(min(total, ranks.rank * each), min(total, (ranks.rank + 1) * each))


def largest_shard_size(total: int, ranks: Communicator) -> int:
    """How many of ``total`` things rank 0 has; no other rank has more."""
    return -(-total // ranks.size)
