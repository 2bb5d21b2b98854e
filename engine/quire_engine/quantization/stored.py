"""Layers that a checkpoint stores quantized. ``StoredWeight`` is the common form of all formats, and ``StoredMethod``
reads a layer into it and packs it.

An integer weight stays integer if a kernel supports its numbers and groups (the kernel for groups rounds scales and
zeros to float16). All else is dequantized when it is read and stored in the format of ``--quantization``, by default in
the model's dtype. That loses nothing beyond one rounding to that dtype.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch

from quire_engine.checkpoint.stored_schemes import SUPPORTED_BITS
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import shard
from quire_engine.errors import ModelError
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_groups import GROUP_SIZES, GroupedWeight
from quire_engine.quantization.base import DenseMethod, Embedding, LayerSpec, Linear, LinearMethod, with_activation
from quire_engine.quantization.int8 import Int8Linear
from quire_engine.quantization.quantized_linear import GroupedLinear
from quire_engine.quantization.unquantized import UnquantizedMethod

FLOATS = ("F32", "F16", "BF16")
"""The safetensors dtypes of scales."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight ``(values - zeros) * scales``, with scales and zeros for each group of inputs.

    ``values`` [out, in] are uint8 below 2^``bits``, int8 or float8. ``scales`` and ``zeros`` (None: all 0) are fp32
    [out, groups]. Input ``i`` belongs to group ``i // group_size``, or to ``group_index[i]`` (int64 [in]) if that is
    set, as with GPTQ's ``desc_act``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    group_index: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight [out, in], computed in fp32 and rounded to ``dtype``."""
        weight = self.values.float()
        if self.zeros is not None:
            weight -= self._spread(self.zeros)
        return weight.mul_(self._spread(self.scales)).to(dtype)

    def rows(self, part: slice) -> "StoredWeight":
        """Returns the outputs in ``part``."""
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, values=self.values[part], scales=self.scales[part], zeros=zeros)

    def columns(self, part: slice) -> "StoredWeight":
        """Returns the inputs in ``part``. Groups stay groups if ``part`` begins at a group; otherwise the result has a
        ``group_index``.
        """
        values = self.values[:, part]
        if self.group_index is not None:
            return replace(self, values=values, group_index=self.group_index[part])
        if part.start % self.group_size:
            return replace(self, values=values, group_index=torch.arange(part.start, part.stop) // self.group_size)
        groups = slice(part.start // self.group_size, -(-part.stop // self.group_size))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, values=values, scales=self.scales[:, groups], zeros=zeros)

    def can_merge(self, other: "StoredWeight") -> bool:
        """Whether both weights have groups of the same inputs and numbers of the same kind."""
        alike = self.bits == other.bits and self.values.dtype is other.values.dtype
        alike = alike and self.group_size == other.group_size and (self.zeros is None) == (other.zeros is None)
        if self.group_index is None or other.group_index is None:
            return alike and self.group_index is other.group_index
        return alike and torch.equal(self.group_index, other.group_index)

    def _spread(self, groups: torch.Tensor) -> torch.Tensor:
        """Expands [out, groups] to [out, in], or to a shape that broadcasts to it."""
        if self.group_index is not None:
            return groups[:, self.group_index]
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group_size, dim=1)[:, : self.values.shape[1]]


Stored: TypeAlias = "StoredWeight | torch.Tensor"
"""A quantized weight, or a dense one [out, in] in the model's dtype."""


class StoredMethod(LinearMethod[Stored]):
    """A ``LinearMethod`` for a checkpoint with quantized layers. Layers that it stores as plain numbers, such as the
    head and MoE routers in most formats, are treated like layers of plain checkpoints.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """The tensors that a quantized layer may have. The first one shows that the layer is quantized."""

    def __init__(self, options: LoadOptions, dtype: torch.dtype, dense: DenseMethod | None = None) -> None:
        super().__init__(options, dtype)
        self._dense = dense or UnquantizedMethod(options, dtype)

    @abstractmethod
    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """Reads the whole stored layer ``name`` of ``shape`` [out, in]."""

    def is_stored(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether the layer ``name`` is quantized."""
        return f"{name}.{self.suffixes[0]}" in checkpoint

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``. Includes all tensors that a quantized or a plain layer may have."""
        return (f"{layer}.weight", *(f"{layer}.{suffix}" for suffix in self.suffixes))

    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> Stored:
        """See ``LinearMethod.read``. Reads a stored layer whole and keeps this rank's shard."""
        if not any(self.is_stored(checkpoint, name) for name in spec.names):
            return self._dense.read(checkpoint, spec)
        return self._merge(
            [self._read_one(checkpoint, spec, name, size) for name, size in zip(spec.names, spec.outputs, strict=True)]
        )

    def read_expert(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: int) -> Stored:
        """See ``LinearMethod.read_expert``. Only experts in plain numbers are stored in one tensor."""
        return self._dense.read_expert(checkpoint, name, shape, index)

    def pack(self, weight: Stored, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        if isinstance(weight, torch.Tensor):
            return self._dense.pack(weight, bias)
        whole = self._pack_whole(weight, bias) if self.options.device.type == "cpu" else None
        if whole is not None:
            return whole
        dense = weight.dequantize(self.dtype).to(self.options.device)
        return self._dense.pack(dense, bias)

    def _pack_whole(self, weight: StoredWeight, bias: torch.Tensor | None) -> Linear | None:
        """Makes the layer that multiplies integers if a kernel supports ``weight``, else returns None."""
        if _is_int8(weight):
            return Int8Linear.from_quantized(weight.values, weight.scales[:, 0], bias, self.dtype)
        order = _order_of_groups(weight)
        neighbours = weight if order is None else replace(weight, values=weight.values[:, order], group_index=None)
        grouped = as_groups(neighbours)
        if grouped is None:
            return None
        layer = GroupedLinear(grouped, bias, self.dtype)
        return layer if order is None else PermutedLinear(layer, order)

    def _read_one(self, checkpoint: Checkpoint, spec: LayerSpec, name: str, outputs: int) -> Stored:
        if not self.is_stored(checkpoint, name):
            return self._dense.read(checkpoint, LayerSpec([name], [outputs], spec.inputs, spec.dim, spec.communicator))
        weight = self.read_layer(checkpoint, name, (outputs, spec.inputs))
        checkpoint.mark_used(self.tensor_names(name))
        if spec.communicator.size == 1:
            return weight
        part = shard((outputs, spec.inputs)[spec.dim], spec.communicator)
        return weight.columns(part) if spec.dim else weight.rows(part)

    def _merge(self, parts: Sequence[Stored]) -> Stored:
        """Concatenates the rows of all parts, as stored if they are alike."""
        first, stored = parts[0], [part for part in parts if isinstance(part, StoredWeight)]
        if isinstance(first, StoredWeight) and len(stored) == len(parts) and all(map(first.can_merge, stored)):
            zeros = [part.zeros for part in stored if part.zeros is not None]
            return replace(
                first,
                values=_cat([part.values for part in stored]),
                scales=torch.cat([part.scales for part in stored]),
                zeros=torch.cat(zeros) if zeros else None,
            )
        dense = [part.dequantize(self.dtype) if isinstance(part, StoredWeight) else part for part in parts]
        return torch.cat([part.to(self.options.device) for part in dense])


class PermutedLinear:
    """A ``Linear`` whose ``layer`` takes the inputs in another ``order`` (int64 [in])."""

    def __init__(self, layer: Linear, order: torch.Tensor) -> None:
        self._layer, self._order = layer, order
        self._silu_mul = with_activation(layer, silu_mul)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.__call__``."""
        return self._layer(x.index_select(1, self._order))

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Applies ``silu_mul`` to the result of a call. See ``with_activation``."""
        return self._silu_mul(x.index_select(1, self._order))


class StoredDenseMethod(DenseMethod):
    """The method for layers that are needed as plain numbers (head, embedding, routers) in a checkpoint that may store
    them quantized. Reads them with ``stored`` and packs them with ``dense``.
    """

    def __init__(self, stored: StoredMethod, dense: DenseMethod) -> None:
        super().__init__(stored.options, stored.dtype)
        self._stored, self._dense = stored, dense

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``."""
        return self._stored.tensor_names(layer)

    def read(self, checkpoint: Checkpoint, spec: LayerSpec) -> torch.Tensor:
        """See ``LinearMethod.read``."""
        weight = self._stored.read(checkpoint, spec)
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize(self.dtype).to(self.options.device)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        return self._dense.pack(weight, bias)

    def pack_embedding(self, table: torch.Tensor) -> Embedding:
        """See ``DenseMethod.pack_embedding``."""
        return self._dense.pack_embedding(table)

    def pack_tied(self, table: torch.Tensor) -> tuple[Embedding, Linear]:
        """See ``DenseMethod.pack_tied``."""
        return self._dense.pack_tied(table)


def as_groups(weight: StoredWeight) -> GroupedWeight | None:
    """Converts the weight for the kernel for groups, with the same numbers. Returns None if the kernel does not support
    its numbers or groups. Groups larger than the kernel's are split into several with the same scale.
    """
    inputs, groups = weight.values.shape[1], weight.scales.shape[1]
    whole = _whole_numbers(weight)
    if whole is None or weight.group_index is not None:
        return None
    values, zeros = whole
    sizes = GROUP_SIZES[weight.bits][::-1]
    size = next((size for size in sizes if groups == 1 or weight.group_size % size == 0), None)
    if size is None:
        return None
    count = -(-inputs // size)
    repeats = count if groups == 1 else weight.group_size // size

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.repeat_interleave(repeats, dim=1)[:, :count]

    return GroupedWeight(values, spread(weight.scales), None if zeros is None else spread(zeros), size)


def _whole_numbers(weight: StoredWeight) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns the numbers and zeros in the form of a ``GroupedWeight``: below 16 with zeros, or int8 without. Otherwise
    None.
    """
    if weight.bits == 4:
        return None if weight.zeros is None else (weight.values, weight.zeros)
    if weight.values.dtype is torch.int8 and weight.zeros is None:
        return weight.values, None
    if weight.values.dtype is torch.uint8 and weight.zeros is not None and bool((weight.zeros == 128).all()):
        return (weight.values ^ 128).view(torch.int8), None
    return None


def _order_of_groups(weight: StoredWeight) -> torch.Tensor | None:
    """Returns the inputs in group order if ``group_index`` has ``group_size`` inputs in each group, else None."""
    if weight.group_index is None:
        return None
    sizes = weight.group_index.bincount(minlength=weight.scales.shape[1])
    return weight.group_index.argsort(stable=True) if bool((sizes == weight.group_size).all()) else None


def _is_int8(weight: StoredWeight) -> bool:
    """Whether ``Int8Linear`` can store the weight: signed integers with one scale per output."""
    whole = weight.values.dtype is torch.int8 and weight.zeros is None and weight.group_index is None
    return whole and weight.scales.shape[1] == 1


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows of one dtype with one byte per number. torch does not concatenate all such dtypes."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [rows, words] to uint8 [rows, words * 32 / ``bits``], for 4 or 8 ``bits``. The lowest bits come
    first.
    """
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)


def bits_of(name: str, words: int, numbers: int) -> int:
    """Returns how many bits each of ``numbers`` has that are stored in ``words`` of 32 bits: 4 or 8. Raises
    ``ModelError`` for other bits.
    """
    for bits in SUPPORTED_BITS:
        if -(-numbers * bits // 32) == words:
            return bits
    raise ModelError(f"The layer {name} holds {numbers} numbers in {words} words of 32 bits, and read are 4 or 8 bits.")


def group_size_of(name: str, inputs: int, groups: int) -> int:
    """Returns how many inputs share a scale, for ``groups`` of equal size. Raises ``ModelError`` if groups cannot be
    equal.
    """
    if groups < 1 or inputs % groups:
        raise ModelError(f"The layer {name} has scales for {groups} groups, which do not divide its {inputs} inputs.")
    return inputs // groups


def read_group_index(checkpoint: Checkpoint, name: str, inputs: int, groups: int) -> torch.Tensor:
    """Reads the group of each input, int64 [in]. Raises ``ModelError`` for a group number outside ``groups``."""
    index = checkpoint.load_stored(name, (inputs,), ("I32", "I64")).long()
    if not bool(((index >= 0) & (index < groups)).all()):
        raise ModelError(f"{name} names groups that have no scales.")
    return index
