"""How an engine pools prompts: plain data that its scheduler, its executor and its description share."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire_proto.pooling import Task


class PoolingType(StrEnum):
    """Which of a prompt's hidden states are pooled: the last one, the mean of all, or the first (the CLS token)."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """What a model returns for a pooled prompt: ``pooled_size`` numbers for its one ``task``. ``use_activation`` is the
    default for normalising embeddings or returning probabilities; a request may override it. ``matryoshka_dimensions``
    are the sizes that embeddings can be cut to; if empty, any size is allowed.
    """

    task: Task
    pooling_type: PoolingType
    use_activation: bool
    pooled_size: int
    matryoshka_dimensions: tuple[int, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "PoolerConfig":
        """Returns the configuration whose ``asdict`` went through JSON."""
        kinds = {"task": Task(plain["task"]), "pooling_type": PoolingType(plain["pooling_type"])}
        return cls(**{**plain, **kinds, "matryoshka_dimensions": tuple(plain["matryoshka_dimensions"])})

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether all of a prompt is computed even if part of it is cached, because pooling needs hidden states before
        the last one, which cached blocks do not hold. The prompt's own blocks are cached all the same.
        """
        return self.pooling_type is not PoolingType.LAST
