"""How a model is loaded: where to, in which numbers, and which part of it. Knows no architecture."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from quire_engine.models.ranks import ALONE, Ranks

Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """``dtype`` is auto, float32, bfloat16 or float16 (see ``resolve_dtype``). ``quantization`` says what the weights
    of linear layers are held in instead. ``deterministic`` asks that each row of every result depends on its own
    sequence alone, bit for bit. Of a model that several ``ranks`` share, only this one's part is read.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "auto"
    quantization: Quantization | None = None
    deterministic: bool = False
    ranks: Ranks = ALONE
