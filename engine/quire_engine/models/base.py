"""``Model``: the interface of a model to the engine. Nothing outside of ``models`` depends on a model's class."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV
from quire_engine.attention.state_cache import RecurrentLayers
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.config.capabilities import CapabilityRow
from quire_engine.core.executor import WeightStats
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator
from quire_engine.distributed.pipeline import divide
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.lora.layers import LoRALayers

Classifier = Callable[[torch.Tensor], torch.Tensor]
"""Returns float32 scores [S, classes] of pooled float32 hidden states [S, hidden]."""


@dataclass(frozen=True, slots=True)
class ShardTable:
    """How ranks may share a model.

    The tensor parallel size must divide each of ``dimensions``, given as (size, name); errors use the name.
    ``layer_costs`` and ``head_cost`` are the numbers of weights that a step reads in each layer and in the head.
    ``has_experts`` says whether engines can share experts.
    """

    dimensions: Sequence[tuple[int, str]]
    layer_costs: Sequence[int]
    head_cost: int
    has_experts: bool = False

    def stages(self, count: int) -> list[range]:
        """Returns the layers of each of ``count`` pipeline stages, as even in cost as possible. The last stage has the
        head.
        """
        return divide(self.layer_costs, count, self.head_cost)


class Model(ABC):
    """A model with its weights, of one dtype on one device. All attributes are constant.

    ``attention_layers`` has the attention of each layer with KV memory. If ``capturable``, the host never branches on
    results of the device. Then ``forward`` can be captured in a CUDA graph, and on the CPU in a CPU graph if the ranks
    of ``communicator`` allow it. ``loras`` are the layers that adapters may change; None without adapter slots.
    ``weight_stats`` count reads of layers on disk or in host memory; None if no layer is offloaded.
    ``recurrent_layers`` keep a state instead of keys and values; None without such layers.
    """

    attention_layers: Sequence[LayerAttention]
    dtype: torch.dtype
    capturable: bool = False
    communicator: Communicator = SINGLE_RANK
    loras: LoRALayers | None = None
    weight_stats: WeightStats | None = None
    recurrent_layers: RecurrentLayers | None = None

    @classmethod
    @abstractmethod
    def capability_rows(cls, config: Any) -> Sequence[CapabilityRow]:
        """Returns the rows of the capability table that apply to the kind of model that ``config`` describes."""

    @classmethod
    @abstractmethod
    def load(cls, config: Any, folder: Path, weights: WeightLoader) -> "Model":
        """Loads the model of ``folder``, which ``config`` describes, with its ``weights``. Raises ``ModelError``."""

    def load_classifier(self, config: Any, folder: Path, device: torch.device) -> Classifier | None:
        """Returns the classifier that scores pooled hidden states, if the model has one. Raises ``ModelError``."""
        del config, folder, device
        return None

    @classmethod
    def stored_dtype(cls, checkpoint: Checkpoint) -> torch.dtype:
        """Returns the default dtype for computing with a model of ``checkpoint``. Raises ``ModelError``."""
        return checkpoint.dominant_dtype()

    @classmethod
    def shard_table(cls, config: Any) -> ShardTable | None:
        """Returns how ranks may share the model of ``config``; None if it runs in one process."""
        del config
        return None

    @classmethod
    def lora_targets(cls, config: Any) -> Mapping[str, tuple[int, int]]:
        """Returns the linear layers that adapters may change in the model of ``config``: [out, in] by name."""
        del config
        return {}

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads what a layer computes, so that launching a pass takes as long as computing it."""
        return False

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns hidden states [T, hidden] of tokens [T] at positions [T], both integers.

        ``kv`` are views of the KV memory as ``BlockLayout.views`` returns them. ``attention``, which was prepared for
        this batch, reads and writes them. ``token_types`` [T] int64 are 1 in the second text of a pair and else 0; None
        if the batch has no pairs. Raises ``IndexError`` for a token id outside of the vocabulary.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, vocabulary] of hidden states [R, hidden]. Pass only the rows that sample."""

    def execute_dummy_batch(self, device: torch.device) -> None:
        """Takes part in a forward pass of other engines without tokens. Does nothing for a model without experts."""
        del device

    @property
    def layered(self) -> "LayeredModel | None":
        """This model if its forward pass is ``layers`` of ``embed``, else None."""
        return None


class LayeredModel(Model):
    """A model whose forward pass is ``layers`` of ``embed``, which can be captured apart. If it ``receives_states``,
    ``embed`` receives its result from the previous stage of a pipeline.
    """

    hidden_size: int
    receives_states: bool = False

    @property
    def layered(self) -> "LayeredModel":
        """See ``Model.layered``."""
        return self

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        _token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model.forward``. Decoders do not tell token types apart."""
        return self.layers(self.embed(token_ids), positions, kv, attention)

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the states [T, hidden] of tokens [T] before the first of these layers, in fresh memory. Raises
        ``IndexError`` like ``forward``.
        """

    @abstractmethod
    def layers(
        self, states: torch.Tensor, positions: torch.Tensor, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """Returns hidden states [T, hidden], as ``forward`` does, from ``states`` [T, hidden], which it overwrites."""
