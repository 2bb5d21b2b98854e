"""The parts that decoders share: weights read as layers, the norm, the gated feed-forward part. Knows no attention and
no order of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.kernels.fused import add_rms_norm, rms_norm
from quire_engine.models.linear import Linear, make_linear
from quire_engine.models.options import LoadOptions
from quire_engine.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint, read as tensors and layers of one dtype, as ``options`` say."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    options: LoadOptions

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.options.device

    def fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Tensors under each other, as one."""
        return self.checkpoint.fused(names, shapes, self.dtype, self.device)

    def one_of(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """The tensor at ``index`` of those that are stored under each other as ``name``, of ``shape`` in all."""
        return self.checkpoint.one_of(name, shape, index, self.dtype, self.device)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Linear layers of the same input as one, whose outputs lie beside each other."""
        weight = self.fused([f"{name}.weight" for name in names], [(size, inputs) for size in outputs])
        added = self.fused([f"{name}.bias" for name in names], [(size,) for size in outputs]) if bias else None
        return make_linear(weight, added, self.options)


class Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019) of the last dimension."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.fused([f"{name}.weight"], [(size,)])
        self._eps = eps

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``states``, to which ``update`` is added in place first."""
        if update is None:
            return rms_norm(states, self._weight, self._eps)
        return add_rms_norm(update, states, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The gated feed-forward part (SwiGLU, Shazeer 2020), with gate and up projections fused."""

    gate_up: Linear
    down: Linear

    @classmethod
    def read(cls, weights: Weights, name: str, hidden: int, inner: int, *, bias: bool) -> "FeedForward":
        """The part called ``name``, of ``hidden`` inputs and outputs and ``inner`` numbers between."""
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = weights.linear(inputs, [inner, inner], hidden, bias=bias)
        return cls(gate_up, weights.linear([f"{name}.down_proj"], [hidden], inner, bias=bias))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up.gated(states))
