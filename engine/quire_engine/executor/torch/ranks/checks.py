"""Whether a model can be shared by so many ranks. Said before anything is started or read."""

import logging

import torch

from quire_engine.executor.torch.threads import usable_cores
from quire_engine.models.config import DecoderConfig, ModelConfig
from quire_engine.models.errors import ModelError

log = logging.getLogger(__name__)


def check_tensor_parallel_size(config: ModelConfig, size: int, device: torch.device) -> None:
    """Raises ``ModelError`` where ``size`` ranks cannot share the model or the device. Warns where they can, but
    will be slow.
    """
    if size == 1:
        return
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"The tensor parallel size is {size}, and {config.architecture} runs through transformers, where models "
            "are not divided."
        )
    for count, name in _sharded_dimensions(config):
        if count % size:
            raise ModelError(f"The tensor parallel size is {size}, which does not divide the model's {count} {name}.")
    _check_device(size, device)


def _sharded_dimensions(config: DecoderConfig) -> list[tuple[int, str]]:
    dense = config.moe is None or not all(config.moe.is_moe_layer)
    inner = [(config.intermediate_size, "inner numbers of the feed-forward part")] if dense else []
    return [(config.num_heads, "attention heads"), (config.num_kv_heads, "KV heads"), *inner]


def _check_device(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if size > gpus:
            raise ModelError(f"The tensor parallel size is {size}, and {gpus} GPUs can be used here.")
    elif size > usable_cores():
        log.warning("%d ranks share %d cores: they will wait for each other", size, usable_cores())
