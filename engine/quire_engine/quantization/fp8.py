"""Checkpoints with float8 (e4m3) weights of the kind ``fp8``, as DeepSeek and Qwen publish them: one scale per block of
outputs and inputs, or one for the tensor.
"""

from typing import Any

import torch

from quire_engine.checkpoint.stored_schemes import DEFAULT_BLOCK, block_size
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.quantization.base import DenseMethod
from quire_engine.quantization.compressed_tensors import read_scales
from quire_engine.quantization.stored import StoredMethod, StoredWeight


class Fp8Method(StoredMethod):
    """Layers consist of ``weight`` [out, in] in float8, with ``weight_scale_inv`` (per block) or ``weight_scale``. Both
    are factors of the weight. The rounding of activations (``activation_scheme``) is ignored.
    """

    suffixes = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")

    def __init__(
        self, options: LoadOptions, dtype: torch.dtype, dense: DenseMethod | None, config: dict[str, Any]
    ) -> None:
        super().__init__(options, dtype, dense)
        self._block = block_size(config.get("weight_block_size") or list(DEFAULT_BLOCK))

    def is_stored(self, checkpoint: Checkpoint, name: str) -> bool:
        """See ``StoredMethod.is_stored``."""
        return any(f"{name}.{suffix}" in checkpoint for suffix in self.suffixes[:2])

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        scale = next(suffix for suffix in self.suffixes if f"{name}.{suffix}" in checkpoint)
        scales, group_size = read_scales(checkpoint, f"{name}.{scale}", shape, self._block)
        values = checkpoint.load_stored(f"{name}.weight", shape, ("F8_E4M3",))
        return StoredWeight(values, scales, None, 8, group_size)
