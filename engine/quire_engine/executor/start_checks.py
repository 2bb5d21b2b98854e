"""What an engine is refused for when it starts, before weights are read or other processes started: features that its
model or its device does not have, and ranks that cannot share them.
"""

import logging

import torch

from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE
from quire_engine.checkpoint.config import ModelConfig
from quire_engine.checkpoint.support import check_max_model_len
from quire_engine.config import EngineArgs
from quire_engine.config.capabilities import DEVICES, REFERENCE_ON_CUDA, find_refusal
from quire_engine.device.host import usable_cores
from quire_engine.errors import ModelError
from quire_engine.models.loader import capability_rows, model_class

log = logging.getLogger(__name__)

MAX_RANKS = 64


def check_start(engine: EngineArgs, config: ModelConfig, device: torch.device, nnodes: int = 1) -> None:
    """Raises ``ModelError`` if the model of ``config`` cannot be run on ``device`` as ``engine`` says, by ranks on
    ``nnodes`` machines. Logs a warning if it can, but will be slow.
    """
    rows = [*capability_rows(config), DEVICES[device.type]]
    if device.type == "cuda" and engine.attention == "reference":
        rows.append(REFERENCE_ON_CUDA)
    facts = {**engine.model_dump(), "architecture": config.architecture, "device": device}
    refusal = find_refusal(rows, engine.features, facts)
    if refusal is not None:
        raise ModelError(refusal)
    if engine.enable_dbo and device.type == "cuda" and engine.dbo_prefill_token_threshold < MAX_GRAPH_BATCH_SIZE:
        raise ModelError(
            f"--dbo-prefill-token-threshold {engine.dbo_prefill_token_threshold} would divide steps that are CUDA "
            f"graphs: give at least {MAX_GRAPH_BATCH_SIZE}."
        )
    check_max_model_len(engine.max_model_len, config.max_length)
    _check_ranks(engine, config, device, nnodes)


def _check_ranks(engine: EngineArgs, config: ModelConfig, device: torch.device, nnodes: int) -> None:
    tensor_size, num_stages, size = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.num_ranks
    if engine.data_parallel_size * tensor_size > MAX_RANKS:
        raise ModelError(f"{engine.data_parallel_size * tensor_size} ranks of all engines are more than {MAX_RANKS}.")
    if size == 1:
        return
    table = model_class(config).shard_table(config)
    assert table is not None, "a model that runs in one process is refused several"
    for count, name in table.dimensions:
        if count % tensor_size:
            raise ModelError(
                f"The tensor parallel size is {tensor_size}, which does not divide the model's {count} {name}."
            )
    num_layers = len(table.layer_costs)
    if num_stages > num_layers:
        raise ModelError(f"The pipeline parallel size is {num_stages}, and the model has {num_layers} layers.")
    if size > MAX_RANKS:
        raise ModelError(f"{tensor_size} × {num_stages} ranks are more than {MAX_RANKS}.")
    _check_device(size // nnodes, device)


def _check_device(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if size > gpus:
            raise ModelError(f"The model is to have {size} ranks on one machine, and {gpus} GPUs can be used here.")
    elif size > usable_cores():
        log.warning("%d ranks share %d cores: they will wait for each other", size, usable_cores())
