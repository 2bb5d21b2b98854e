"""What every model is to the rest of the engine: a few facts, a layout of keys and values, and two functions. Knows no
architecture.
"""

from typing import NamedTuple, Protocol

import torch

from quire_engine.attention.base import AttentionBackend
from quire_engine.checkpoint.config import AttentionLayout


class LayerInputs(NamedTuple):
    """What the layers of a decoder begin with, for T tokens: ``states`` [T, hidden] of the model's dtype, which they
    use up, and ``cos`` and ``sin`` [T, head_dim / 2] float32 of the tokens' positions.
    """

    hidden_states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Model(Protocol):
    """A decoder with its weights, of one dtype on one device."""

    @property
    def layout(self) -> AttentionLayout:
        """Its attention. Constant."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; its KV memory is of the same. Constant."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether ``forward`` can be captured in a CUDA graph: the host decides nothing by what the device computed.
        Constant.
        """
        ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T], both integers.

        ``kv`` [blocks, layers, 2, kv_heads, block_size, head_dim] is read and written by ``attention``, which was
        prepared for this batch. Raises ``IndexError`` for a token id outside of the vocabulary.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] of hidden states [R, hidden]: ask only for the rows that sample."""
        ...


class LayeredModel(Model, Protocol):
    """A model whose ``forward`` is ``layers`` of ``inputs``. Where it is ``capturable`` and on the CPU, its layers ask
    torch for nothing but memory and views: all that they compute is done by compiled kernels, as far as those can be
    had.
    """

    def inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """Of tokens [T] at positions [T], both integers. Raises ``IndexError`` as ``forward``."""
        ...

    def layers(self, inputs: LayerInputs, kv: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, hidden], as of ``forward``."""
        ...
