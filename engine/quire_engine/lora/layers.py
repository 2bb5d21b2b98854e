"""Linear layers with adapters. ``LoRALinear`` adds the output of each row's adapter to the output of its base layer,
and ``LoRALayers`` has all such layers of a model.

Adapters in use are in *slots*: stacked matrices of one size, padded to the largest rank, so that they never move. A
step's rows are grouped by slot once, and every layer adds each group's two small products: on the CPU in one kernel
call, elsewhere in torch.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from quire_engine.distributed.communicator import Communicator, shard
from quire_engine.kernels.lora_kernel import LoRAKernel, LoRAPlan
from quire_engine.kernels.ops import silu_mul
from quire_engine.lora.adapter import LoRAWeights
from quire_engine.quantization.base import LayerSpec, Linear, with_activation


class LoRALayers:
    """All layers of a model, or of a rank's shard of it, that adapters may change. Create it before the model, whose
    linear layers are wrapped as they are loaded.

    ``is_active`` says whether the next forward pass uses any adapter. With the compiled kernel the rows and their slots
    are in ``plan``. Otherwise ``groups`` has the rows of each slot, as a range or as indices.
    """

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.is_active = False
        self.plan = LoRAPlan() if LoRAKernel.suits(dtype, device) else None
        self.groups: Sequence[tuple[int, slice | torch.Tensor]] = ()
        self._layers: list[LoRALinear] = []

    def wrap(self, base: Linear, spec: LayerSpec) -> "LoRALinear":
        """Returns ``base``, which was read for ``spec``, with slots for adapters."""
        layer = LoRALinear(base, spec, self)
        self._layers.append(layer)
        return layer

    def shard(self, weights: Mapping[str, LoRAWeights]) -> "ShardedAdapter":
        """Returns this rank's part of an adapter in the model's dtype, on the host."""
        return [layer.shard(weights) for layer in self._layers]

    def set_slot(self, slot: int, adapter: "ShardedAdapter") -> None:
        """Copies an adapter into a slot."""
        for layer, parts in zip(self._layers, adapter, strict=True):
            layer.set_slot(slot, parts)

    def set_batch(self, slots: torch.Tensor) -> None:
        """Sets the slots of the rows of the next forward pass, [T] int64 on the host, -1 for rows without an adapter;
        empty if no row has one.
        """
        self.is_active = bool((slots >= 0).any())
        if not self.is_active:
            return
        if self.plan is not None:
            self.plan.set(slots)
        else:
            self.groups = [
                (slot, _range_or_indices((slots == slot).nonzero().flatten(), self.device))
                for slot in slots.unique().tolist()
                if slot >= 0
            ]


def _range_or_indices(rows: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """Returns increasing indices as a range if they have no gaps, because a view costs less than a gather."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(device)


LayerParts = Sequence[LoRAWeights | None]
"""What an adapter adds to each part of a fused layer; None for a part that it does not change."""
ShardedAdapter = Sequence[LayerParts]
"""An adapter's part of each layer, in the order of ``LoRALayers``."""


class LoRALinear:
    """A ``Linear`` of one or more fused parts, each of which an adapter may change.

    ``_a`` [slots, parts * max_rank, in] and ``_b`` [slots, max_rank, out] are the adapters' matrices. The columns of
    ``_b`` are divided among the parts like the outputs. An adapter of rank r uses the first r rows of ``_a`` for each
    part that it changes, one part after the other.

    If ranks share the layer, each computes its part of the sum like the base layer: from its inputs if it is row
    parallel, otherwise for its outputs.
    """

    def __init__(self, base: Linear, spec: LayerSpec, layers: LoRALayers) -> None:
        self.in_features = base.in_features
        self.out_features = base.out_features
        self._base, self._base_silu_mul = base, with_activation(base, silu_mul)
        self._spec = spec
        self._layers = layers
        outputs = [_own(size, spec.communicator if spec.dim == 0 else None) for size in spec.outputs]
        self._columns = [slice(*bounds) for bounds in pairwise(accumulate(map(_length, outputs), initial=0))]
        assert self._columns[-1].stop == base.out_features, "the base layer has other outputs"
        slots, rank, options = layers.num_slots, layers.max_rank, {"dtype": layers.dtype, "device": layers.device}
        # Written, so that all of it is in memory when memory is measured.
        self._a = torch.empty(slots, len(outputs) * rank, base.in_features, **options).zero_()
        self._b = torch.empty(slots, rank, base.out_features, **options).zero_()
        # The ranks of the adapter in each slot, per part; 0 for a part that it does not change.
        self._ranks = torch.zeros(slots, len(outputs), dtype=torch.int64)
        columns = [0, *(part.stop for part in self._columns)]
        plan = layers.plan
        self._kernel = None if plan is None else LoRAKernel(plan, self._a, self._b, self._ranks, columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.__call__``."""
        out = self._base(x)
        if self._layers.is_active:
            if self._kernel is not None:
                self._kernel.add(x, out)
            else:
                self._add_in_torch(x, out)
        return out

    def _add_in_torch(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for slot, rows in self._layers.groups:
            ranks = self._ranks[slot].tolist()
            hidden = x[rows] @ self._a[slot, : sum(ranks)].T
            for rank, columns, low in zip(ranks, self._columns, hidden.split(ranks, -1), strict=True):
                if rank:
                    out[rows, columns] += low @ self._b[slot, :rank, columns]

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Applies ``silu_mul`` to the result of a call. See ``with_activation``."""
        return silu_mul(self(x)) if self._layers.is_active else self._base_silu_mul(x)

    def shard(self, weights: Mapping[str, LoRAWeights]) -> LayerParts:
        """See ``LoRALayers.shard``."""
        communicator, by_output = self._spec.communicator, self._spec.dim == 0
        parts: list[LoRAWeights | None] = []
        for name, size in zip(self._spec.names, self._spec.outputs, strict=True):
            whole = weights.get(name)
            if whole is None:
                parts.append(None)
                continue
            inputs = _own(self._spec.inputs, None if by_output else communicator)
            outputs = _own(size, communicator if by_output else None)
            dtype = self._layers.dtype
            parts.append(LoRAWeights(whole.a[:, inputs].to(dtype), whole.b[:, outputs].to(dtype)))
        return parts

    def set_slot(self, slot: int, parts: LayerParts) -> None:
        """See ``LoRALayers.set_slot``."""
        first = 0
        for index, (part, columns) in enumerate(zip(parts, self._columns, strict=True)):
            rank = 0 if part is None else len(part.a)
            if part is not None:
                self._a[slot, first : first + rank].copy_(part.a)
                self._b[slot, :rank, columns].copy_(part.b)
            self._ranks[slot, index] = rank
            first += rank


def _own(size: int, communicator: Communicator | None) -> slice:
    """Returns this rank's indices of ``size``, or all of them without a communicator."""
    return slice(0, size) if communicator is None else shard(size, communicator)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
