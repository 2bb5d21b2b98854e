"""Checkpoints in the compressed-tensors format, as LLM Compressor writes them: integers of 4 or 8 bits packed in words
(W4A16, W8A16), integers of 8 bits in bytes (W8A8), and float8. Scales are per tensor, per output, per group of inputs
or per block.
"""

from typing import Any

import torch

from quire_engine.checkpoint.stored_schemes import DEFAULT_BLOCK, block_size, compressed_weights
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.errors import ModelError
from quire_engine.quantization.base import DenseMethod
from quire_engine.quantization.stored import (
    FLOATS,
    StoredMethod,
    StoredWeight,
    bits_of,
    read_group_index,
    unpack,
)


class CompressedTensorsMethod(StoredMethod):
    """Layers consist of ``weight_packed`` int32 [out, in * bits / 32], or ``weight`` [out, in] in int8 or float8, with
    ``weight_scale``. Asymmetric weights have a ``weight_zero_point``. If the inputs of a group are not adjacent, there
    is a ``weight_g_idx`` [in]. The rounding of activations (``input_scale``) is ignored.
    """

    suffixes = (
        "weight_scale",
        "weight_packed",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "input_scale",
        "input_zero_point",
        "input_g_idx",
    )

    def __init__(
        self, options: LoadOptions, dtype: torch.dtype, dense: DenseMethod | None, config: dict[str, Any]
    ) -> None:
        super().__init__(options, dtype, dense)
        blocks = [weights.get("block_structure") for weights in compressed_weights(config)]
        self._block = next((block_size(block) for block in blocks if block), DEFAULT_BLOCK)

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        scales, group_size = read_scales(checkpoint, f"{name}.weight_scale", shape, self._block)
        packed = f"{name}.weight_packed" in checkpoint
        values, bits = _packed(checkpoint, name, shape) if packed else _plain(checkpoint, name, shape)
        return StoredWeight(
            values,
            scales,
            _zeros(checkpoint, name, scales.shape, bits if packed else None),
            bits,
            group_size,
            _group_index(checkpoint, name, shape[1], scales.shape[1]),
        )


def read_scales(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[torch.Tensor, int]:
    """Reads the scales of a weight of ``shape`` [out, in]. Returns them as fp32 [out, groups], and the group size.

    Stored scales are for the whole weight (one number), its outputs ([out] or [out, 1]), groups of inputs ([out,
    groups]) or blocks of ``block`` rows and columns. Raises ``ModelError`` for scales of another shape.
    """
    outputs, inputs = shape
    stored = checkpoint.shape(name)
    scales = checkpoint.load_stored(name, stored, FLOATS).float()
    if scales.numel() == 1:
        return scales.view(1, 1).expand(outputs, 1), inputs
    if stored in ((outputs,), (outputs, 1)):
        return scales.view(outputs, 1), inputs
    if len(stored) == 2 and stored[0] == outputs and stored[1] and inputs % stored[1] == 0:
        return scales, inputs // stored[1]
    if stored == (-(-outputs // block[0]), -(-inputs // block[1])):
        return scales.repeat_interleave(block[0], dim=0)[:outputs], block[1]
    raise ModelError(f"The scales {name} have the shape {list(stored)}, which does not divide {list(shape)}.")


def _packed(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """Returns the values [out, in] and their bits: int8, or uint8 for 4 bits, which are stored with 8 added."""
    outputs, inputs = shape
    words = checkpoint.shape(f"{name}.weight_packed")[-1]
    bits = bits_of(name, words, inputs)
    values = checkpoint.load_stored(f"{name}.weight_packed", (outputs, words), ("I32",))
    numbers = unpack(values, bits)[:, :inputs]
    return numbers if bits == 4 else _signed(numbers), bits


def _signed(numbers: torch.Tensor) -> torch.Tensor:
    """Converts uint8 with 128 added to int8."""
    return (numbers ^ 128).view(torch.int8)


def _plain(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, int]:
    return checkpoint.load_stored(f"{name}.weight", shape, ("I8", "F8_E4M3")), 8


def _zeros(checkpoint: Checkpoint, name: str, shape: torch.Size, packed_bits: int | None) -> torch.Tensor | None:
    """Returns the zeros in fp32 of ``shape`` [out, groups], or None if all are 0."""
    stored, (outputs, groups) = f"{name}.weight_zero_point", shape
    if stored not in checkpoint:
        return torch.full((outputs, groups), 8.0) if packed_bits == 4 else None
    if packed_bits:
        words = checkpoint.load_stored(stored, (-(-outputs * packed_bits // 32), groups), ("I32",))
        numbers = unpack(words.T, packed_bits)[:, :outputs].T
        return (numbers if packed_bits == 4 else _signed(numbers)).float().contiguous()
    zeros = checkpoint.load_stored(stored, checkpoint.shape(stored), ("I8", *FLOATS)).float()
    if not bool(zeros.any()):
        return None
    if zeros.numel() not in (1, outputs, outputs * groups):
        raise ModelError(
            f"The zeros {stored} have the shape {list(zeros.shape)}, which is not the shape of the scales."
        )
    return zeros.reshape(-1, 1 if zeros.numel() in (1, outputs) else groups).expand(outputs, groups)


def _group_index(checkpoint: Checkpoint, name: str, inputs: int, groups: int) -> torch.Tensor | None:
    """Returns the group of each input, or None if the inputs of a group are adjacent."""
    if f"{name}.weight_g_idx" not in checkpoint:
        return None
    return read_group_index(checkpoint, f"{name}.weight_g_idx", inputs, groups)
