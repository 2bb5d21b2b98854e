"""Grouped-query attention of a decoder layer (Ainslie et al. 2023), with fused projections."""

from typing import Literal

import torch

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.kernels.ops import HeadNorms, norm_rotate, rotate
from quire_engine.layers.norm import TokenNorms
from quire_engine.layers.rotary import CosSin
from quire_engine.layers.weight_loader import WeightLoader


class Attention:
    """The attention of one layer. A call takes the output of ``qkv_proj`` and returns the input of ``output_proj``.
    With ``qk_norm`` queries and keys are normalized before they are rotated: each "head", or all heads of a "token" at
    once. ``sinks`` says whether each head has a sink. ``attn`` describes the layer for attention backends.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightLoader,
        index: int,
        *,
        qk_norm: Literal["head", "token"] | None = None,
        sinks: bool = False,
    ) -> None:
        name, hidden = f"model.layers.{index}.self_attn", config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inputs = [f"{name}.{part}_proj" for part in "qkv"]
        heads, kv_heads = (count // weights.communicator.size for count in (config.num_heads, config.num_kv_heads))
        self._heads = heads, kv_heads, kv_heads
        self._rotation, self._rotates = _rotation(config, index), index not in config.nope_layers
        assert self._rotates or qk_norm != "head", "norms of heads come with a rotation"
        self.attn = LayerAttention(
            heads, kv_heads, config.head_dim, config.attention_scale, config.sliding_windows[index]
        )
        self.qkv_proj = weights.column_parallel_linear(inputs, [queries, keys, keys], hidden, bias=config.qkv_bias)
        self.output_proj = weights.row_parallel_linear(
            f"{name}.o_proj", hidden, queries, bias=config.attention_output_bias
        )
        self._sinks: torch.Tensor | None = None
        if sinks:
            names, shapes, ranks = [f"{name}.sinks"], [(config.num_heads,)], weights.communicator
            load = weights.checkpoint.load_fused
            self._sinks = load(names, shapes, torch.float32, weights.device, communicator=ranks)
        self._head_norms = _load_head_norms(config, weights, name, heads) if qk_norm == "head" else None
        self._token_norms = TokenNorms(config, weights, name) if qk_norm == "token" else None

    def __call__(
        self, projected: torch.Tensor, angles: CosSin, kv: LayerKV, attention: AttentionBackend
    ) -> torch.Tensor:
        """Maps ``projected`` [T, this rank's outputs of ``qkv_proj``] to [T, this rank's inputs of ``output_proj``]."""
        tokens = projected.shape[0]
        if self._rotation is not None:
            cos, sin = angles
            angles = cos[self._rotation], sin[self._rotation]
        if self._token_norms is not None:
            self._token_norms(projected)
        heads = projected.view(tokens, -1, self.attn.head_dim)
        queries, keys, _ = self._heads
        if self._head_norms is not None:
            norm_rotate(heads[:, : queries + keys], self._head_norms, *angles)
        elif self._rotates:
            rotate(heads[:, : queries + keys], *angles)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        return self.attn(query, key, value, kv, attention, sinks=self._sinks).reshape(tokens, -1)


def _rotation(config: DecoderConfig, index: int) -> int | None:
    """Returns which of the angles that ``RotaryEmbedding.cos_sin`` stacks a layer uses; None if all layers share
    them.
    """
    has_window = config.sliding_windows[index] is not None
    return int(has_window) if config.local_rope_frequencies else None


def _load_head_norms(config: DecoderConfig, weights: WeightLoader, name: str, queries: int) -> HeadNorms:
    query, key = (weights.load_fused([f"{name}.{part}_norm.weight"], [(config.head_dim,)]) for part in "qk")
    return HeadNorms(query, key, queries, config.rms_norm_eps, config.norm_offset)
