"""The processes that share one model, as the model sees them. Knows neither how they talk nor what they compute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed


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


def shard(total: int, communicator: Communicator) -> slice:
    """Which of ``total`` things are this rank's: as many for each, in the order of the ranks, and for the last ones
    what is left, which may be nothing.
    """
    each = largest_shard_size(total, communicator)
    return slice(min(total, communicator.rank * each), min(total, (communicator.rank + 1) * each))


def largest_shard_size(total: int, communicator: Communicator) -> int:
    """How many of ``total`` things rank 0 has; no other rank has more."""
    return -(-total // communicator.size)


# The collectives of the ranks of one model: gloo on the CPU, NCCL on CUDA.
#
# Both are restricted to the loopback interface, and rendezvous through a file in a private folder: no port is opened
# that others could reach, and nothing but tensors is sent.


# How long an exchange waits for a rank. On the CPU one that is stopped is waited for, and one that has died is noticed
# at once; on CUDA neither is noticed by NCCL, and a wait that long is a defect. It has to outlast a rank that compiles
# kernels for the largest step.
COLLECTIVE_TIMEOUTS = {"cpu": timedelta(hours=24), "cuda": timedelta(minutes=10)}
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class TensorParallelGroup:
    """One rank's end of the group. A ``Communicator``; nothing can be exchanged before ``connect``.

    ``collectives`` counts what was begun. ``ordered`` asks for sums whose order of addition is the ranks', wherever in
    a tensor a number stands: what NCCL does, and gloo for more than two ranks, depends on the place. Two numbers have
    one sum, so two ranks need nothing for it.
    """

    def __init__(self, rank: int, size: int, device: torch.device, *, ordered: bool) -> None:
        self.rank = rank
        self.size = size
        self.num_collectives = 0
        self._device = device
        self._ordered_sum = size > 2 and (ordered or device.type == "cpu")
        self._process_group: Any = None

    def connect(self, store: Path) -> None:
        """Meets the others, all of which connect through the same file."""
        with _loopback_only():
            store_client = distributed.FileStore(str(store), self.size)
            timeout = COLLECTIVE_TIMEOUTS[self._device.type]
            self._process_group = _process_group_class(self._device)(store_client, self.rank, self.size, timeout)
            # gloo chooses its interface when the group is made, NCCL at the first exchange.
            self.all_reduce(torch.zeros(1, device=self._device))

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_reduce``. What is added in order is added in float32."""
        self.num_collectives += 1
        part = part.contiguous()
        if not self._ordered_sum:
            self._process_group.allreduce([part]).wait()
            return part
        parts = part.new_empty((self.size, *part.shape))
        self._process_group.allgather([list(parts.unbind())], [part]).wait()
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.gather``."""
        self.num_collectives += 1
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._process_group.gather([parts] if parts else [], [part], options).wait()
        return torch.cat(parts, -1) if parts else part

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Writes rank 0's ``tensor`` over those of the others, of the same shape and dtype."""
        self.num_collectives += 1
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """Ends, on CUDA, what waits for a rank that has died, with an error; gloo notices that by itself. From any
        thread.
        """
        if self._process_group is not None and self._device.type == "cuda":
            self._process_group.abort()

    def close(self) -> None:
        """Leaves the group. Nothing can be exchanged any more. The other ranks may have ended already: NCCL's orderly
        shutdown would wait for them.
        """
        self.abort()
        group, self._process_group = self._process_group, None
        if group is not None and self._device.type == "cpu":
            group.shutdown()


def _process_group_class(device: torch.device) -> Any:
    return distributed.ProcessGroupGloo if device.type == "cpu" else distributed.ProcessGroupNCCL


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Both libraries take the interface from the environment, and would else listen where the host's name leads."""
    before = {name: os.environ.get(name) for name in LOOPBACK_ENVIRONMENT}
    os.environ.update(LOOPBACK_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
