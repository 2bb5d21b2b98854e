"""``DecoderModel``: the common part of all decoders with a native implementation, from token ids to logits."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from quire_proto.pooling import Task
from torch.nn.functional import linear

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.checkpoint.gguf_checkpoint import GgufTensors
from quire_engine.checkpoint.pooler_config import read_sentence_modules
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.config.capabilities import NATIVE, NO_EXPERTS, CapabilityRow
from quire_engine.core.executor import WeightStats
from quire_engine.errors import ModelError, first_line
from quire_engine.layers.decoder_stack import DecoderStack
from quire_engine.layers.offloaded import load_offloaded_layers
from quire_engine.layers.streamed import Layer, load_layers
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.lora.layers import LoRALayers
from quire_engine.models.base import Classifier, LayeredModel, ShardTable

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
_SCORE, _HEAD = "score.weight", "lm_head.weight"
_HEADS = (_SCORE, _HEAD)


class DecoderModel(LayeredModel):
    """A decoder with its weights, or a rank's shard of it.

    A subclass defines a layer, its fields in ``config.json``, and the names of its tensors in GGUF files. If a model is
    ``capturable`` and on the CPU, its layers use torch only for memory and views: compiled kernels compute everything
    except adapters.
    """

    gguf: ClassVar[GgufTensors]
    """The names of its tensors in GGUF files, if it can be read from them."""

    @classmethod
    @abstractmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """Returns the fields of ``DecoderConfig`` that differ from the defaults for this architecture. ``hf`` is
        transformers' configuration of the file ``path``. Raises ``ModelError``.
        """

    @classmethod
    @abstractmethod
    def load_layer(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> Layer:
        """Loads layer ``index``."""

    @classmethod
    def capability_rows(cls, config: DecoderConfig) -> Sequence[CapabilityRow]:
        """See ``Model``."""
        return (NATIVE,) if cls.shard_table(config).has_experts else (NATIVE, NO_EXPERTS)

    @classmethod
    def load(cls, config: DecoderConfig, folder: Path, weights: WeightLoader) -> Self:
        """See ``Model``. Creates adapter slots if the options of ``weights`` ask for them."""
        del folder
        options = weights.options
        with torch.inference_mode():
            if options.num_lora_slots:
                rank, slots = options.config.max_lora_rank, options.num_lora_slots
                weights = replace(weights, loras=LoRALayers(slots, rank, weights.dtype, weights.device))
            try:
                model = cls(config, weights)
            except torch.OutOfMemoryError as error:
                reason = f"The weights do not fit into the GPU's memory: {first_line(error)}"
                raise ModelError(f"{reason}; --cpu-offload-gb keeps some in the host's.") from None
        if weights.communicator.rank == 0 and weights.stage is None:
            weights.checkpoint.mark_used(_HEADS if config.pooler_config is not None else ())
            weights.checkpoint.log_unused()
        return model

    def load_classifier(self, config: DecoderConfig, folder: Path, device: torch.device) -> Classifier | None:
        """See ``Model``. Uses the ``score`` layer of ``folder``. If sentence-transformers' ``LogitScore`` is
        configured, uses the head's rows for the tokens that it compares: the first row, minus the second if there are
        two. None if the model makes embeddings.
        """
        pooler = config.pooler_config
        if pooler is None or pooler.task is not Task.CLASSIFY:
            return None
        checkpoint, modules = Checkpoint(folder), read_sentence_modules(folder)
        if modules is None or not modules.score_tokens:
            weight = checkpoint.load_fused([_SCORE], [(pooler.pooled_size, config.hidden_size)], torch.float32, device)
            return partial(linear, weight=weight)
        head, shape = _HEAD if _HEAD in checkpoint else EMBEDDING_WEIGHT, (config.vocab_size, config.hidden_size)
        rows = [checkpoint.load_row(head, shape, token, torch.float32, device) for token in modules.score_tokens]
        return partial(linear, weight=(rows[0] - rows[1] if len(rows) > 1 else rows[0])[None])

    @classmethod
    def stored_dtype(cls, checkpoint: Checkpoint) -> torch.dtype:
        """See ``Model``. The dtype of the embedding. If only the head is stored, because the two are tied, the dtype of
        the head.
        """
        has_head_alone = EMBEDDING_WEIGHT not in checkpoint and _HEAD in checkpoint
        return checkpoint.dtype(_HEAD if has_head_alone else EMBEDDING_WEIGHT)

    @classmethod
    def shard_table(cls, config: DecoderConfig) -> ShardTable:
        """See ``Model``. Experts are divided as wholes, dense networks by their inner dimension."""
        attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
        inner = [config.intermediate_size] * config.num_layers
        if config.moe is not None:
            experts = config.moe.num_experts * config.moe.moe_intermediate_size
            inner = [experts if is_moe else config.intermediate_size for is_moe in config.moe.is_moe_layer]
        has_dense = config.moe is None or not all(config.moe.is_moe_layer)
        dimensions = [(config.num_heads, "attention heads"), (config.num_kv_heads, "KV heads")]
        if has_dense:
            dimensions.append((config.intermediate_size, "inner numbers of the feed-forward part"))
        return ShardTable(
            dimensions,
            layer_costs=[attention + 3 * config.hidden_size * size for size in inner],
            head_cost=config.hidden_size * config.vocab_size,
            has_experts=config.moe is not None and any(config.moe.is_moe_layer),
        )

    @classmethod
    def lora_targets(cls, config: DecoderConfig) -> Mapping[str, tuple[int, int]]:
        """See ``Model``: the linear layers of attention and of dense feed-forward networks."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes: dict[str, tuple[int, int]] = {}
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            shapes |= {f"{layer}.self_attn.{part}_proj": shape for part, shape in attention.items()}
            if config.moe is None or not config.moe.is_moe_layer[index]:
                shapes |= {f"{layer}.mlp.{part}_proj": shape for part, shape in mlp.items()}
        return shapes

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        self.dtype = weights.dtype
        self.loras = weights.loras
        self._stage = stage = weights.stage
        self.communicator = weights.communicator
        self.hidden_size = config.hidden_size
        # Load these first: a table that is packed for both uses is then freed before the layers are read.
        head, tied = "lm_head" if config.makes_logits else None, config.tie_word_embeddings
        self._embedding, self._lm_head = weights.embedding_and_head(
            "model.embed_tokens", head, config.vocab_size, config.hidden_size, tied=tied
        )
        self.receives_states = self._embedding is None
        indices = range(config.num_layers)
        if stage is not None:
            indices = self.shard_table(config).stages(stage.count)[stage.index]
        self._stack = DecoderStack(config, weights, *self._load_layers(config, weights, indices))
        self.weight_stats = self._stack.weight_stats
        self.attention_layers = tuple(layer.attn for layer in self._stack.layers)
        # On CUDA the whole forward pass is captured, so it must not receive from another stage. Only the host knows
        # which tokens go to which rank.
        receives = stage is not None and weights.device.type == "cuda"
        self.capturable = not (receives or weights.sends_tokens) and self._stack.is_capturable

    @property
    def waits_for_device(self) -> bool:
        """See ``Model``."""
        return self._stack.waits_for_device

    @classmethod
    def _load_layers(
        cls, config: DecoderConfig, weights: WeightLoader, indices: range
    ) -> tuple[Sequence[Layer], WeightStats | None]:
        def load(index: int) -> Layer:
            return cls.load_layer(config, weights, index)

        settings = weights.options.config
        if settings.cpu_offload_gb:
            return load_offloaded_layers(indices, load, settings.cpu_offload_gb, weights.device)
        return load_layers(indices, load, settings.weights_memory_gb)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See ``LayeredModel.embed``."""
        if self._embedding is not None:
            return self._embedding(token_ids)
        assert self._stage is not None, "another stage than the first"
        empty = torch.empty(len(token_ids), self.hidden_size, dtype=self.dtype, device=token_ids.device)
        return self._stage.receive(empty)

    def layers(
        self, states: torch.Tensor, positions: torch.Tensor, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """See ``LayeredModel.layers``. A step with adapters is not split, because its rows are assigned to adapters for
        the whole step.
        """
        has_loras = self.loras is not None and self.loras.is_active
        may_split = self.communicator.overlaps_sums and not has_loras
        return self._stack(states, positions, kv, attention, may_split=may_split)

    def execute_dummy_batch(self, device: torch.device) -> None:
        """See ``Model.execute_dummy_batch``: its experts compute the tokens of other engines."""
        self._stack.experts_only(torch.empty(0, self.hidden_size, dtype=self.dtype, device=device))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``. In a pipeline, only the last stage has it."""
        assert self._lm_head is not None, "another stage than the last"
        return self._lm_head(hidden)
