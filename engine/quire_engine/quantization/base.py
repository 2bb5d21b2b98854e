"""``LinearMethod``: which tensors of a checkpoint a linear layer has, how they are divided among ranks and merged, and
how they are held and multiplied. The words are those of vLLM and SGLang, whose layers are made by a
``LinearMethodBase`` that a ``QuantizationConfig`` chooses.

To add a quantisation scheme, write a file of this package with one or two methods. ``tensor_names`` names the tensors
of a layer, ``read`` and ``read_expert`` read this rank's part, and ``pack`` makes the ``Linear``; for checkpoints with
plain weights ``DenseMethod`` has all but ``pack``. A head's method also has ``pack_embedding`` and ``pack_tied``. Then
name it in ``schemes.py``: in ``SCHEMES`` for a value of ``--quantization``, in ``STORED_SCHEMES`` for a checkpoint's
``quant_method``. Test it against the dequantised weights, as ``tests/unit/engine/quantization/test_int4.py`` does;
``tests/bench/perplexity.py`` measures it without a change.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional as F

from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator
from quire_engine.kernels.ops import silu_mul

WeightT = TypeVar("WeightT")
Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Rows of a table [vocabulary, hidden], however it is held: integers [T] -> [T, hidden] of the model's dtype. Raises
``IndexError`` for an id beyond the table.
"""


class Linear(Protocol):
    """``x @ weight.T + bias`` for a weight [out, in] that never changes, however it is held."""

    @property
    def in_features(self) -> int:
        """Numbers of an input row."""
        ...

    @property
    def out_features(self) -> int:
        """Numbers of an output row."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out], both of the model's dtype and device."""
        ...


Activation = Callable[[torch.Tensor], torch.Tensor]
"""What a gated network makes of the outputs [T, 2F] of its gate and up projections, [T, F]: ``silu_mul`` or another
function of ``kernels.ops``.
"""


def with_activation(layer: Linear, activation: Activation) -> Activation:
    """Returns ``activation(layer(x))`` as one function of ``x``.

    A layer that takes ``silu_mul`` over, in one pass over its outputs, has it as the method ``forward_silu_mul``.
    """
    fused: Activation | None = getattr(layer, "forward_silu_mul", None)
    if fused is not None and activation is silu_mul:
        return fused
    return lambda x: activation(layer(x))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Stored linear layers that are fused into one, as their outputs are concatenated, and how ranks share it.

    ``names``: of the layers in the checkpoint, with ``outputs`` each and the same ``inputs``. Of each, a rank of
    ``communicator`` holds a shard of its outputs (``dim`` 0, column parallel) or of its inputs (``dim`` 1, row
    parallel).
    """

    names: Sequence[str]
    outputs: Sequence[int]
    inputs: int
    dim: int = 0
    communicator: Communicator = SINGLE_RANK


class LinearMethod(ABC, Generic[WeightT]):
    """A way to hold linear layers: ``read`` finds a layer's tensors in a checkpoint, ``pack`` makes the layer of them.

    ``WeightT`` is what lies between: a dense weight where a checkpoint has one (``DenseMethod``), or the weights and
    scales that a quantised checkpoint stores. It has the rows of all fused layers, and only this rank's shard.
    Methods raise ``ModelError``.
    """

    def __init__(self, options: LoadOptions, dtype: torch.dtype) -> None:
        self.options = options
        self.dtype = dtype

    @abstractmethod
    def tensor_names(self, layer: str) -> Sequence[str]:
        """The tensors that a stored layer has, without its bias."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> WeightT:
        """This rank's part of the fused layers."""

    @abstractmethod
    def read_expert(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: int) -> WeightT:
        """``name[index]`` of a stored tensor [experts, out, in], without reading the other experts."""

    @abstractmethod
    def pack(self, weight: WeightT, bias: torch.Tensor | None) -> Linear:
        """The layer of a weight that was read, and a ``bias`` [out] of the model's dtype. Keeps no reference to
        ``weight`` where it holds another form of it.
        """


class DenseMethod(LinearMethod[torch.Tensor]):
    """A ``LinearMethod`` for checkpoints that store the weight [out, in] of a layer as numbers."""

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``."""
        return (f"{layer}.weight",)

    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> torch.Tensor:
        """See ``LinearMethod.read``: the weight in the model's dtype."""
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
        """The embedding of ``table`` [vocabulary, hidden], which no head shares."""
        return partial(F.embedding, weight=table)

    def pack_tied(self, table: torch.Tensor) -> tuple[Embedding, Linear]:
        """The embedding and the head that are both ``table`` [vocabulary, hidden]."""
        return partial(F.embedding, weight=table), self.pack(table, None)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What holds the layers of a model: ``linear`` those of attention and feed-forward parts, ``head`` the head and the
    embedding, ``router`` the routers of mixtures of experts, which are small, and whose rounding would change the
    choice of experts.
    """

    linear: LinearMethod[Any]
    head: DenseMethod
    router: DenseMethod
