"""Builds an engine's executor, scheduler and grammar compiler from its settings. Imports torch only when a model is
loaded.
"""

import gc
import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from quire_proto.pooling import Task

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder_if_any
from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.core.batch_scheduler import StepPolicy, continuous_batching
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.startup import StartupTimer
from quire_engine.structured_output.compiler import GrammarCompiler, ModelGrammars

if TYPE_CHECKING:
    from quire_engine.executor.torch_executor import TorchExecutor

log = logging.getLogger(__name__)

OFFLINE_GRAMMAR_BYTES = 1 << 30


def load_executor(
    config: EngineArgs,
    on_lost: Callable[[str], None] | None = None,
    *,
    owns_process: bool = False,
    nodes: NodeArgs | None = None,
    startup: StartupTimer | None = None,
) -> "TorchExecutor":
    """Loads the model onto its device and allocates its KV memory. ``on_lost`` is called, on another thread, with the
    reason why a model that several processes share cannot run any more. The others are as in ``TorchExecutor.load``; if
    the engine ``owns_process`` and torch was not imported before, oneDNN's caches are limited too. Raises
    ``ModelError``.
    """
    if owns_process:
        from quire_engine.device.host import limit_onednn_caches

        limit_onednn_caches()
        gc.disable()  # what is imported stays: looking for garbage among 1,500 modules takes a tenth of the time
    from quire_engine.executor.torch_executor import TorchExecutor

    if owns_process:
        gc.freeze()
        gc.enable()
    return TorchExecutor.load(config, on_lost, owns_process=owns_process, nodes=nodes, startup=startup)


def make_scheduler(
    config: EngineArgs, executor: "TorchExecutor", step_policy: StepPolicy = continuous_batching
) -> Scheduler:
    """A scheduler for this executor, with empty pools."""
    limits = SchedulerConfig.of(
        config,
        max_num_seqs=max_num_seqs(config, executor),
        max_model_len=_max_servable_length(executor.max_model_len, executor.kv_cache_config),
        eos_token_ids=frozenset(executor.config.eos_token_ids),
        vocab_size=executor.config.vocab_size,
        model_revision=block_revision(config, executor),
        num_stages=config.pipeline_parallel_size,
        supported_tasks=supported_tasks(executor),
        pooler_config=executor.config.pooler_config,
        enable_chunked_prefill=executor.config.is_causal,
    )
    memory = KVCacheManager(
        executor.kv_cache_config,
        prefix_caching=config.enable_prefix_caching and executor.config.is_causal,  # an encoder's blocks hold nothing
        host_caching=config.enable_host_caching,
        disk=executor.disk_contents,
    )
    return Scheduler(limits, memory, rates=executor.rates, step_policy=step_policy)


def max_num_seqs(config: EngineArgs, executor: "TorchExecutor") -> int:
    """How many sequences run at once: as the settings say, or as many as there is memory for their states."""
    states = executor.kv_cache_config.states
    return config.max_num_seqs if states is None else states.max_num_seqs


def supported_tasks(executor: "TorchExecutor") -> frozenset[Task]:
    """What requests may ask this executor's model for."""
    pooler = executor.config.pooler_config
    return frozenset({Task.GENERATE if pooler is None else pooler.task})


def block_revision(config: EngineArgs, executor: "TorchExecutor") -> str:
    """What the hashes of KV blocks name as the model's revision: blocks whose rows are held in another dtype than the
    model's own are other blocks.
    """
    revision = executor.config.model_revision
    return revision if config.kv_cache_dtype == "auto" else f"{revision}+kv-{config.kv_cache_dtype}"


def settings_digest(config: EngineArgs, dtype_name: str) -> bytes:
    """What of the settings decides which numbers the weights give, 8 bytes: the element types of weights and KV memory,
    and the quantization. The same in all releases, as it is part of what routers store of an answer. What changes
    rounding alone, as devices, kernels and ranks do, is no other version of a model.
    """
    kv_cache_dtype = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    facts = f"dtype={dtype_name} kv_cache_dtype={kv_cache_dtype} quantization={config.quantization or 'none'}"
    return blake2b(facts.encode(), digest_size=8, person=b"quire settings").digest()


def model_grammars(config: EngineArgs, executor: "TorchExecutor", tokenizer: Path | None = None) -> ModelGrammars:
    """The grammar backend of this executor's model, with the model's tokenizer, or that of another folder. Costs
    nothing before the first grammar.
    """
    folder = tokenizer_folder_if_any(config.model) if tokenizer is None else tokenizer
    return ModelGrammars(folder, executor.config.vocab_size, executor.config.eos_token_ids)


def make_grammar_compiler(
    config: EngineArgs, executor: "TorchExecutor", tokenizer: Path | None = None
) -> GrammarCompiler:
    """The grammar compiler of the offline API, whose callers may submit many grammars at once. ``tokenizer`` as of
    ``model_grammars``.
    """
    return GrammarCompiler(model_grammars(config, executor, tokenizer), max_alive_bytes=OFFLINE_GRAMMAR_BYTES)


def _max_servable_length(max_model_len: int, capacity: KVCacheConfig) -> int:
    """The longest request to accept, in tokens: the model's limit, but no more than the KV pool can hold."""
    if capacity.usable_tokens < max_model_len:
        log.warning(
            "the KV pool holds %d tokens, so requests are limited to that instead of the model's %d; "
            "raise --kv-cache-memory to change it",
            capacity.usable_tokens,
            max_model_len,
        )
    return min(max_model_len, capacity.usable_tokens)
