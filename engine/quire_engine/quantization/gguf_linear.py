"""GGUF files with weights in four bits: those of Q4_0 and Q4_K stay so, with their own numbers, scales and zeros. All
other types are dequantised as they are read.
"""

from collections.abc import Sequence

from quire_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.quantization.stored import StoredMethod, StoredWeight

GROUP_SIZE = 32


class GgufMethod(StoredMethod):
    """Layers are the tensors that ``GgufCheckpoint`` has under their Hugging Face names."""

    suffixes = ("weight",)

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``."""
        return (f"{layer}.weight",)

    def is_stored(self, checkpoint: Checkpoint, name: str) -> bool:
        """See ``StoredMethod.is_stored``: not where the layers are to be rounded anew to eight bits."""
        four_bits = isinstance(checkpoint, GgufCheckpoint) and checkpoint.has_four_bits(f"{name}.weight")
        return four_bits and self.options.config.quantization != "int8"

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        assert isinstance(checkpoint, GgufCheckpoint)
        values, scales, zeros = checkpoint.load_four_bits(f"{name}.weight", shape)
        return StoredWeight(values, scales, zeros, 4, GROUP_SIZE)
