"""Pipeline parallelism: ``PipelineStage`` is a rank that holds some of a model's layers, and ``divide`` splits the
layers among stages (GPipe, Huang et al. 2018, forward pass only).

Hidden states flow from each stage to the next. The first stage has the embedding. The last has the head and samples.
Every stage computes steps in launch order, so messages need no tags.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import distributed

from quire_engine.distributed.communicator import make_process_group, reachable_at


def is_first(stage: "PipelineStage | None") -> bool:
    """Whether ``stage`` has the embedding. True for None, a model without a pipeline."""
    return stage is None or stage.index == 0


def is_last(stage: "PipelineStage | None") -> bool:
    """Whether ``stage`` has the last layer and the head. True for None, a model without a pipeline."""
    return stage is None or stage.index == stage.count - 1


def divide(costs: Sequence[int], count: int, last_cost: int = 0) -> list[range]:
    """Splits the indices of ``costs`` into ``count`` contiguous, nonempty parts so that the most expensive part is as
    cheap as possible. ``last_cost`` is added to the last part. Among equal splits it chooses the one with the shortest
    first parts. There must be at least ``count`` costs.
    """
    sums = [0, *accumulate(costs)]

    def fits(limit: int) -> list[range] | None:
        """Returns a split in which no part costs more than ``limit``, filled from the last part backwards, or None."""
        parts: list[range] = []
        end = len(costs)
        for part in reversed(range(count)):
            extra = last_cost if part == count - 1 else 0
            start = end - 1
            while start > part and sums[end] - sums[start - 1] + extra <= limit:
                start -= 1
            if sums[end] - sums[start] + extra > limit:
                return None
            parts.append(range(start, end))
            end = start
        return parts[::-1] if end == 0 else None

    low, high = 0, last_cost + sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    parts = fits(low)
    assert parts is not None, "fewer costs than parts"
    return parts


class PipelineStage:
    """One rank's place in a pipeline: stage ``index`` of ``count``. Uses gloo on the CPU and NCCL on CUDA. Works after
    ``connect``. ``num_messages`` counts the messages that this rank has sent or waited for.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.count = count
        self.num_messages = 0
        self._device = device
        self._process_group: Any = None
        # Messages in flight, with their memory.
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def connect(self, store: distributed.Store, address: str | None) -> None:
        """Connects to the other stages. All stages rendezvous through ``store``. ``address`` is as in
        ``GroupCoordinator.connect``.
        """
        with reachable_at(address):
            self._process_group = make_process_group(store, self.index, self.count, self._device, address)
            # NCCL chooses its interface with the first message between two ranks.
            token = torch.zeros(1, device=self._device)
            if not is_first(self):
                self.receive(token)
            if not is_last(self):
                self._wait(self._process_group.send([token], self.index + 1, 0))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fills ``tensor`` [T, hidden] with the hidden states of the previous stage, and returns it."""
        self._wait(self._process_group.recv([tensor], self.index - 1, 0))
        return tensor

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Ends this stage's part of a step: sends ``hidden`` [T, hidden] to the next stage, if there is one. Sends a
        copy, so that the next step may overwrite ``hidden``.

        Waits only for messages that must have arrived by now, since at most ``count`` steps are in flight.
        """
        if is_last(self):
            return
        self.num_messages += 1
        tensor = hidden.clone()
        self._sent.append((self._process_group.send([tensor], self.index + 1, 0), tensor))
        while len(self._sent) > self.count:
            work, _ = self._sent.popleft()
            work.wait()

    def abort(self) -> None:
        """On CUDA, makes messages that wait for a dead rank fail. gloo notices a dead rank by itself. Thread-safe."""
        if self._process_group is not None and self._device.type == "cuda":
            self._process_group.abort()

    def close(self) -> None:
        """Leaves the group. The other stages may have ended already."""
        self.abort()
        group, self._process_group = self._process_group, None
        self._sent.clear()
        if group is not None and self._device.type == "cpu":
            group.shutdown()

    def _wait(self, work: Any) -> None:
        self.num_messages += 1
        work.wait()
