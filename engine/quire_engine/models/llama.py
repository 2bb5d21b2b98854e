"""The Llama family of decoders, for inference: Llama 2 and 3, Mistral, Qwen2 and Qwen3, and with experts Mixtral and
Qwen3-MoE.

They differ in biases, norms, windows and the feed-forward network only. ``Llama`` turns a ragged batch of tokens into
hidden states, and hidden states into logits. The attention backend knows the sequences, and what each token may see.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE, AttentionBackend, LayerAttention, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.core.executor import WeightStats
from quire_engine.distributed.communicator import PendingSum, shard
from quire_engine.distributed.pipeline import divide, is_first, is_last
from quire_engine.errors import ModelError
from quire_engine.kernels.ops import HeadNorms, norm_rotate, rotate
from quire_engine.layers.linear import start_sum
from quire_engine.layers.mlp import GatedMLP, MoE
from quire_engine.layers.norm import RMSNorm
from quire_engine.layers.offloaded import load_offloaded_layers
from quire_engine.layers.rotary import RotaryEmbedding
from quire_engine.layers.streamed import Layer, load_layers
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.quantization.base import Embedding

CosSin = tuple[torch.Tensor, torch.Tensor]


class LayerInputs(NamedTuple):
    """The input of a decoder's layers for T tokens: ``hidden_states`` [T, hidden] of the model's dtype, which the
    layers overwrite, and ``cos`` and ``sin`` [T, head_dim / 2] float32 of the tokens' positions.
    """

    hidden_states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Llama:
    """A decoder with its weights, or a rank's shard of it. A ``Model`` whose ``forward`` is ``layers`` of ``inputs``.
    Where it is ``capturable`` and on the CPU, its layers use torch for memory and views only: compiled kernels, where
    there are any, compute everything but what adapters add. ``loras`` are its layers that adapters may change; None if
    it has no slots for any. ``weight_stats`` are those of its layers where some are read from disk, or copied
    from the host's memory; None if all stay.
    """

    state_bytes = 0

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        self.dtype = weights.dtype
        self.loras = weights.loras
        self._stage = stage = weights.stage
        self.communicator = weights.communicator
        self._token_communicator = weights.token_communicator
        heads, kv_heads = (count // weights.communicator.size for count in (config.num_heads, config.num_kv_heads))
        indices = range(config.num_layers) if stage is None else stage_layers(config, stage.count)[stage.index]
        scale, windows = config.head_dim**-0.5, config.sliding_windows
        self.attention_layers = tuple(
            LayerAttention(heads, kv_heads, config.head_dim, scale, windows[index]) for index in indices
        )
        self._embedding: Embedding | None = None
        self._hidden_size = config.hidden_size
        if is_first(stage):
            # First, as a table that is packed for both is then freed before the layers are read.
            head, tied = "lm_head" if config.makes_logits else None, config.tie_word_embeddings
            self._embedding, self._lm_head = weights.embedding_and_head(
                "model.embed_tokens", head, config.vocab_size, config.hidden_size, tied=tied
            )
        self._rope = RotaryEmbedding(config, weights.device)
        self._layers, self.weight_stats = _load_layers(config, weights, indices)
        # On CUDA the whole forward pass is captured, with what is received in it. Whose tokens go where is known to the
        # host alone.
        receives = stage is not None and weights.device.type == "cuda"
        self.capturable = not (receives or weights.sends_tokens) and all(layer.is_capturable for layer in self._layers)
        last = "model.norm" if is_last(stage) else f"model.layers.{indices.stop}.input_layernorm"
        self._norm = RMSNorm(weights, last, config.hidden_size, config.rms_norm_eps)
        self._split_above = _split_above(weights)

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads what a layer computes, and so launches a pass no sooner than it is computed."""
        return any(layer.waits_for_device for layer in self._layers)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """See ``Model.forward``."""
        return self.layers(self.inputs(token_ids, positions), kv, attention)

    def inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """The layers' input for tokens [T] at positions [T], both integers: of the first stage the embedding, of
        another what the stage before has sent. Raises ``IndexError`` as ``forward``.
        """
        if self._embedding is not None:
            states = self._embedding(token_ids)
        else:
            assert self._stage is not None, "another stage than the first"
            empty = torch.empty(len(token_ids), self._hidden_size, dtype=self.dtype, device=token_ids.device)
            states = self._stage.receive(empty)
        return LayerInputs(states, *self._rope.cos_sin(positions))

    def layers(self, inputs: LayerInputs, kv: Sequence[LayerKV], attention: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, hidden], as ``forward`` returns them; of a stage that is not the last one, as the next one
        takes them.
        """
        ranks, tokens = self._token_communicator, len(inputs.hidden_states)
        if tokens > self._split_above and self._can_overlap():
            return self._overlapped_layers(inputs, kv, attention)
        residual, update, angles = inputs.hidden_states[shard(tokens, ranks)], None, (inputs.cos, inputs.sin)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            update = layer(residual, update, angles, layer_kv, attention)
        # The norm adds the update to the stream. What it returns is made again by the next stage, from that sum.
        normed = self._norm(residual, update)
        return ranks.all_gather(normed if is_last(self._stage) else residual, tokens)

    def _can_overlap(self) -> bool:
        """Whether sums of a step go on beside its products. With adapters none is split: which rows have which adapter
        is planned for a whole step.
        """
        has_loras = self.loras is not None and self.loras.is_active
        return self.communicator.overlaps_sums and not has_loras

    def _overlapped_layers(
        self, inputs: LayerInputs, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """``layers`` of a step whose rows are computed in two halves (dual batch overlap)."""
        residuals, angles = inputs.hidden_states.chunk(2), (inputs.cos, inputs.sin)
        updates: Sequence[PendingSum | None] = (None, None)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            updates = layer.overlapped(residuals, updates, angles, layer_kv, attention)
        normed = [self._norm(*half) for half in _updated(residuals, updates)]
        return torch.cat(normed) if is_last(self._stage) else inputs.hidden_states

    def execute_dummy_batch(self, device: torch.device) -> None:
        """Takes part in a forward pass of other engines without tokens: its experts compute theirs."""
        no_tokens = torch.empty(0, self._hidden_size, dtype=self.dtype, device=device)
        for layer in self._layers:
            layer.experts_only(no_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``. Of a pipeline, for the first stage."""
        return self._lm_head(hidden)


def _load_layers(
    config: DecoderConfig, weights: WeightLoader, indices: range
) -> tuple[Sequence[Layer], WeightStats | None]:
    def load(index: int) -> Layer:
        return _DecoderLayer(config, weights, index)

    settings = weights.options.config
    if settings.cpu_offload_gb:
        return load_offloaded_layers(indices, load, settings.cpu_offload_gb, weights.device)
    return load_layers(indices, load, settings.weights_memory_gb)


def stage_layers(config: DecoderConfig, num_stages: int) -> list[range]:
    """The layers of each of ``num_stages``, as even as can be by the numbers that are read in a step: those of layers,
    and on the first stage the head.
    """
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    costs = []
    for index in range(config.num_layers):
        inner = config.intermediate_size
        if config.moe is not None and config.moe.is_moe_layer[index]:
            inner = config.moe.num_experts * config.moe.moe_intermediate_size
        costs.append(attention + 3 * config.hidden_size * inner)
    return divide(costs, num_stages, config.hidden_size * config.vocab_size)


def _split_above(weights: WeightLoader) -> int:
    """Returns the most tokens of a step that is not computed in two halves. On a GPU, steps that may be captured as
    CUDA graphs are whole. Raises ``ModelError`` for a threshold that would divide them.
    """
    config = weights.options.config
    if not config.enable_dbo or weights.communicator.size == 1:
        return sys.maxsize
    threshold = config.dbo_prefill_token_threshold
    if weights.device.type == "cuda" and threshold < MAX_GRAPH_BATCH_SIZE:
        raise ModelError(
            f"--dbo-prefill-token-threshold {threshold} would divide steps that are CUDA graphs: give at least "
            f"{MAX_GRAPH_BATCH_SIZE}."
        )
    return threshold


class _Attention:
    """Grouped-query attention, with fused projections: a call takes what ``qkv_proj`` returns, and returns what
    ``output_proj`` takes.
    """

    def __init__(self, config: DecoderConfig, weights: WeightLoader, index: int) -> None:
        name, hidden = f"model.layers.{index}.self_attn", config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inputs = [f"{name}.{part}_proj" for part in "qkv"]
        self._heads = tuple(
            heads // weights.communicator.size for heads in (config.num_heads, *[config.num_kv_heads] * 2)
        )
        self._head_dim, self._window = config.head_dim, config.sliding_windows[index]
        self.qkv_proj = weights.column_parallel_linear(inputs, [queries, keys, keys], hidden, bias=config.qkv_bias)
        self.output_proj = weights.row_parallel_linear(
            f"{name}.o_proj", hidden, queries, bias=config.attention_output_bias
        )
        self._head_norms = _load_head_norms(config, weights, name, self._heads[0]) if config.qk_norm else None

    def __call__(
        self, projected: torch.Tensor, angles: CosSin, kv: LayerKV, attention: AttentionBackend
    ) -> torch.Tensor:
        tokens = projected.shape[0]
        heads = projected.view(tokens, -1, self._head_dim)
        queries, keys, _ = self._heads
        if self._head_norms is None:
            rotate(heads[:, : queries + keys], *angles)
        else:
            norm_rotate(heads[:, : queries + keys], self._head_norms, *angles)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        return attention.forward(query, key, value, kv.pages, self._window, group=kv.group).reshape(tokens, -1)


def _load_head_norms(config: DecoderConfig, weights: WeightLoader, name: str, queries: int) -> HeadNorms:
    query, key = (weights.load_fused([f"{name}.{part}_norm.weight"], [(config.head_dim,)]) for part in "qk")
    return HeadNorms(query, key, queries, config.rms_norm_eps)


class _DecoderLayer:
    """Attention and feed-forward network, each after a norm, around one residual stream.

    Where ranks share the tokens, the stream is that of this rank's tokens (sequence parallelism, Korthikanti et al.
    2022): attention and dense networks gather all tokens and scatter their sums, and a mixture of experts takes and
    returns this rank's.

    The output of either is added to the stream by the norm that comes after it, in one pass over memory: hence a layer
    takes the update that the previous layer returned, and returns its own.
    """

    def __init__(self, config: DecoderConfig, weights: WeightLoader, index: int) -> None:
        name, hidden = f"model.layers.{index}", config.hidden_size
        self._input_norm = RMSNorm(weights, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        self._attention = _Attention(config, weights, index)
        self._post_attention_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self._mlp = _load_mlp(config, weights, index)
        self._token_communicator = weights.token_communicator

    @property
    def is_capturable(self) -> bool:
        """Whether the host reads nothing that the layer computes."""
        return isinstance(self._mlp, GatedMLP) or self._mlp.is_capturable

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
        gather, tokens = self._token_communicator.all_gather, len(angles[0])
        states = self._attention.qkv_proj(gather(self._input_norm(residual, update), tokens))
        states = self._attention(states, angles, kv, attention)
        states = self._post_attention_norm(residual, self._attention.output_proj(states))
        return self._mlp(states if isinstance(self._mlp, MoE) else gather(states, tokens))

    def experts_only(self, no_tokens: torch.Tensor) -> None:
        """This rank's experts compute the tokens of other engines; ``no_tokens`` [0, hidden] are its own. A layer
        without experts has nothing to do.
        """
        if isinstance(self._mlp, MoE):
            self._mlp(no_tokens)

    def overlapped(
        self,
        residuals: Sequence[torch.Tensor],
        updates: Sequence[PendingSum | None],
        angles: CosSin,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> Sequence[PendingSum]:
        """As a call, for the two halves of a large step's rows: a sum of one half is under way while the other half is
        multiplied. Attention alone needs both; all else works on rows. The outputs are pending, and those of the layer
        before are waited for half by half, so the last sum of a layer goes on beside the first product of the next one.
        """
        states = torch.cat([self._attention.qkv_proj(self._input_norm(*half)) for half in _updated(residuals, updates)])
        states = self._attention(states, angles, kv, attention)
        updates = [start_sum(self._attention.output_proj, half) for half in states.chunk(2)]
        return [self._mlp.start(self._post_attention_norm(*half)) for half in _updated(residuals, updates)]


def _updated(
    residuals: Sequence[torch.Tensor], updates: Sequence[PendingSum | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Each half of the stream, and once it is waited for the sum that is to be added to it; None for none."""
    for residual, update in zip(residuals, updates, strict=True):
        yield residual, None if update is None else update.wait()


def _load_mlp(config: DecoderConfig, weights: WeightLoader, index: int) -> GatedMLP | MoE:
    if config.moe is not None and config.moe.is_moe_layer[index]:
        return MoE.load(config, config.moe, weights, index)
    name = f"model.layers.{index}.mlp"
    return GatedMLP.load(weights, name, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
