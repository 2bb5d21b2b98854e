"""Communication between the ranks that share one model. ``Communicator`` is the interface for the model, and
``GroupCoordinator`` implements it with collectives: gloo on the CPU, NCCL on CUDA.

On one machine both use only the loopback interface, so no other machine can reach their ports. Between machines they
listen at their own machine's address. They send nothing but tensors.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from quire_engine.distributed.shared_memory import SharedMemorySums
from quire_engine.errors import ModelError, first_line

# How long a collective waits for a rank. On the CPU it may wait for a stopped rank, and it notices a dead one at once.
# NCCL notices neither, so there such a long wait is a defect. The timeout must outlast a rank that compiles kernels for
# the largest step.
COLLECTIVE_TIMEOUTS = {"cpu": timedelta(hours=24), "cuda": timedelta(minutes=10)}
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(slots=True)
class PendingSum:
    """A sum over the ranks that may be in progress: the sum of ``parts``, all of one shape and dtype. The parts are
    complete when ``work``, torch's handle, is done, or already if ``work`` is None. A sum that torch computes itself
    has one part.
    """

    parts: Sequence[torch.Tensor]
    work: Any = None

    def wait(self) -> torch.Tensor:
        """Returns the sum. Call it once, because nothing is kept. On CUDA the device's stream waits for the sum, but
        the host does not. Raises ``RuntimeError`` if another rank is lost.
        """
        if self.work is not None:
            self.work.wait()
        parts, self.parts, self.work = self.parts, (), None
        return _add_up(parts)


class Communicator(Protocol):
    """The ranks of a model: each process holds a shard of the weights and computes its part of every layer.

    All ranks must call the same methods in the same order, with tensors of the same dtype. The shapes must be the same
    too, except in ``all_gather`` and ``all_to_all``.
    """

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 leads."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' tensors, bit for bit equal on all ranks. May overwrite ``tensor``."""
        ...

    @property
    def overlaps_sums(self) -> bool:
        """Whether ``all_reduce_async`` returns before the sum is complete. Constant once the ranks are connected."""
        ...

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingSum:
        """Starts ``all_reduce``: the same sum, bit for bit, computed concurrently with the work before its ``wait``. Do
        not touch ``tensor`` until then. A sum completes even if nothing waits for it.
        """
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """On rank 0, returns all ranks' tensors concatenated in the last dimension, in rank order. Other ranks get
        their own tensor back.
        """
        ...

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's ``shard`` of the rows of the sum of all ranks' tensors [T, N]. Shards are in rank order.
        May overwrite ``tensor``.
        """
        ...

    def all_gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """Returns all ``total`` rows [total, N]. Each rank passes its ``shard`` of them as ``rows`` [.., N]."""
        ...

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first ``sent[0]`` of ``rows`` [sum(sent), N] to rank 0, the next ``sent[1]`` to rank 1, and so on.
        Returns what the ranks sent to this rank, in rank order: [sum(received), N].
        """
        ...

    def exchange_counts(self, counts: torch.Tensor, tokens: int) -> tuple[list[int], list[int]]:
        """Prepares an ``all_to_all`` in which this rank sends ``counts`` [ranks] rows. ``tokens`` is this rank's number
        of tokens. Returns how many rows it sends to each rank and receives from each. Waits for the device.
        """
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a CPU graph can hold ``all_reduce``."""
        ...

    def all_agree(self, is_so: bool) -> bool:
        """Returns whether ``is_so`` on all ranks, each of which must call this."""
        ...

    def raise_if_lost(self) -> None:
        """Call this after a CPU graph. Raises ``RuntimeError`` if a sum completed without another rank."""
        ...


class SingleRankCommunicator:
    """The ``Communicator`` of a model in one process."""

    rank = 0
    size = 1
    is_capturable = True
    overlaps_sums = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` itself."""
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingSum:
        """Returns ``tensor`` itself."""
        return PendingSum([tensor])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` itself."""
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` itself."""
        return tensor

    def all_gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """Returns ``rows`` themselves."""
        del total
        return rows

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Returns ``rows`` themselves."""
        del sent, received
        return rows

    def exchange_counts(self, counts: torch.Tensor, tokens: int) -> tuple[list[int], list[int]]:
        """Returns ``counts`` for both directions."""
        del tokens
        return counts.tolist(), counts.tolist()

    def all_agree(self, is_so: bool) -> bool:
        """See ``Communicator.all_agree``."""
        return is_so

    def raise_if_lost(self) -> None:
        """Does nothing: a single rank has no others to lose."""


SINGLE_RANK = SingleRankCommunicator()


def shard(total: int, communicator: Communicator) -> slice:
    """Returns this rank's slice of ``total``. Shares are equal and in rank order; the last ones may be shorter or
    empty.
    """
    each = largest_shard_size(total, communicator)
    return slice(min(total, communicator.rank * each), min(total, (communicator.rank + 1) * each))


def largest_shard_size(total: int, communicator: Communicator) -> int:
    """Returns the size of rank 0's shard of ``total``, which is the largest."""
    return -(-total // communicator.size)


def shard_sizes(total: int, communicator: Communicator) -> list[int]:
    """Returns the size of each rank's shard of ``total``."""
    each = largest_shard_size(total, communicator)
    return [max(0, min(each, total - rank * each)) for rank in range(communicator.size)]


class GroupCoordinator:
    """The ``Communicator`` of one of several ranks. Collectives work after ``connect``.

    On the CPU, sums go through shared memory if the ranks can share some. Sums add in rank order at every position of a
    tensor: on the CPU always, on CUDA with ``ordered``. NCCL, and gloo for more than two ranks, would use an order that
    depends on the position. With two ranks the order cannot change a sum.
    """

    def __init__(self, rank: int, size: int, device: torch.device, *, ordered: bool) -> None:
        self.rank = rank
        self.size = size
        self.has_most_tokens = True
        """Whether no other rank had more tokens in the last ``exchange_counts``."""
        self._num_messages = 0
        self._sums: SharedMemorySums | None = None
        self._device = device
        self._ordered_sum = size > 2 and (ordered or device.type == "cpu")
        self._process_group: Any = None

    def connect(self, store: distributed.Store, address: str | None) -> None:
        """Connects to the other ranks. All ranks rendezvous through ``store``. ``address`` is this machine's address
        for the others, or None if all ranks are on this machine.
        """
        with reachable_at(address):
            self._process_group = make_process_group(store, self.rank, self.size, self._device, address)
            # gloo chooses its interface when the group is made, NCCL at the first collective.
            self.all_reduce(torch.zeros(1, device=self._device))
        if self._device.type == "cpu" and address is None:
            self._sums = SharedMemorySums.connect(self.rank, self.size, store, self.all_agree)

    @property
    def num_collectives(self) -> int:
        """The number of collectives that this rank has started."""
        return self._num_messages + (0 if self._sums is None else self._sums.num_sums)

    @property
    def is_capturable(self) -> bool:
        """See ``Communicator.is_capturable``."""
        return self._sums is not None

    def raise_if_lost(self) -> None:
        """See ``Communicator.raise_if_lost``."""
        if self._sums is not None:
            self._sums.raise_if_ended()

    def all_agree(self, is_so: bool) -> bool:
        """See ``Communicator.all_agree``."""
        return int(self.all_reduce(torch.tensor([float(is_so)]))) == self.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_reduce``. Ordered sums are computed in float32."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if self._sums is not None and self._sums.suits(tensor):
            self._sums.add(tensor)
            return tensor
        return self.all_reduce_async(tensor).wait()

    @property
    def overlaps_sums(self) -> bool:
        """See ``Communicator.overlaps_sums``. False with shared memory: the core that would add during a matrix product
        is the core that multiplies.
        """
        return self._sums is None

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingSum:
        """See ``Communicator.all_reduce_async``. Never uses shared memory. For an ordered sum this starts the gather,
        and ``wait`` adds. torch keeps the tensors until the sum is complete, even if nothing waits for it.
        """
        tensor = tensor.contiguous()
        self._num_messages += 1
        if not self._ordered_sum:
            return PendingSum([tensor], self._process_group.allreduce([tensor]))
        parts = list(tensor.new_empty((self.size, *tensor.shape)).unbind())
        return PendingSum(parts, self._process_group.allgather([parts], [tensor]))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.gather``."""
        self._num_messages += 1
        tensor = tensor.contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._process_group.gather([tensors] if tensors else [], [tensor], options).wait()
        return torch.cat(tensors, -1) if tensors else tensor

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.reduce_scatter``. Sums in float32, like an ordered ``all_reduce``: each rank receives all
        parts of its own rows and adds them.
        """
        if self._sums is not None and self._sums.suits(tensor):
            return self.all_reduce(tensor)[shard(len(tensor), self)]
        counts = shard_sizes(len(tensor), self)
        own = [counts[self.rank]] * self.size
        return _add_up(self.all_to_all(tensor, counts, own).split(own))

    def all_gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """See ``Communicator.all_gather``. Pads shorter shards, which are always the last ones."""
        each = largest_shard_size(total, self)
        if len(rows) < each:
            rows = torch.cat((rows, rows.new_zeros(each - len(rows), *rows.shape[1:])))
        whole = rows.new_empty(self.size * each, *rows.shape[1:])
        self._num_messages += 1
        self._process_group._allgather_base(whole, rows.contiguous()).wait()
        return whole[:total]

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """See ``Communicator.all_to_all``."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        self._num_messages += 1
        self._process_group.alltoall_base(arrived, rows.contiguous(), list(received), list(sent)).wait()
        return arrived

    def exchange_counts(self, counts: torch.Tensor, tokens: int) -> tuple[list[int], list[int]]:
        """See ``Communicator.exchange_counts``. Sends this rank's number of tokens along with each count."""
        told, once = torch.stack((counts, torch.full_like(counts, tokens)), 1), [1] * self.size
        heard = self.all_to_all(told, once, once)
        sent, received, tokens_across_ranks = torch.cat((counts[:, None], heard), 1).T.tolist()
        self.has_most_tokens = max(tokens_across_ranks) <= tokens
        return sent, received

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites the other ranks' ``tensor``, which has the same shape and dtype, with rank 0's."""
        self._num_messages += 1
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """Makes calls that wait for a dead rank fail: sums in shared memory, and on CUDA all collectives. gloo notices
        a dead rank by itself. Thread-safe.
        """
        if self._sums is not None:
            self._sums.end()
        if self._process_group is not None and self._device.type == "cuda":
            self._process_group.abort()

    def close(self) -> None:
        """Leaves the group. Aborts it first, because NCCL's orderly shutdown would wait for other ranks, which may have
        ended already.
        """
        self.abort()
        group, self._process_group = self._process_group, None
        if group is not None and self._device.type == "cpu":
            group.shutdown()


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds up ``parts`` in order, in float32. May overwrite them."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].float()
    for other in parts[1:]:
        total += other
    return total.to(parts[0].dtype)


def make_process_group(
    store: distributed.Store, rank: int, size: int, device: torch.device, address: str | None
) -> Any:
    """Makes a gloo group on the CPU, an NCCL group on CUDA. ``address`` is as in ``GroupCoordinator.connect``. Between
    machines NCCL finds the interface by itself or by NCCL_SOCKET_IFNAME. Raises ``ModelError`` if gloo cannot listen.
    """
    timeout = COLLECTIVE_TIMEOUTS[device.type]
    if device.type != "cpu":
        return distributed.ProcessGroupNCCL(store, rank, size, timeout)
    if address is None:
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupGloo._Options()  # only this private class can choose the address
    options._timeout = timeout
    try:
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
    except RuntimeError as error:
        raise ModelError(f"gloo cannot listen at {address}: {first_line(error)}.") from error
    return distributed.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def reachable_at(address: str | None) -> Iterator[None]:
    """Restricts connections made inside the context to the loopback interface, unless this machine has an ``address``.

    Both libraries read the interface from the environment. Without it they listen where the host's name resolves to.
    """
    if address is not None:
        yield
        return
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
