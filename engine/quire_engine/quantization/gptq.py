"""GPTQ checkpoints (Frantar et al. 2022), as AutoGPTQ (``gptq``) and GPTQModel (``gptq_v2``) write them: 4 or 8 bits,
with a scale and a zero for each group of inputs. With ``desc_act`` the inputs of a group are not adjacent.
"""

from typing import Any

import torch

from quire_engine.checkpoint.stored_schemes import gptq_format
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.quantization.base import DenseMethod
from quire_engine.quantization.stored import (
    FLOATS,
    StoredMethod,
    StoredWeight,
    bits_of,
    group_size_of,
    read_group_index,
    unpack,
)


class GptqMethod(StoredMethod):
    """Layers consist of ``qweight`` int32 [in * bits / 32, out], ``qzeros`` int32 [groups, out * bits / 32], ``scales``
    [groups, out], and ``g_idx`` int32 [in], the group of each input. The ``gptq`` format stores each zero minus 1.
    """

    suffixes = ("qweight", "scales", "qzeros", "g_idx")

    def __init__(
        self, options: LoadOptions, dtype: torch.dtype, dense: DenseMethod | None, config: dict[str, Any]
    ) -> None:
        super().__init__(options, dtype, dense)
        self._zero_offset = 0 if gptq_format(config) == "gptq_v2" else 1

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        outputs, inputs = shape
        words, groups = checkpoint.shape(f"{name}.qweight")[0], checkpoint.shape(f"{name}.scales")[0]
        bits = bits_of(name, words, inputs)
        values = checkpoint.load_stored(f"{name}.qweight", (words, outputs), ("I32",))
        scales = checkpoint.load_stored(f"{name}.scales", (groups, outputs), FLOATS)
        zeros = checkpoint.load_stored(f"{name}.qzeros", (groups, -(-outputs * bits // 32)), ("I32",))
        zeros = unpack(zeros, bits)[:, :outputs] + self._zero_offset & (1 << bits) - 1
        group_size, group_index = _groups(checkpoint, name, inputs, groups)
        return StoredWeight(
            unpack(values.T, bits)[:, :inputs],
            scales.float().T.contiguous(),
            zeros.float().T.contiguous(),
            bits,
            group_size,
            group_index,
        )


def _groups(checkpoint: Checkpoint, name: str, inputs: int, groups: int) -> tuple[int, torch.Tensor | None]:
    """Returns the group size, and the group of each input unless that is ``input // size``."""
    size = -(-inputs // max(1, groups))
    if f"{name}.g_idx" not in checkpoint:
        return group_size_of(name, inputs, groups), None
    index = read_group_index(checkpoint, f"{name}.g_idx", inputs, groups)
    return size, None if torch.equal(index, torch.arange(inputs) // size) else index
