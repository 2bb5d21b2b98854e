"""``load_core`` loads a model and makes the core that runs it, with everything that a server tells of it."""

import logging
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING

from quire.v1 import engine_pb2 as pb
from quire_proto import __version__
from quire_proto.convert import TASK_TO_PROTO
from quire_proto.text.model_folder import folder_config_digest, folder_vocabulary_digest

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder_if_any
from quire_engine.config import EngineConfig
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.startup import StartupTimer, report_facts
from quire_engine.core.step_recording import RecordedEngine, StepRecorder
from quire_engine.core_client.client import LoadedCore
from quire_engine.core_client.core_thread import CoreThread
from quire_engine.factory import (
    block_revision,
    load_executor,
    make_scheduler,
    model_grammars,
    settings_digest,
    supported_tasks,
)

if TYPE_CHECKING:
    from quire_engine.executor.torch_executor import TorchExecutor

log = logging.getLogger(__name__)


def load_core(config: EngineConfig, startup: StartupTimer, on_lost: Callable[[str], None]) -> LoadedCore:
    """Loads the model into this process and the processes of its ranks. ``on_lost`` is called, on another thread, with
    the reason why a model that several processes share cannot run any more. Raises ``ModelError``.
    """
    executor = load_executor(config, on_lost, owns_process=True, nodes=config, startup=startup)
    scheduler = make_scheduler(config, executor)
    description = _describe(config, executor, scheduler)
    report_facts(
        dtype=description.dtype,
        device=description.device,
        max_model_len=description.max_model_len,
        kv_tokens=description.blocks_total // max(1, description.kv_cache_groups) * description.block_size,
    )
    runner = CoreThread(
        scheduler,
        executor,
        check_lora=executor.check_lora,
        weights=executor.weight_stats,
        data_parallel=executor.data_parallel,
        sleeper=executor if executor.can_sleep else None,
        recorder=_make_recorder(config, executor),
    )
    return LoadedCore(runner, description, model_grammars(config, executor))


def _make_recorder(config: EngineConfig, executor: "TorchExecutor") -> StepRecorder | None:
    """Returns the recorder of all steps; None without ``--record-steps``, or where its file cannot be made."""
    if config.record_steps is None:
        return None
    engine = RecordedEngine(config.names[0], executor.config.vocab_size, executor.kv_cache_config)
    try:
        return StepRecorder(config.record_steps, engine, int(config.record_steps_gib * (1 << 30)))
    except FileExistsError:
        log.warning("no steps are recorded: %s exists; choose a new name", config.record_steps)
    except OSError as error:
        log.warning("no steps are recorded: %s", error)
    return None


def _describe(config: EngineConfig, executor: "TorchExecutor", scheduler: Scheduler) -> pb.DescribeResponse:
    from quire_engine.device.accelerator import product_name, resolve_device

    folder = tokenizer_folder_if_any(config.model)
    pooler = executor.config.pooler_config
    return pb.DescribeResponse(
        served_model_names=config.names,
        model_revision=block_revision(config, executor),
        max_model_len=scheduler.config.max_model_len,
        vocab_size=executor.config.vocab_size,
        eos_token_ids=executor.config.eos_token_ids,
        block_size=executor.kv_cache_config.block_size,
        kv_cache_groups=len(executor.kv_cache_config.groups),
        blocks_total=executor.kv_cache_config.device_blocks - 1,
        host_blocks_total=executor.kv_cache_config.host_blocks,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=executor.dtype_name,
        version=__version__,
        prefix_caching=scheduler.kv_cache_manager.prefix_caching,
        tokenizer_digest=folder_vocabulary_digest(folder),
        config_digest=folder_config_digest(folder),
        unbounded_steps=config.max_step_seconds == 0,
        max_loras=config.max_loras if config.enable_lora else 0,
        supported_tasks=[TASK_TO_PROTO[task] for task in supported_tasks(executor)],
        pooled_size=0 if pooler is None else pooler.pooled_size,
        matryoshka_dimensions=() if pooler is None else pooler.matryoshka_dimensions,
        best_effort=True,
        can_sleep=executor.can_sleep,
        shared_device=config.shared_device or "",
        settings_digest=settings_digest(config, executor.dtype_name),
        device=product_name(resolve_device(config.device)),
        started=time(),
    )
