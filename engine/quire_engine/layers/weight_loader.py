"""``WeightLoader``: makes the layers of a model from a checkpoint's tensors, sharded among the ranks as in Megatron-LM
(Shoeybi et al. 2019).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, largest_shard_size, shard
from quire_engine.distributed.pipeline import PipelineStage, is_first, is_last
from quire_engine.layers.linear import GatheredColumnParallelLinear, RowParallelLinear
from quire_engine.lora.layers import LoRALayers
from quire_engine.quantization.base import Embedding, LayerSpec, Linear, QuantizationConfig
from quire_engine.quantization.schemes import make_quantization

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightLoader:
    """Loads a checkpoint's tensors and linear layers in one ``dtype``, held as ``options`` say. Of a layer that ranks
    share, it reads only this rank's shard. ``quantized`` is the checkpoint's ``quantization_config``, if it has one.
    With ``loras``, the layers from the column and row parallel methods get slots for adapters.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    options: LoadOptions
    quantized: dict[str, Any] | None = None
    loras: LoRALayers | None = None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.options.device

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the model."""
        return self.options.communicator

    @property
    def token_communicator(self) -> Communicator:
        """The ranks that share the tokens of a step in norms and routers. These are the ranks of ``communicator`` if
        tokens are sent to the ranks of their experts. Otherwise this rank has all tokens.
        """
        return self.communicator if self.sends_tokens else SINGLE_RANK

    @property
    def expert_communicator(self) -> Communicator:
        """The ranks that share the experts: the ranks of ``communicator``, or of all engines of a data-parallel
        group.
        """
        return self.options.expert_communicator or self.communicator

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens are sent to the ranks of their experts, as they always are between engines."""
        config = self.options.config
        return config.data_parallel_size > 1 or (self.communicator.size > 1 and config.all2all_backend == "alltoall")

    @property
    def stage(self) -> PipelineStage | None:
        """The pipeline stage whose layers are loaded; None for a model without a pipeline."""
        return self.options.stage

    @cached_property
    def quantization(self) -> QuantizationConfig:
        """The quantization of the layers."""
        return make_quantization(self.options, self.dtype, self.quantized)

    def load_fused(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], communicator: Communicator = SINGLE_RANK
    ) -> torch.Tensor:
        """Loads this rank's shards of the named tensors, concatenated in their first dimension, which ``communicator``
        shares. By default loads the tensors whole.
        """
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device, communicator=communicator)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Loads unsharded linear layers with the same input, fused into one: their outputs are concatenated."""
        return self._linear(LayerSpec(names, outputs, inputs), bias=bias)

    def column_parallel_linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool
    ) -> Linear:
        """Loads linear layers with the same input, fused into one: this rank's shard of each layer's outputs,
        concatenated.
        """
        spec = LayerSpec(names, outputs, inputs, communicator=self.communicator)
        return self._with_loras(self._linear(spec, bias=bias), spec)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """Loads a linear layer that takes this rank's shard of the inputs. All ranks get the whole output, or their own
        tokens' output if they share the tokens.
        """
        spec = LayerSpec([name], [outputs], inputs, dim=1, communicator=self.communicator)
        added = self.load_fused([f"{name}.bias"], [(outputs,)]) if bias and self.communicator.rank == 0 else None
        method = self.quantization.linear
        part = self._with_loras(method.pack(method.read(self.checkpoint, spec), added), spec)
        if self.communicator.size == 1:
            return part
        return RowParallelLinear(part, self.communicator, scatter=self.token_communicator.size > 1)

    def router(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
        """Loads an unsharded layer that routes tokens to experts."""
        method, spec = self.quantization.router, LayerSpec([name], [outputs], inputs)
        return method.pack(method.read(self.checkpoint, spec), self._load_biases(spec) if bias else None)

    def embedding_and_head(
        self, embedding: str, head: str | None, vocabulary: int, hidden: int, *, tied: bool
    ) -> tuple[Embedding | None, Linear | None]:
        """Loads the embedding and the head, a layer without bias that computes logits. Returns None for each that this
        stage does not have.

        Every rank of the first stage holds the whole embedding. Each rank of the last stage holds a shard of the head,
        and the first of them gathers the logits. Without ``head``, the embedding's weight computes the logits. If
        ``tied``, both are one weight, unless both are stored and differ: the embedding's, or the head's if only that is
        stored.
        """
        method, has_table, has_head = self.quantization.head, is_first(self.stage), is_last(self.stage)
        if head is None:
            head = embedding
        elif tied:
            embedding, head = self._stored_of_tied(embedding, head)
        table = method.read(self.checkpoint, LayerSpec([embedding], [vocabulary], hidden)) if has_table else None
        if table is not None and has_head and head == embedding and self.communicator.size == 1:
            return method.pack_tied(table)
        packed = None if table is None else method.pack_embedding(table)
        if not has_head:
            return packed, None
        if table is not None and head == embedding:
            weight = table[shard(vocabulary, self.communicator)]
        else:
            weight = method.read(self.checkpoint, LayerSpec([head], [vocabulary], hidden, 0, self.communicator))
        if self.communicator.size == 1:
            return packed, method.pack(weight, None)
        num_padding = largest_shard_size(vocabulary, self.communicator) - len(weight)
        padded = torch.cat((weight, weight.new_zeros(num_padding, hidden))) if num_padding else weight
        return packed, GatheredColumnParallelLinear(method.pack(padded, None), vocabulary, self.communicator)

    def _stored_of_tied(self, embedding: str, head: str) -> tuple[str, str]:
        """Returns the stored names of a tied embedding and head, as transformers resolves them."""
        names = [set(self.quantization.head.tensor_names(layer)) for layer in (embedding, head)]
        has_embedding, has_head = (any(name in self.checkpoint for name in each) for each in names)
        if not has_head:
            return embedding, embedding
        if not has_embedding:
            return head, head
        if self.checkpoint.are_equal(f"{embedding}.weight", f"{head}.weight", self.dtype):
            self.checkpoint.mark_used(names[1])
            return embedding, embedding
        log.warning("config.json ties the head to the embedding, but another head is stored: that one is used")
        return embedding, head

    def _linear(self, spec: LayerSpec, *, bias: bool) -> Linear:
        method = self.quantization.linear
        weight = method.read(self.checkpoint, spec)
        added = self._load_biases(spec) if bias else None
        return method.pack(weight, added)

    def _with_loras(self, layer: Linear, spec: LayerSpec) -> Linear:
        return layer if self.loras is None else self.loras.wrap(layer, spec)

    def _load_biases(self, spec: LayerSpec) -> torch.Tensor:
        names, shapes = [f"{name}.bias" for name in spec.names], [(size,) for size in spec.outputs]
        return self.load_fused(names, shapes, spec.communicator)
