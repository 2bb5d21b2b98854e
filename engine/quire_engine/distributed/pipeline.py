"""The stages of a pipeline: ranks that each hold some of a model's layers, as ``PipelineStage``, and how layers are
divided among them (GPipe, Huang et al. 2018; without training only the forward pass is left).

The stages are a ring. Hidden states go from each stage to the next, and the rows that logits are made of from the last
back to the first, which has the embedding and the head: it knows the tokens and samples them. A stage computes one
step after the other, in the order of their launch, so what arrives needs no name.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import distributed

from quire_engine.device.accelerator import upload
from quire_engine.distributed.communicator import make_process_group, reachable_at


def is_first(stage: "PipelineStage | None") -> bool:
    """Whether it has the embedding and the head; so has a model in one piece, which has no stage."""
    return stage is None or stage.index == 0


def is_last(stage: "PipelineStage | None") -> bool:
    """Whether it has the last layer; so has a model in one piece."""
    return stage is None or stage.index == stage.count - 1


def divide(costs: Sequence[int], count: int, first_cost: int = 0) -> list[range]:
    """The indices of ``costs`` in ``count`` contiguous parts, none empty, whose dearest is as cheap as can be;
    ``first_cost`` is added to the first. Of equal divisions the one with the shortest first parts. There must be as
    many costs as parts.
    """
    sums = [0, *accumulate(costs)]

    def fits(limit: int) -> list[range] | None:
        """A division of which no part costs more than ``limit``, filled from the last part on."""
        parts: list[range] = []
        end = len(costs)
        for part in reversed(range(count)):
            extra = first_cost if part == 0 else 0
            start = end - 1
            while start > part and sums[end] - sums[start - 1] + extra <= limit:
                start -= 1
            if sums[end] - sums[start] + extra > limit:
                return None
            parts.append(range(start, end))
            end = start
        return parts[::-1] if end == 0 else None

    low, high = 0, first_cost + sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    parts = fits(low)
    assert parts is not None, "fewer costs than parts"
    return parts


class PipelineStage:
    """The place of one rank, with gloo on the CPU and NCCL on CUDA: stage ``index`` of ``count``. Works after
    ``connect``.

    ``num_messages`` counts those that this rank has sent or waited for. There is a group for each direction: with two
    stages both go between the same two ranks, and NCCL carries out what two ranks exchange in one group in one order.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.count = count
        self.num_messages = 0
        self._device = device
        self._forward: Any = None
        self._back: Any = None
        # Messages on their way, with their memory; and what ``pass_on`` has returned, with the rows that will be there.
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._awaited: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def connect(self, store: distributed.Store, address: str | None) -> None:
        """Connects to the other stages, all of which rendezvous through ``store``. ``address`` as in
        ``GroupCoordinator.connect``.
        """
        with reachable_at(address):
            self._forward, self._back = (
                make_process_group(distributed.PrefixStore(name, store), self.index, self.count, self._device, address)
                for name in ("forward", "back")
            )
            # NCCL chooses its interface with the first message between two ranks.
            token = torch.zeros(1, device=self._device)
            if not is_first(self):
                self._wait(self._forward.recv([token], self.index - 1, 0))
            if is_last(self):
                self._wait(self._back.send([token], 0, 0))
            else:
                self._wait(self._forward.send([token], self.index + 1, 0))
            if is_first(self):
                self._wait(self._back.recv([token], self.count - 1, 0))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fills ``tensor`` [T, hidden] with the hidden states of the stage before, and returns it."""
        self._wait(self._forward.recv([tensor], self.index - 1, 0))
        return tensor

    def pass_on(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Ends this stage's part of a step, whose hidden states are ``hidden`` [T, hidden]: sends them to the next
        stage, or from the last one the ``rows`` [R] of them to the first. Returns what ``complete`` takes. What is sent
        is copied, so that the next step may overwrite ``hidden``.
        """
        if not is_last(self):
            self._send(self._forward, self.index + 1, hidden.clone())
        elif len(rows):
            self._send(self._back, 0, hidden.index_select(0, upload(rows, hidden.device)))
        if not is_first(self):
            return hidden
        returned = torch.empty_like(hidden)
        if len(rows):
            self._awaited.append((returned, rows))
        return returned

    def complete(self, hidden: torch.Tensor) -> None:
        """On the first stage, waits until the rows of a tensor that ``pass_on`` has returned are there. Steps are
        completed in their order, or left out.
        """
        if not any(each is hidden for each, _ in self._awaited):
            return  # it was completed for other rows
        completed: torch.Tensor | None = None
        while completed is not hidden:
            completed, rows = self._awaited.popleft()
            arrived = completed.new_empty(len(rows), completed.shape[1])
            self._wait(self._back.recv([arrived], self.count - 1, 0))
            completed.index_copy_(0, upload(rows, completed.device), arrived)

    def abort(self) -> None:
        """On CUDA, fails messages that wait for a rank that has died; gloo notices that by itself. May be called from
        any thread.
        """
        for group in (self._forward, self._back):
            if group is not None and self._device.type == "cuda":
                group.abort()

    def close(self) -> None:
        """Leaves the ring. The other stages may have ended already."""
        self.abort()
        groups, self._forward, self._back = (self._forward, self._back), None, None
        self._sent.clear()
        for group in groups:
            if group is not None and self._device.type == "cpu":
                group.shutdown()

    def _wait(self, work: Any) -> None:
        self.num_messages += 1
        work.wait()

    def _send(self, group: Any, target: int, tensor: torch.Tensor) -> None:
        """Sends without waiting, but for messages that must have arrived by now: no more steps are in flight than there
        are stages.
        """
        self.num_messages += 1
        self._sent.append((group.send([tensor], target, 0), tensor))
        while len(self._sent) > self.count:
            work, _ = self._sent.popleft()
            work.wait()
