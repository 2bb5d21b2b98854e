"""The interface of models: the attention of their layers, a dtype, and the functions ``forward`` and ``logits``."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV


class Model(Protocol):
    """A decoder with its weights, of one dtype on one device."""

    @property
    def attention_layers(self) -> Sequence[LayerAttention]:
        """The attention of each layer. Constant."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of every block of KV memory that hold the state of layers without keys and values, behind its last
        token; 0 without such layers. Its attention is then a ``BatchAttention``. Constant.
        """
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights and activations. Constant."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether ``forward`` can be captured in a CUDA graph: the host never branches on results of the device.
        Constant.
        """
        ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T], both integers.

        ``kv`` are the views of KV memory as ``BlockLayout.views`` has them. They are read and written by ``attention``,
        which was prepared for this batch. Raises ``IndexError`` for a token id outside of the vocabulary.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] of hidden states [R, hidden]. Pass only the rows that sample."""
        ...
