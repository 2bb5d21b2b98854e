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
    """

    def __init__(self, rank: int, tensor_size: int, num_stages: int, device: torch.device, *, ordered: bool) -> None:
        self.num_stages = num_stages
        self._stage, self._part = divmod(rank, tensor_size)
        self._tensor = (
            TensorParallelGroup(self._part, tensor_size, device, ordered=ordered) if tensor_size > 1 else None
        )
        self._pipeline = PipelineStage(self._stage, num_stages, device) if num_stages > 1 else None

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the layers of this one's stage."""
        return self._tensor or SINGLE_RANK

    @property
    def stage(self) -> PipelineStage | None:
        """This rank's stage; None without a pipeline."""
        return self._pipeline

    @property
    def num_exchanges(self) -> int:
        """Collectives that this rank has started, and messages that it has sent or waited for."""
        collectives = 0 if self._tensor is None else self._tensor.num_collectives
        return collectives + (0 if self._pipeline is None else self._pipeline.num_messages)

    def connect(self, folder: Path) -> None:
        """Connects to the other ranks, all of which rendezvous through files in ``folder``."""
        if self._tensor is not None:
            self._tensor.connect(folder / f"stage-{self._stage}")
        if self._pipeline is not None:
            self._pipeline.connect(folder / f"part-{self._part}")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` on the other ranks of the stage with that of their first one."""
        if self._tensor is not None:
            self._tensor.broadcast(tensor)

    def abort(self) -> None:
        """On CUDA, fails what waits for a rank that has died. May be called from any thread."""
        for link in (self._tensor, self._pipeline):
            if link is not None:
                link.abort()

    def close(self) -> None:
        """Leaves the groups. The other ranks may have ended already."""
        for link in (self._tensor, self._pipeline):
            if link is not None:
                link.close()
