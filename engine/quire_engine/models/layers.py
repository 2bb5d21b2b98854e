"""The parts that decoders share: weights read as layers, the norm, the gated feed-forward part. Knows no attention and
no order of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.kernels.fused import add_rms_norm, rms_norm
from quire_engine.models.linear import Linear, make_linear
from quire_engine.models.options import LoadOptions
from quire_engine.models.parallel import GatheredColumnParallelLinear, RowParallelLinear
from quire_engine.models.ranks import SINGLE_RANK, Communicator, largest_shard_size, shard
from quire_engine.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint, read as tensors and layers of one dtype, as ``options`` say: those that ranks share are read as far
    as they are this rank's.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    options: LoadOptions

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.options.device

    @property
    def communicator(self) -> Communicator:
        """The processes that share the model."""
        return self.options.communicator

    def load_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Whole tensors under each other, as one."""
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device)

    def load_row(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """The tensor at ``index`` of those that are stored under each other as ``name``, of ``shape`` in all."""
        return self.checkpoint.load_row(name, shape, index, self.dtype, self.device)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Whole linear layers of the same input as one, whose outputs lie beside each other."""
        return self._linear(names, outputs, inputs, SINGLE_RANK, bias=bias)

    def column_parallel_linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool
    ) -> Linear:
        """Linear layers of the same input as one: of the outputs of each this rank's share, beside each other."""
        return self._linear(names, outputs, inputs, self.communicator, bias=bias)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """A linear layer that takes this rank's share of the inputs. All ranks get the whole output."""
        weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator, divided=1)
        added = self.load_fused([f"{name}.bias"], [(outputs,)]) if bias and self.communicator.rank == 0 else None
        part = make_linear(weight, added, self.options)
        return part if self.communicator.size == 1 else RowParallelLinear(part, self.communicator)

    def lm_head(self, name: str, outputs: int, inputs: int, held: torch.Tensor | None) -> Linear:
        """The layer without bias that makes logits, of which each rank makes a share; rank 0 gets all of them. Its
        whole weight is ``held`` already, or is stored as ``name``.
        """
        if held is None:
            weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator)
        else:
            weight = held[shard(outputs, self.communicator)]
        if self.communicator.size == 1:
            return make_linear(weight, None, self.options)
        missing = largest_shard_size(outputs, self.communicator) - len(weight)
        padded = torch.cat((weight, weight.new_zeros(missing, inputs))) if missing else weight
        return GatheredColumnParallelLinear(make_linear(padded, None, self.options), outputs, self.communicator)

    def _linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, ranks: Communicator, *, bias: bool
    ) -> Linear:
        weight = self._load_sharded([f"{name}.weight" for name in names], [(size, inputs) for size in outputs], ranks)
        added = (
            self._load_sharded([f"{name}.bias" for name in names], [(size,) for size in outputs], ranks)
            if bias
            else None
        )
        return make_linear(weight, added, self.options)

    def _load_sharded(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: Communicator, divided: int = 0
    ) -> torch.Tensor:
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device, ranks=ranks, divided=divided)


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019) of the last dimension."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.load_fused([f"{name}.weight"], [(size,)])
        self._eps = eps

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``states``, to which ``update`` is added in place first."""
        if update is None:
            return rms_norm(states, self._weight, self._eps)
        return add_rms_norm(update, states, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The gated feed-forward part (SwiGLU, Shazeer 2020), with gate and up projections fused."""

    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, weights: Weights, name: str, hidden: int, inner: int, *, bias: bool) -> "GatedMLP":
        """The part called ``name``, of ``hidden`` inputs and outputs and ``inner`` numbers between, which the ranks
        share.
        """
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = weights.column_parallel_linear(inputs, [inner, inner], hidden, bias=bias)
        return cls(gate_up, weights.row_parallel_linear(f"{name}.down_proj", hidden, inner, bias=bias))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden]."""
        return self.down_proj(self.gate_up_proj.forward_silu_mul(states))
