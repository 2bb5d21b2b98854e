"""All of a torch executor but its KV memory: the model, its attention, and what blocks for it look like. Knows no
plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.config import EngineArgs
from quire_engine.executor.torch.backends import check_attention, make_attention
from quire_engine.executor.torch.graphs import capture_sizes
from quire_engine.executor.torch.kv_cache import KVCache, min_cache_sizes
from quire_engine.executor.torch.sizing import CacheSizes
from quire_engine.models.base import Model
from quire_engine.models.config import AttentionLayout, ModelConfig
from quire_engine.models.errors import ModelError
from quire_engine.models.loading import load_model
from quire_engine.models.options import LoadOptions
from quire_engine.models.ranks import SINGLE_RANK, Communicator


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``max_model_len`` is the longest sequence in tokens. ``graph_sizes`` are the batch sizes of decode steps that are
    recorded as graphs on a GPU, where model and attention allow it; where there are any, the CPU records tapes.
    """

    config: ModelConfig
    model: Model
    attention: AttentionBackend
    block_size: int
    max_model_len: int
    device: torch.device
    graph_sizes: Sequence[int] = ()

    @property
    def min_cache_sizes(self) -> CacheSizes:
        """The least KV memory that anything can be run with. Raises ``ModelError`` for an impossible block size."""
        return min_cache_sizes(self.model.layout, self.block_size, self.model.dtype)

    def make_kv_cache(self, pools: CacheSizes) -> KVCache:
        """KV memory for this model. Raises ``ModelError`` where it cannot be had."""
        return KVCache(self.model.layout, self.block_size, pools, self.model.dtype, self.device)


def load_model_and_attention(
    config: EngineArgs, model_config: ModelConfig, device: torch.device, ranks: Communicator = SINGLE_RANK
) -> LoadedModel:
    """The model of ``config``, described by ``model_config``, on ``device``, and its attention; of a model that several
    ``ranks`` share, this one's part. Raises ``ModelError``, for settings that cannot be before the weights are read.
    """
    length = _max_model_len(model_config, config.max_model_len)
    deterministic = config.deterministic
    check = partial(check_attention, config.attention, device, deterministic=deterministic)
    model = load_model(model_config, config.model, LoadOptions(config, device, ranks), check)
    shape = _attention_shape(model.layout, config.block_size)
    backend = make_attention(config.attention, shape, device, model.dtype, deterministic=deterministic)
    graph_sizes = () if config.enforce_eager else capture_sizes(config.max_num_seqs)
    return LoadedModel(model_config, model, backend, config.block_size, length, device, graph_sizes)


def _max_model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_length
    if not 1 <= asked <= config.max_length:
        raise ModelError(
            f"The model length is set to {asked} tokens, but this model's is between 1 and {config.max_length}."
        )
    return asked


def _attention_shape(layout: AttentionLayout, block_size: int) -> AttentionShape:
    return AttentionShape(layout.num_heads, layout.num_kv_heads, layout.head_dim, block_size, layout.scale)
