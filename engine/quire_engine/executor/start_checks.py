"""What an engine is refused for when it starts, before weights are read or other processes started."""

import logging

import torch

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs
from quire_engine.device.host import usable_cores
from quire_engine.errors import ModelError
from quire_engine.models.base import ShardTable
from quire_engine.models.loader import model_class

log = logging.getLogger(__name__)

MAX_RANKS = 64


def check_parallel_sizes(engine: EngineArgs, config: ModelConfig, device: torch.device, nnodes: int = 1) -> None:
    """Raises ``ModelError`` when the ranks that ``engine`` asks for cannot share the model or the device, and logs a
    warning when they can but will be slow. Called before anything is started or read. ``nnodes`` machines have as many
    of them each.
    """
    tensor_size, num_stages, size = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.num_ranks
    table = model_class(config).shard_table(config)
    if engine.data_parallel_size > 1:
        _check_experts(engine.data_parallel_size * tensor_size, config.architecture, table)
    if size == 1:
        return
    if table is None:
        name, asked = ("tensor", tensor_size) if tensor_size > 1 else ("pipeline", num_stages)
        raise ModelError(
            f"The {name} parallel size is {asked}, and {config.architecture} runs through transformers, where models "
            "are not divided."
        )
    if engine.all2all_backend == "alltoall" and not table.has_experts:
        raise ModelError(
            f"--all2all-backend alltoall is for models with experts, and {config.architecture} has none: leave it out."
        )
    for count, name in table.dimensions:
        if count % tensor_size:
            raise ModelError(
                f"The tensor parallel size is {tensor_size}, which does not divide the model's {count} {name}."
            )
    if num_stages > 1 and config.pooler_config is not None:
        raise ModelError(
            f"The pipeline parallel size is {num_stages}, and models that pool prompts are not divided into stages."
        )
    num_layers = len(table.layer_costs)
    if num_stages > num_layers:
        raise ModelError(f"The pipeline parallel size is {num_stages}, and the model has {num_layers} layers.")
    if size > MAX_RANKS:
        raise ModelError(f"{tensor_size} × {num_stages} ranks are more than {MAX_RANKS}.")
    _check_device(size // nnodes, device)


def _check_experts(size: int, architecture: str, table: ShardTable | None) -> None:
    if table is None or not table.has_experts:
        raise ModelError(
            "--data-parallel-size is for engines that share the experts of a model, and "
            f"{architecture} has none that can be shared: start several engines without it."
        )
    if size > MAX_RANKS:
        raise ModelError(f"{size} ranks of all engines are more than {MAX_RANKS}.")


def _check_device(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if size > gpus:
            raise ModelError(f"The model is to have {size} ranks on one machine, and {gpus} GPUs can be used here.")
    elif size > usable_cores():
        log.warning("%d ranks share %d cores: they will wait for each other", size, usable_cores())
