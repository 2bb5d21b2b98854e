"""``RankGroup``: everything that connects one rank of a model to the others. The ranks are a grid: those that share the
layers of one stage, and those that have the same part of every stage.
"""

from pathlib import Path

import torch

from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, TensorParallelGroup
from quire_engine.distributed.pipeline import PipelineStage


class RankGroup:
    """The links of ``rank``, on ``device``. Rank ``stage * tensor_size + part`` has that part of the layers of that
    stage, of ``num_stages``. They work after ``connect``.

    ``communicator`` connects the ranks that share the layers of one stage, and ``stage`` is this rank's; None without a
    pipeline.
    """

    def __init__(self, rank: int, tensor_size: int, num_stages: int, device: torch.device, *, ordered: bool) -> None:
        self.num_stages = num_stages
        index, part = divmod(rank, tensor_size)
        self._stores = f"stage-{index}", f"part-{part}"
        self._tensor = TensorParallelGroup(part, tensor_size, device, ordered=ordered) if tensor_size > 1 else None
        self.communicator: Communicator = self._tensor or SINGLE_RANK
        self.stage = PipelineStage(index, num_stages, device) if num_stages > 1 else None

    @property
    def num_exchanges(self) -> int:
        """Collectives that this rank has started, and messages that it has sent or waited for."""
        collectives = 0 if self._tensor is None else self._tensor.num_collectives
        return collectives + (0 if self.stage is None else self.stage.num_messages)

    def connect(self, folder: Path) -> None:
        """Connects to the other ranks, all of which rendezvous through files in ``folder``."""
        for link, store in zip((self._tensor, self.stage), self._stores, strict=True):
            if link is not None:
                link.connect(folder / store)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` on the other ranks of the stage with that of their first one."""
        if self._tensor is not None:
            self._tensor.broadcast(tensor)

    def abort(self) -> None:
        """Fails what waits for a rank that has died. May be called from any thread."""
        for link in (self._tensor, self.stage):
            if link is not None:
                link.abort()

    def close(self) -> None:
        """Leaves the groups. The other ranks may have ended already."""
        for link in (self._tensor, self.stage):
            if link is not None:
                link.close()
