"""The stages of a pipeline: ranks that each hold some of a model's layers, as ``PipelineStage``, and how layers are
divided among them (GPipe, Huang et al. 2018; without training only the forward pass is left).

Hidden states go from each stage to the next. The first has the embedding and the last the head: it samples. A stage
computes one step after the other, in the order of their launch, so what arrives needs no name.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import distributed

from quire_engine.distributed.communicator import make_process_group, reachable_at


def is_first(stage: "PipelineStage | None") -> bool:
    """Whether it has the embedding; so has a model in one piece, which has no stage."""
    return stage is None or stage.index == 0


def is_last(stage: "PipelineStage | None") -> bool:
    """Whether it has the last layer and the head; so has a model in one piece."""
    return stage is None or stage.index == stage.count - 1


def divide(costs: Sequence[int], count: int, last_cost: int = 0) -> list[range]:
    """The indices of ``costs`` in ``count`` contiguous parts, none empty, whose dearest is as cheap as can be;
    ``last_cost`` is added to the last. Of equal divisions the one with the shortest first parts. There must be as
    many costs as parts.
    """
    sums = [0, *accumulate(costs)]

    def fits(limit: int) -> list[range] | None:
        """A division of which no part costs more than ``limit``, filled from the last part on."""
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
    """The place of one rank, with gloo on the CPU and NCCL on CUDA: stage ``index`` of ``count``. Works after
    ``connect``.

    ``num_messages`` counts those that this rank has sent or waited for.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.count = count
        self.num_messages = 0
        self._device = device
        self._process_group: Any = None
        # Messages on their way, with their memory.
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def connect(self, store: distributed.Store, address: str | None) -> None:
        """Connects to the other stages, all of which rendezvous through ``store``. ``address`` as in
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
        """Fills ``tensor`` [T, hidden] with the hidden states of the stage before, and returns it."""
        self._wait(self._process_group.recv([tensor], self.index - 1, 0))
        return tensor

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Ends this stage's part of a step, whose hidden states are ``hidden`` [T, hidden]: sends them to the next
        stage, if there is one. What is sent is copied, so that the next step may overwrite ``hidden``.

        Does not wait, but for messages that must have arrived by now: no more steps are in flight than there are
        stages.
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
        """On CUDA, fails messages that wait for a rank that has died; gloo notices that by itself. May be called from
        any thread.
        """
        if self._process_group is not None and self._device.type == "cuda":
            self._process_group.abort()

    def close(self) -> None:
        """Leaves the other stages, which may have ended already."""
        self.abort()
        group, self._process_group = self._process_group, None
        self._sent.clear()
        if group is not None and self._device.type == "cpu":
            group.shutdown()

    def _wait(self, work: Any) -> None:
        self.num_messages += 1
        work.wait()
