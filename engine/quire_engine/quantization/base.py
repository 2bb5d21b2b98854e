"""``LinearMethod``: which tensors of a checkpoint make a linear layer, how ranks share and fuse them, and how they are
stored in memory and multiplied. The names follow vLLM and SGLang, where a ``QuantizationConfig`` chooses the
``LinearMethodBase`` of a layer.

To add a quantization scheme, write a file in this package with one or two methods. ``tensor_names`` names the tensors
of a layer, ``read`` and ``read_expert`` read this rank's part, and ``pack`` makes the ``Linear``. For checkpoints with
plain weights, ``DenseMethod`` has all of these except ``pack``. The method of a head also has ``pack_embedding`` and
``pack_tied``.

Then name the scheme in ``schemes.py``: in ``SCHEMES`` for a value of ``--quantization``, in ``STORED_SCHEMES`` for a
checkpoint's ``quant_method``. Test it against the dequantized weights, as
``tests/unit/engine/quantization/test_int4.py`` does. ``tests/bench/perplexity.py`` measures it without changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator
from quire_engine.kernels.ops import embed, silu_mul

WeightT = TypeVar("WeightT")
Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Looks up rows of a table [vocabulary, hidden] in any storage format: integers [T] -> [T, hidden] in the model's
dtype. Raises ``IndexError`` for an id beyond the table.
"""


class Linear(Protocol):
    """Computes ``x @ weight.T + bias`` for a constant weight [out, in] in any storage format."""

    @property
    def in_features(self) -> int:
        """The length of an input row."""
        ...

    @property
    def out_features(self) -> int:
        """The length of an output row."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [T, in] to [T, out], both in the model's dtype on its device."""
        ...


Activation = Callable[[torch.Tensor], torch.Tensor]
"""The activation of a gated network: maps the outputs [T, 2F] of the gate and up projections to [T, F]. ``silu_mul`` or
another function of ``kernels.ops``.
"""


def with_activation(layer: Linear, activation: Activation) -> Activation:
    """Returns ``activation(layer(x))`` as one function of ``x``.

    A layer that can apply ``silu_mul`` itself, in one pass over its outputs, has the method ``forward_silu_mul``.
    """
    fused: Activation | None = getattr(layer, "forward_silu_mul", None)
    if fused is not None and activation is silu_mul:
        return fused
    return lambda x: activation(layer(x))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Stored linear layers that are fused into one by concatenating their outputs, and how ranks share the result.

    ``names`` are the layers in the checkpoint. They have the same ``inputs`` and ``outputs`` each. A rank of
    ``communicator`` holds a shard of each layer's outputs (``dim`` 0, column parallel) or inputs (``dim`` 1, row
    parallel).
    """

    names: Sequence[str]
    outputs: Sequence[int]
    inputs: int
    dim: int = 0
    communicator: Communicator = SINGLE_RANK


class LinearMethod(ABC, Generic[WeightT]):
    """A storage format of linear layers: ``read`` finds a layer's tensors in a checkpoint, and ``pack`` makes the
    layer.

    ``WeightT`` is the form between these steps: a dense weight (``DenseMethod``), or the weights and scales of a
    quantized checkpoint. It has the rows of all fused layers, and only this rank's shard. Methods raise ``ModelError``.
    """

    def __init__(self, options: LoadOptions, dtype: torch.dtype) -> None:
        self.options = options
        self.dtype = dtype

    @abstractmethod
    def tensor_names(self, layer: str) -> Sequence[str]:
        """Returns the names of a stored layer's tensors, without its bias."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> WeightT:
        """Reads this rank's part of the fused layers."""

    @abstractmethod
    def read_expert(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: int) -> WeightT:
        """Reads ``name[index]`` of a stored tensor [experts, out, in], without the other experts."""

    @abstractmethod
    def pack(self, weight: WeightT, bias: torch.Tensor | None) -> Linear:
        """Makes the layer from a weight that was read and a ``bias`` [out] in the model's dtype. Keeps no reference to
        ``weight`` if it stores it in another form.
        """


class DenseMethod(LinearMethod[torch.Tensor]):
    """A ``LinearMethod`` for checkpoints that store a layer's weight [out, in] as plain numbers."""

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``."""
        return (f"{layer}.weight",)

    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> torch.Tensor:
        """See ``LinearMethod.read``. Returns the weight in the model's dtype."""
        return checkpoint.load_fused(
            [f"{name}.weight" for name in spec.names],
            [(size, spec.inputs) for size in spec.outputs],
            self.dtype,
            self.options.device,
            communicator=spec.communicator,
            dim=spec.dim,
        )

    def read_expert(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """See ``LinearMethod.read_expert``."""
        return checkpoint.load_row(name, shape, index, self.dtype, self.options.device)

    def pack_embedding(self, table: torch.Tensor) -> Embedding:
        """Makes an embedding from ``table`` [vocabulary, hidden], which no head shares."""
        return partial(embed, table)

    def pack_tied(self, table: torch.Tensor) -> tuple[Embedding, Linear]:
        """Makes the embedding and the head that share ``table`` [vocabulary, hidden]."""
        return partial(embed, table), self.pack(table, None)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The methods for the layers of a model: ``linear`` for attention and feed-forward layers, ``head`` for the head
    and the embedding, ``router`` for MoE routers. Routers are small, and rounding them would change the choice of
    experts.
    """

    linear: LinearMethod[Any]
    head: DenseMethod
    router: DenseMethod
