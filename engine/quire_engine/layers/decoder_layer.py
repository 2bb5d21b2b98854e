"""``DecoderLayer``: attention and feed-forward network around one residual stream."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.distributed.communicator import PendingSum
from quire_engine.layers.attention import Attention
from quire_engine.layers.linear import start_sum
from quire_engine.layers.mlp import GatedMLP, MoE
from quire_engine.layers.norm import Norm, RMSNorm, no_norm
from quire_engine.layers.rotary import CosSin
from quire_engine.layers.weight_loader import WeightLoader


class LayerNorms(NamedTuple):
    """The names of a layer's norms in the checkpoint: of the inputs of attention and feed-forward network, and of their
    outputs before these are added to the residual stream. None if the layer does not have the norm.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


PRE_NORMS = LayerNorms()
"""One norm before attention and one before the network, as in Llama."""


class DecoderLayer:
    """Attention and feed-forward network around one residual stream, with the norms that ``norms`` names.

    If ranks share the tokens (sequence parallelism, Korthikanti et al. 2022), the stream has only this rank's tokens.
    Attention and dense networks then gather all tokens and scatter their sums, and an MoE takes and returns this rank's
    tokens.

    The norm of an input adds the last output to the stream, in one pass over memory. So a layer takes the update that
    the previous layer returned, and returns its own update.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightLoader,
        index: int,
        attention: Attention,
        mlp: GatedMLP | MoE,
        *,
        norms: LayerNorms = PRE_NORMS,
    ) -> None:
        def load(name: str | None) -> RMSNorm | None:
            return None if name is None else RMSNorm(config, weights, f"model.layers.{index}.{name}")

        self._attention_input_norm: Norm = load(norms.attention_input) or no_norm
        self._attention = attention
        self._attention_output_norm = load(norms.attention_output)
        self._mlp_input_norm: Norm = load(norms.mlp_input) or no_norm
        self._mlp = mlp
        self._mlp_output_norm = load(norms.mlp_output)
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
        gather, tokens = self._token_communicator.all_gather, angles[0].shape[-2]
        states = self._attention.qkv_proj(gather(self._attention_input_norm(residual, update), tokens))
        states = self._attention.output_proj(self._attention(states, angles, kv, attention))
        if self._attention_output_norm is not None:
            states = self._attention_output_norm(states)
        states = self._mlp_input_norm(residual, states)
        states = self._mlp(states if self._mlp.has_experts else gather(states, tokens))
        return states if self._mlp_output_norm is None else self._mlp_output_norm(states)

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
        halves = [self._attention.qkv_proj(self._attention_input_norm(*half)) for half in updated(residuals, updates)]
        states = self._attention(torch.cat(halves), angles, kv, attention)
        sums = [start_sum(self._attention.output_proj, half) for half in states.chunk(2)]
        updates = _normed(sums, self._attention_output_norm)
        sums = [self._mlp.start(self._mlp_input_norm(*half)) for half in updated(residuals, updates)]
        return _normed(sums, self._mlp_output_norm)


def updated(
    residuals: Sequence[torch.Tensor], updates: Sequence[PendingSum | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields each half of the stream with the sum to add to it, once that has arrived, or None."""
    for residual, update in zip(residuals, updates, strict=True):
        yield residual, None if update is None else update.wait()


def _normed(sums: Sequence[PendingSum], norm: RMSNorm | None) -> Sequence[PendingSum]:
    return sums if norm is None else [_NormedSum(each, norm) for each in sums]


class _NormedSum(PendingSum):
    """A sum over the ranks that is normed after it has arrived."""

    def __init__(self, pending: PendingSum, norm: RMSNorm) -> None:
        super().__init__(pending.parts, pending.work)
        self._norm = norm

    def wait(self) -> torch.Tensor:
        """See ``PendingSum``."""
        return self._norm(super().wait())
