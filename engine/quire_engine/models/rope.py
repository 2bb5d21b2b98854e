"""Rotary position embedding (RoFormer, Su et al. 2021), in the half-split order of the Llama family."""

import torch

from quire_engine.models.config import ModelConfig


class RotaryEmbedding:
    """Turns queries and keys by their positions.

    Cosines and sines are made for the tokens of each step, in float32: a table of all positions would cost
    more memory than the step it serves, and rounding the angle in a lower precision would lose far positions.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32, device=device)
        self._scale = config.rope_scale

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim / 2] of ``dtype`` for positions [T]."""
        angles = torch.outer(positions.float(), self._frequencies).unsqueeze(1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """``states`` [T, heads, head_dim] turned by the angles of their tokens; contiguous."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=left).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=right).addcmul_(first, sine)
    return turned
