"""``RankSettings``: all that another rank's process has to know, as plain values."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire_engine.config import EngineArgs
from quire_engine.executor.torch.parts import LoadedModel, load_model_and_attention
from quire_engine.executor.torch.ranks.group import TensorParallelGroup
from quire_engine.models.config import DecoderConfig, ModelConfig
from quire_engine.models.ranks import Communicator


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The ``engine``'s settings and its model's ``config``, for ranks with so many ``threads`` each. ``device`` is what
    rank 0 runs on; another rank's GPU is that of its number. ``store`` is the file through which they find each other.
    """

    engine: EngineArgs
    config: ModelConfig
    device: str
    threads: int
    store: Path = Path()
    log_level: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.engine.tensor_parallel_size

    def device_for(self, rank: int) -> torch.device:
        """The device of a rank."""
        device = torch.device(self.device)
        return device if device.type == "cpu" or self.size == 1 else torch.device(device.type, rank)

    def make_group(self, rank: int) -> TensorParallelGroup:
        """A rank's end of the group, not connected yet."""
        return TensorParallelGroup(rank, self.size, self.device_for(rank), ordered=self.engine.deterministic)

    def load(self, ranks: Communicator) -> LoadedModel:
        """Loads the part of one of ``ranks``. Raises ``ModelError``."""
        return load_model_and_attention(self.engine, self.config, self.device_for(ranks.rank), ranks)

    def to_plain(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {
            "engine": self.engine.model_dump(mode="json", include=set(EngineArgs.model_fields)),
            "config": asdict(self.config),
            "device": self.device,
            "threads": self.threads,
            "store": str(self.store),
            "log_level": self.log_level,
        }

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "RankSettings":
        """The inverse of ``to_plain``, for a model with own code."""
        engine, config = EngineArgs.model_validate(values["engine"]), DecoderConfig.from_plain(values["config"])
        return cls(**{**values, "engine": engine, "config": config, "store": Path(values["store"])})
