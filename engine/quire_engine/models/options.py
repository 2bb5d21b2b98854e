"""How a model is loaded: where to, in which numbers, and which part of it."""

from dataclasses import dataclass, field

import torch

from quire_engine.config import ExecutorConfig
from quire_engine.models.ranks import SINGLE_RANK, Communicator


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """``config`` says the dtype, the quantization and whether to be deterministic; its ``device`` is resolved already,
    as ``device``. Of a model that several ``ranks`` share, only this one's part is read.
    """

    config: ExecutorConfig = field(default_factory=ExecutorConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    communicator: Communicator = SINGLE_RANK
