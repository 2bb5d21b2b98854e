"""Linear layers with adapters beside them: ``LoRALinear`` adds to each row of its base layer's output what that row's
adapter makes of the input, and ``LoRALayers`` are all of a model's.

Adapters in use lie in *slots*: stacked matrices of one size, padded to the largest rank, so that they never move. A
step's rows are grouped by slot once (``LoRABatch``), and every layer adds each group's two small products.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from quire_engine.distributed.communicator import Communicator, shard
from quire_engine.kernels.ops import silu_mul
from quire_engine.lora.adapter import LoRAWeights
from quire_engine.quantization.base import LayerSpec, Linear


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Which rows of a batch [T] go through the adapter of which slot: a range of rows, or their indices. Rows without
    one are in no group.
    """

    groups: Sequence[tuple[int, slice | torch.Tensor]] = ()

    @classmethod
    def of(cls, slots: torch.Tensor, device: torch.device) -> "LoRABatch":
        """The batch of ``slots`` [T] int64 on the host, -1 for rows without an adapter."""
        groups: list[tuple[int, slice | torch.Tensor]] = []
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows = (slots == slot).nonzero().flatten()
                first, last = int(rows[0]), int(rows[-1])
                whole = last - first + 1 == len(rows)
                groups.append((slot, slice(first, last + 1) if whole else rows.to(device)))
        return cls(groups)


NO_ADAPTERS = LoRABatch()


class LoRALayers:
    """All layers of a model, or of a rank's part of it, that adapters may change. ``batch`` says what the next forward
    pass is to add. Made before the model, whose linear layers are wrapped as they are loaded.
    """

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.batch = NO_ADAPTERS
        self._layers: list[LoRALinear] = []

    def wrap(self, base: Linear, spec: LayerSpec) -> "LoRALinear":
        """``base``, which ``spec`` was read for, with slots beside it."""
        layer = LoRALinear(base, spec, self)
        self._layers.append(layer)
        return layer

    def shard(self, weights: Mapping[str, LoRAWeights]) -> "ShardedAdapter":
        """This rank's part of an adapter in the model's dtype, on the host."""
        return [layer.shard(weights) for layer in self._layers]

    def set_slot(self, slot: int, adapter: "ShardedAdapter") -> None:
        """Copies an adapter into a slot."""
        for layer, parts in zip(self._layers, adapter, strict=True):
            layer.set_slot(slot, parts)


LayerParts = Sequence[LoRAWeights | None]
"""What an adapter adds to each part of a fused layer; None where it does not change that part."""
ShardedAdapter = Sequence[LayerParts]
"""An adapter's part of each layer, in the order of ``LoRALayers``."""


class LoRALinear:
    """A ``Linear`` of one or more fused parts, each of which an adapter may change.

    ``_a`` [slots, parts * max_rank, in] and ``_b`` [slots, max_rank, out] are the adapters' matrices; the columns of
    ``_b`` are divided among the parts as the outputs are. Of an adapter of rank r the first r rows of ``_a`` for each
    part that it changes are used, one part behind the other.

    Where ranks share the layer, each computes its part of the sum as the base layer does: from its inputs, if it is row
    parallel, or for its outputs.
    """

    def __init__(self, base: Linear, spec: LayerSpec, layers: LoRALayers) -> None:
        self.in_features = base.in_features
        self.out_features = base.out_features
        self._base = base
        self._spec = spec
        self._layers = layers
        outputs = [_own(size, spec.communicator if spec.dim == 0 else None) for size in spec.outputs]
        self._columns = [slice(*bounds) for bounds in pairwise(accumulate(map(_length, outputs), initial=0))]
        assert self._columns[-1].stop == base.out_features, "the base layer has other outputs"
        slots, rank, options = layers.num_slots, layers.max_rank, {"dtype": layers.dtype, "device": layers.device}
        # Written, so that all of it is in memory when that is measured.
        self._a = torch.empty(slots, len(outputs) * rank, base.in_features, **options).zero_()
        self._b = torch.empty(slots, rank, base.out_features, **options).zero_()
        # Of each slot the rank, and the parts that its adapter changes.
        self._in_slots: list[tuple[int, list[int]]] = [(0, [])] * slots

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.__call__``."""
        out = self._base(x)
        for slot, rows in self._layers.batch.groups:
            rank, parts = self._in_slots[slot]
            if parts:
                hidden = x[rows] @ self._a[slot, : len(parts) * rank].T
                for part, low in zip(parts, hidden.split(rank, -1), strict=True):
                    out[rows, self._columns[part]] += low @ self._b[slot, :rank, self._columns[part]]
        return out

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.forward_silu_mul``."""
        if not self._layers.batch.groups:
            return self._base.forward_silu_mul(x)
        return silu_mul(self(x))

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
        changed = [index for index, part in enumerate(parts) if part is not None]
        rank = 0
        for place, part in enumerate(part for part in parts if part is not None):
            rank = len(part.a)
            self._a[slot, place * rank : (place + 1) * rank].copy_(part.a)
            self._b[slot, :rank, self._columns[changed[place]]].copy_(part.b)
        self._in_slots[slot] = rank, changed


def _own(size: int, communicator: Communicator | None) -> slice:
    """This rank's indices of ``size``, or all of them where it has them all."""
    return slice(0, size) if communicator is None else shard(size, communicator)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
