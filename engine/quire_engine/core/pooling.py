"""How an engine pools prompts: plain data that its scheduler, its executor and its description share."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire_proto.pooling import Task


class PoolingType(StrEnum):
    """Which of a prompt's hidden states are pooled: the last one, the mean of all, or the first, which stands for all
    in models that put a token of their own there.
    """

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """What a model makes of a prompt that is pooled: for its one ``task``, ``pooled_size`` numbers, normalised or as
    probabilities if ``use_activation``, unless a request says otherwise. ``matryoshka_dimensions`` are those that
    embeddings can be cut to, where the model's folder lists some; else any number of them.
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
        """Whether all of a prompt is computed, whatever of it is cached: hidden states before the last are needed, and
        cached blocks do not hold them. Its own blocks are cached all the same.
        """
        return self.pooling_type is not PoolingType.LAST
