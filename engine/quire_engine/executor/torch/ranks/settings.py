"""``RankSettings``: all that another rank's process has to know, as plain values."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire_engine.executor.torch.parts import Parts, load_parts
from quire_engine.executor.torch.ranks.group import TensorGroup
from quire_engine.models.base import ModelConfig
from quire_engine.models.config import DecoderConfig
from quire_engine.models.options import LoadOptions, Quantization
from quire_engine.models.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RankSettings:
    """``size`` ranks with so many ``threads`` each. ``store`` is the file through which they find each other.
    ``device`` is what rank 0 runs on; another rank's GPU is that of its number. The rest is as in
    ``TorchExecutor.load``.
    """

    size: int
    threads: int
    folder: Path
    config: ModelConfig
    device: str
    dtype: str
    quantization: Quantization | None
    deterministic: bool
    block_size: int
    max_model_len: int | None
    attention: str
    graph_sizes: Sequence[int]
    store: Path = Path()
    log_level: int = 0

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank."""
        device = torch.device(self.device)
        return device if device.type == "cpu" or self.size == 1 else torch.device(device.type, rank)

    def group_of(self, rank: int) -> TensorGroup:
        """A rank's end of the group, not connected yet."""
        return TensorGroup(rank, self.size, self.device_of(rank), ordered=self.deterministic)

    def load(self, ranks: Ranks) -> Parts:
        """Loads the part of one of ``ranks``. Raises ``ModelError``."""
        return load_parts(
            self.config,
            self.folder,
            LoadOptions(self.device_of(ranks.rank), self.dtype, self.quantization, self.deterministic, ranks),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            attention=self.attention,
            graph_sizes=self.graph_sizes,
        )

    def to_plain(self) -> dict[str, Any]:
        """As values that JSON has."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "store": str(self.store), "folder": str(self.folder), "config": asdict(self.config)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "RankSettings":
        """The inverse of ``to_plain``, for a model with own code."""
        paths = {name: Path(values[name]) for name in ("store", "folder")}
        return cls(**{**values, **paths, "config": DecoderConfig.from_plain(values["config"])})
