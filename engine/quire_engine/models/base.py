"""The interface of models: a KV layout, a dtype, and the functions ``forward`` and ``logits``."""

from typing import NamedTuple, Protocol

import torch

from quire_engine.attention.base import AttentionBackend
from quire_engine.checkpoint.config import AttentionLayout


class LayerInputs(NamedTuple):
    """The input of a decoder's layers for T tokens: ``hidden_states`` [T, hidden] of the model's dtype, which the
    layers overwrite, and ``cos`` and ``sin`` [T, head_dim / 2] float32 of the tokens' positions.
    """

    hidden_states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Model(Protocol):
    """A decoder with its weights, of one dtype on one device."""

    @property
    def layout(self) -> AttentionLayout:
        """The heads and sizes of its attention. Constant."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, activations and KV memory. Constant."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether ``forward`` can be captured in a CUDA graph: the host never branches on results of the device.
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
        """Logits [R, vocabulary] of hidden states [R, hidden]. Pass only the rows that sample."""
        ...


class LayeredModel(Model, Protocol):
    """A model whose ``forward`` is ``layers`` of ``inputs``. Where it is ``capturable`` and on the CPU, its layers use
    torch for memory and views only: compiled kernels, where there are any, compute everything.
    """

    def inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """The layers' input for tokens [T] at positions [T], both integers. Raises ``IndexError`` as ``forward``."""
        ...

    def layers(self, inputs: LayerInputs, kv: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, hidden], as ``forward`` returns them."""
        ...
