"""GGUF files with weights of 4 or 8 bits. Weights in Q4_0 and Q4_K become 4-bit integers, and weights in Q5_0, Q6_K and
Q8_0 become 8-bit integers, with the file's own scales and zeros. All other types are dequantized when they are read.
"""

from collections.abc import Sequence

from quire_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.quantization.stored import StoredMethod, StoredWeight


class GgufMethod(StoredMethod):
    """Layers are the tensors that ``GgufCheckpoint`` has under their Hugging Face names."""

    suffixes = ("weight",)

    def tensor_names(self, layer: str) -> Sequence[str]:
        """See ``LinearMethod.tensor_names``."""
        return (f"{layer}.weight",)

    def is_stored(self, checkpoint: Checkpoint, name: str) -> bool:
        """See ``StoredMethod.is_stored``. False if ``--quantization`` asks to round the layers again. 4-bit weights
        stay as they are for ``int4``, which loses nothing.
        """
        bits = checkpoint.whole_bits(f"{name}.weight") if isinstance(checkpoint, GgufCheckpoint) else None
        asked = self.options.config.quantization
        return bits is not None and (asked is None or (bits, asked) == (4, "int4"))

    def read_layer(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``StoredMethod.read_layer``."""
        assert isinstance(checkpoint, GgufCheckpoint)
        whole = checkpoint.load_whole(f"{name}.weight", shape)
        bits = 4 if whole.zeros is not None else 8
        return StoredWeight(whole.values, whole.scales, whole.zeros, bits, shape[1] // whole.scales.shape[1])
