"""Rotary position embedding (RoFormer, Su et al. 2021), in the half-split order of the Llama family."""

import torch

from quire_engine.checkpoint.config import DecoderConfig

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the angles of T tokens, [T, head_dim / 2] float32."""


class RotaryEmbedding:
    """The angles by which queries and keys are rotated, by position.

    Cosines and sines are computed in float32 for the tokens of each step. A table of all positions would cost more
    memory than the step itself, and angles of lower precision would lose far positions.
    """

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self._frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32, device=device)
        self._scale: float | torch.Tensor = config.rope_scale
        if config.local_rope_frequencies:
            local = torch.tensor(config.local_rope_frequencies, dtype=torch.float32, device=device)
            self._frequencies = torch.stack((self._frequencies, local))[:, None]
            self._scale = torch.tensor((config.rope_scale, config.local_rope_scale), device=device).view(2, 1, 1)

    def cos_sin(self, positions: torch.Tensor) -> CosSin:
        """Returns cosines and sines [T, head_dim / 2] float32 for positions [T]. On a GPU they are halves of one
        tensor, as its kernel expects. If layers with a window have their own frequencies, returns [2, T, head_dim / 2]:
        first the other layers, then the layers with a window.
        """
        angles = positions.float()[:, None] * self._frequencies
        if angles.is_cuda:
            cos, sin = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self._scale).chunk(2, dim=-1)
            return cos, sin
        return angles.cos().mul_(self._scale), angles.sin().mul_(self._scale)
