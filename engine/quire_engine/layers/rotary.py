"""Rotary position embedding (RoFormer, Su et al. 2021), in the half-split order of the Llama family."""

import torch

from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.kernels.ops import cos_sin

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the angles of T tokens, [T, head_dim / 2] float32."""


class RotaryEmbedding:
    """The angles by which queries and keys are rotated, by position.

    Cosines and sines are computed in float32 for the tokens of each step. A table of all positions would cost more
    memory than the step itself, and angles of lower precision would lose far positions.
    """

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        sets, scales = [config.rope_frequencies], [config.rope_scale]
        if config.local_rope_frequencies:
            sets, scales = [*sets, config.local_rope_frequencies], [*scales, config.local_rope_scale]
        frequencies = torch.tensor(sets, dtype=torch.float32, device=device)
        self._num_sets, self._width = frequencies.shape
        self._frequencies = frequencies.flatten()
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device).repeat_interleave(self._width)

    def cos_sin(self, positions: torch.Tensor) -> CosSin:
        """Returns cosines and sines [T, head_dim / 2] float32 for positions [T]. On a GPU they are halves of one
        tensor, as its kernel expects. If layers with a window have their own frequencies, returns [2, T, head_dim / 2]:
        first the other layers, then the layers with a window.
        """
        cos, sin = cos_sin(positions, self._frequencies, self._scales)
        cos, sin = (each.view(len(positions), self._num_sets, self._width).transpose(0, 1) for each in (cos, sin))
        if cos.is_cuda:
            cos, sin = torch.cat((cos, sin), dim=-1).chunk(2, dim=-1)
        return (cos, sin) if self._num_sets > 1 else (cos[0], sin[0])
