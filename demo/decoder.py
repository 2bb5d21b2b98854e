"""The network while it is trained: a small Llama whose parameters carry the names that a Hugging Face folder expects.

It exists beside transformers' own class because packed rows need a document mask, and because training on two processor
cores needs a lean forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network; lengths are in tokens, widths in channels."""

    vocabulary: int = 1024
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    feed_forward: int = 512
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def config(self) -> dict[str, Any]:
        """The `config.json` of the folder, as transformers 5 and its predecessors read it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


def rotary_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[length, head]`, in the half-split order of the Llama family (RoFormer)."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head, 2).float() / shape.head)
    angle = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn `[batch, heads, length, head]` by the position of each token."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def document_mask(documents: Tensor) -> Tensor:
    """What each token of `[batch, length]` may see: bool `[batch, 1, length, length]`, its own document so far."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned scale (Zhang and Sennrich)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Normalise over the last dimension; the result is float32."""
        scale = torch.rsqrt(states.float().square().mean(-1, keepdim=True) + self.epsilon)
        return (states.float() * scale) * self.weight


class Attention(nn.Module):
    """Grouped-query attention within each document of a packed row."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def split(self, states: Tensor) -> Tensor:
        """`[batch, length, heads * head]` to `[batch, heads, length, head]`."""
        return states.unflatten(-1, (-1, self.shape.head)).transpose(1, 2)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        """Mix `[batch, length, hidden]` over what the mask lets each token see (None: everything so far)."""
        query = rotate(self.split(self.q_proj(states)), cosine, sine)
        key = rotate(self.split(self.k_proj(states)), cosine, sine)
        value = self.split(self.v_proj(states))
        group = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward part (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Transform each token of `[batch, length, hidden]` by itself."""
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        """One layer over `[batch, length, hidden]`."""
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class Trunk(nn.Module):
    """Embedding, layers and final norm: what transformers calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_epsilon)


class Decoder(nn.Module):
    """The whole network; the head is the embedding, so only `model.*` is stored."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Unit-variance logits and projections at the start; outputs into the residual stream start small."""
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
        if isinstance(module, Attention):
            nn.init.zeros_(module.o_proj.weight)
        if isinstance(module, FeedForward):
            nn.init.zeros_(module.down_proj.weight)

    def forward(self, tokens: Tensor, documents: Tensor | None, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the targets that are not -100.

        All three are int64 `[batch, length]`: token ids, the number of the document that each token belongs to
        (None where a row is one document), and the id that must follow.
        """
        length = tokens.shape[1]
        cosine, sine = rotary_tables(self.shape, length)
        mask = None if documents is None else document_mask(documents)
        states = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            states = layer(states, cosine, sine, mask)
        logits = functional.linear(self.model.norm(states), self.model.embed_tokens.weight)
        return functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
