"""AWQ checkpoints (Lin et al. 2023), as AutoAWQ writes them for its ``gemm`` kernel: 4 bits, with a scale and a zero
for each group of inputs.
"""

import torch

from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.errors import ModelError
from quire_engine.quantization.stored import FLOATS, StoredMethod, StoredWeight, group_size_of, unpack

# The position of each of the 8 columns in a word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqMethod(StoredMethod):
    """Layers consist of ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8] and ``scales`` [groups,
    out].
    """

    suffixes = ("qweight", "scales", "qzeros")

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        outputs, inputs = shape
        if outputs % 8:
            raise ModelError(f"The layer {name} has {outputs} outputs, and AWQ has a multiple of 8.")
        groups = checkpoint.shape(f"{name}.scales")[0]
        group_size = group_size_of(name, inputs, groups)
        values = checkpoint.load_stored(f"{name}.qweight", (inputs, outputs // 8), ("I32",))
        scales = checkpoint.load_stored(f"{name}.scales", (groups, outputs), FLOATS)
        zeros = checkpoint.load_stored(f"{name}.qzeros", (groups, outputs // 8), ("I32",))
        return StoredWeight(
            _columns(values).T.contiguous(),
            scales.float().T.contiguous(),
            _columns(zeros).float().T.contiguous(),
            bits=4,
            group_size=group_size,
        )


def _columns(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [rows, out / 8] to uint8 [rows, out]."""
    return unpack(words, 4).view(len(words), -1, 8)[..., _PLACES].flatten(1)
