"""The weights of a folder for transformers: tensors that are read when it asks for them.

transformers loads each tensor by ``tensor[...]`` on its own threads, and converts and places them one at a time. A load
therefore needs the memory of the weights and of a few tensors.
"""

from types import EllipsisType
from typing import Protocol

import torch

from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.quantization.mxfp4 import BLOCKS, SCALES, is_mxfp4, load_mxfp4, mxfp4_shape


class LazyTensor(Protocol):
    """A tensor that is read by ``tensor[...]``."""

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Returns the whole tensor. Raises ``ModelError``."""
        ...


class _Stored:
    """A tensor as it is stored."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        return self._checkpoint.load_part(self._name)


class _Mxfp4Experts:
    """The matrices of a layer's experts [experts, in, out], which are stored in MXFP4 as [experts, out, in]."""

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
        self._checkpoint, self._name, self._dtype = checkpoint, name, dtype

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        experts, outputs, inputs = mxfp4_shape(self._checkpoint, self._name)
        matrices = torch.empty(experts, inputs, outputs, dtype=self._dtype)
        for expert in range(experts):  # one at a time: unpacked, an expert is many times larger
            matrices[expert] = load_mxfp4(self._checkpoint, self._name, expert, self._dtype).T
        return matrices


def lazy_state_dict(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Returns all tensors by name. Tensors in MXFP4 are converted to ``dtype``."""
    tensors: dict[str, LazyTensor] = {}
    for name in checkpoint.names:
        base = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if base != name and is_mxfp4(checkpoint, base):
            tensors[base] = _Mxfp4Experts(checkpoint, base, dtype)
        else:
            tensors[name] = _Stored(checkpoint, name)
    return tensors
