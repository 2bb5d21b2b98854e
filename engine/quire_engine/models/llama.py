"""The Llama family of decoders, for inference: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

They differ in biases, norms and windows only. This file turns a ragged batch of tokens into hidden states, and hidden
states into logits. It knows neither sequences nor pages: what a token may see is the attention backend's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quire_engine.attention.base import AttentionBackend
from quire_engine.attention.kernels.fused import add_rms_norm, rms_norm, rotate, silu_mul
from quire_engine.models.config import ModelConfig
from quire_engine.models.linear import PackedLinear
from quire_engine.models.rope import RotaryEmbedding
from quire_engine.models.weights import Checkpoint

Angles = tuple[torch.Tensor, torch.Tensor]


class Llama:
    """A decoder with its weights. Tensors are of ``dtype`` on ``device``."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        weights = _Weights(checkpoint, dtype, device)
        table = (config.vocab_size, config.hidden_size)
        self._embedding = weights.fused(["model.embed_tokens.weight"], [table])
        self._rope = RotaryEmbedding(config, device)
        self._layers = [_Layer(config, weights, index) for index in range(config.num_layers)]
        self._norm = _Norm(config, weights, "model.norm", config.hidden_size)
        head = self._embedding if config.tied_head else weights.fused(["lm_head.weight"], [table])
        self._head = PackedLinear(head)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T], both integers.

        ``kv`` [blocks, layers, 2, kv_heads, block_size, head_dim] is read and written by ``attention``, which was
        prepared for this batch. Raises ``IndexError`` for a token id outside of the vocabulary.
        """
        residual, update = F.embedding(token_ids, self._embedding), None
        angles = self._rope.angles(positions)
        for layer, layer_kv in zip(self._layers, kv.unbind(1), strict=True):
            update = layer(residual, update, angles, layer_kv, attention)
        return self._norm(residual, update)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] of hidden states [R, hidden]: ask only for the rows that sample."""
        return self._head(hidden)


@dataclass(frozen=True, slots=True)
class _Weights:
    """A checkpoint, read as tensors and layers of one dtype on one device."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return self.checkpoint.fused(names, shapes, self.dtype, self.device)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> PackedLinear:
        """Linear layers of the same input as one, whose outputs lie beside each other."""
        weight = self.fused([f"{name}.weight" for name in names], [(size, inputs) for size in outputs])
        if not bias:
            return PackedLinear(weight)
        return PackedLinear(weight, self.fused([f"{name}.bias" for name in names], [(size,) for size in outputs]))


class _Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019) of the last dimension."""

    def __init__(self, config: ModelConfig, weights: _Weights, name: str, size: int) -> None:
        self._weight = weights.fused([f"{name}.weight"], [(size,)])
        self._eps = config.norm_eps

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``states``, to which ``update`` is added in place first."""
        if update is None:
            return rms_norm(states, self._weight, self._eps)
        return add_rms_norm(update, states, self._weight, self._eps)


class _Attention:
    """Grouped-query attention, with fused projections."""

    def __init__(self, config: ModelConfig, weights: _Weights, index: int) -> None:
        name, hidden = f"model.layers.{index}.self_attn", config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inputs = [f"{name}.{part}_proj" for part in "qkv"]
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim, self._window = config.head_dim, config.windows[index]
        self._qkv = weights.linear(inputs, [queries, keys, keys], hidden, bias=config.qkv_bias)
        self._output = weights.linear([f"{name}.o_proj"], [hidden], queries, bias=config.attention_output_bias)
        self._norms = [
            _Norm(config, weights, f"{name}.{part}_norm", config.head_dim) for part in "qk" if config.qk_norm
        ]

    def __call__(
        self, states: torch.Tensor, angles: Angles, kv: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        heads = self._qkv(states).view(len(states), -1, self._head_dim)
        query, key, value = heads.split(self._heads, dim=1)
        if self._norms:
            query, key = (norm(part) for norm, part in zip(self._norms, (query, key), strict=True))
        rotate(query, *angles)
        rotate(key, *angles)
        mixed = attention.forward(query, key, value, kv, self._window)
        return self._output(mixed.reshape(len(states), -1))


class _FeedForward:
    """The gated feed-forward part (SwiGLU, Shazeer 2020), with gate and up projections fused."""

    def __init__(self, config: ModelConfig, weights: _Weights, index: int) -> None:
        name, hidden, inner = f"model.layers.{index}.mlp", config.hidden_size, config.ffn_size
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = weights.linear(inputs, [inner, inner], hidden, bias=config.mlp_bias)
        self._down = weights.linear([f"{name}.down_proj"], [hidden], inner, bias=config.mlp_bias)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return self._down(silu_mul(self._gate_up(states)))


class _Layer:
    """Attention and feed-forward part, each behind a norm, around one residual stream.

    A part's output is added to the stream by the norm that comes after it, in one pass over memory: hence a layer
    takes the update that the layer before it left, and leaves its own.
    """

    def __init__(self, config: ModelConfig, weights: _Weights, index: int) -> None:
        name, hidden = f"model.layers.{index}", config.hidden_size
        self._attention_norm = _Norm(config, weights, f"{name}.input_layernorm", hidden)
        self._attention = _Attention(config, weights, index)
        self._feed_forward_norm = _Norm(config, weights, f"{name}.post_attention_layernorm", hidden)
        self._feed_forward = _FeedForward(config, weights, index)

    def __call__(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        angles: Angles,
        kv: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        mixed = self._attention(self._attention_norm(residual, update), angles, kv, attention)
        return self._feed_forward(self._feed_forward_norm(residual, mixed))
