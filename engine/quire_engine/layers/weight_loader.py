"""``WeightLoader``: a checkpoint's tensors as the layers of a model, divided among the ranks as Megatron-LM does
(Shoeybi et al. 2019).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, largest_shard_size, shard
from quire_engine.layers.linear import GatheredColumnParallelLinear, Linear, RowParallelLinear, make_linear


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Loads a checkpoint's tensors and linear layers in one ``dtype``, held as ``options`` say. Of a layer that ranks
    share, only this rank's shard is read.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    options: LoadOptions

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.options.device

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the model."""
        return self.options.communicator

    def load_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The named tensors, whole, concatenated in their first dimension."""
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device)

    def load_row(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """``name[index]`` of a stored tensor of ``shape``; the rest of it is not read."""
        return self.checkpoint.load_row(name, shape, index, self.dtype, self.device)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Unsharded linear layers of the same input, fused into one: their outputs are concatenated."""
        return self._linear(names, outputs, inputs, SINGLE_RANK, bias=bias)

    def column_parallel_linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool
    ) -> Linear:
        """Linear layers of the same input, fused into one: this rank's shard of each layer's outputs, concatenated."""
        return self._linear(names, outputs, inputs, self.communicator, bias=bias)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """A linear layer that takes this rank's shard of the inputs. All ranks get the whole output."""
        weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator, dim=1)
        added = self.load_fused([f"{name}.bias"], [(outputs,)]) if bias and self.communicator.rank == 0 else None
        part = make_linear(weight, added, self.options)
        return part if self.communicator.size == 1 else RowParallelLinear(part, self.communicator)

    def lm_head(self, name: str, outputs: int, inputs: int, tied_weight: torch.Tensor | None) -> Linear:
        """The layer without bias that computes logits: each rank a shard of them, and rank 0 gathers all. The whole
        weight is ``tied_weight`` where embeddings are tied, else it is stored as ``name``.
        """
        if tied_weight is None:
            weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator)
        else:
            weight = tied_weight[shard(outputs, self.communicator)]
        if self.communicator.size == 1:
            return make_linear(weight, None, self.options)
        num_padding = largest_shard_size(outputs, self.communicator) - len(weight)
        padded = torch.cat((weight, weight.new_zeros(num_padding, inputs))) if num_padding else weight
        return GatheredColumnParallelLinear(make_linear(padded, None, self.options), outputs, self.communicator)

    def _linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, communicator: Communicator, *, bias: bool
    ) -> Linear:
        weight = self._load_sharded(
            [f"{name}.weight" for name in names], [(size, inputs) for size in outputs], communicator
        )
        added = (
            self._load_sharded([f"{name}.bias" for name in names], [(size,) for size in outputs], communicator)
            if bias
            else None
        )
        return make_linear(weight, added, self.options)

    def _load_sharded(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], communicator: Communicator, dim: int = 0
    ) -> torch.Tensor:
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device, communicator=communicator, dim=dim)
