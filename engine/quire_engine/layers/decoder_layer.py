"""``DecoderLayer``: attention and feed-forward network around one residual stream."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.distributed.communicator import PendingSum
from quire_engine.layers.attention import Attention
from quire_engine.layers.linear import start_sum
from quire_engine.layers.mlp import GatedMLP, MoE
from quire_engine.layers.norm import RMSNorm
from quire_engine.layers.rotary import CosSin
from quire_engine.layers.weight_loader import WeightLoader


class DecoderLayer:
    """Attention and feed-forward network, each after a norm, around one residual stream.

    If ranks share the tokens (sequence parallelism, Korthikanti et al. 2022), the stream has only this rank's tokens.
    Attention and dense networks then gather all tokens and scatter their sums, and an MoE takes and returns this rank's
    tokens.

    The norm after attention or network adds their output to the stream, in one pass over memory. So a layer takes the
    update that the previous layer returned, and returns its own update.
    """

    def __init__(
        self, config: DecoderConfig, weights: WeightLoader, index: int, attention: Attention, mlp: GatedMLP | MoE
    ) -> None:
        norm = partial(RMSNorm, weights, size=config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)
        self._input_norm = norm(f"model.layers.{index}.input_layernorm")
        self._attention = attention
        self._post_attention_norm = norm(f"model.layers.{index}.post_attention_layernorm")
        self._mlp = mlp
        self._token_communicator = weights.token_communicator

    @property
    def attn(self) -> LayerAttention:
        """See ``Layer``."""
        return self._attention.attn

    @property
    def is_capturable(self) -> bool:
        """Whether the host reads no results of the layer."""
        return self._mlp.is_capturable

    @property
    def waits_for_device(self) -> bool:
        """See ``Layer``."""
        return not self.is_capturable

    def __call__(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        angles: CosSin,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Adds ``update`` [T, hidden], from the previous layer, to the stream ``residual`` [T, hidden] in place, then
        adds the output of attention. Returns the network's output [T, hidden], which the next norm adds.
        """
        gather, tokens = self._token_communicator.all_gather, len(angles[0])
        states = self._attention.qkv_proj(gather(self._input_norm(residual, update), tokens))
        states = self._attention(states, angles, kv, attention)
        states = self._post_attention_norm(residual, self._attention.output_proj(states))
        return self._mlp(states if self._mlp.has_experts else gather(states, tokens))

    def experts_only(self, no_tokens: torch.Tensor) -> None:
        """Computes the tokens of other engines with this rank's experts. ``no_tokens`` [0, hidden] stands for its own
        tokens. A layer without experts does nothing.
        """
        if self._mlp.has_experts:
            self._mlp(no_tokens)

    def overlapped(
        self,
        residuals: Sequence[torch.Tensor],
        updates: Sequence[PendingSum | None],
        angles: CosSin,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> Sequence[PendingSum]:
        """Does the work of a call for the two halves of a large step's rows, so that the sum of one half overlaps with
        the matrix products of the other. Only attention needs both halves at once. The returned outputs are pending,
        and the next layer waits for them half by half, so the last sum of a layer overlaps with the first product of
        the next.
        """
        states = torch.cat([self._attention.qkv_proj(self._input_norm(*half)) for half in updated(residuals, updates)])
        states = self._attention(states, angles, kv, attention)
        updates = [start_sum(self._attention.output_proj, half) for half in states.chunk(2)]
        return [self._mlp.start(self._post_attention_norm(*half)) for half in updated(residuals, updates)]


def updated(
    residuals: Sequence[torch.Tensor], updates: Sequence[PendingSum | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields each half of the stream with the sum to add to it, once that has arrived, or None."""
    for residual, update in zip(residuals, updates, strict=True):
        yield residual, None if update is None else update.wait()
