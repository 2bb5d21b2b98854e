"""``TorchExecutor``: loads a model, sizes its KV cache, and executes steps with a worker."""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire_proto import __version__
from quire_proto.pooling import PoolingParams

from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.config.capabilities import Feature, find_refusal
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.data_parallel import DataParallel
from quire_engine.core.executor import UNMEASURED, ExecutorError, SleepError
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.core.lora import DUMMY_LORA, LoRARequest
from quire_engine.core.startup import StartupPhase, StartupTimer
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.device.accelerator import configure_threads, resolve_device, usable_threads
from quire_engine.device.host import tune_malloc
from quire_engine.errors import LoRAError, ModelError
from quire_engine.executor.engine_group import EngineGroup, join_engines
from quire_engine.executor.multiproc import MultiprocLeader, compute_rank_cache_sizes
from quire_engine.executor.rank_disks import RankDisks
from quire_engine.executor.rank_worker import RankSettings
from quire_engine.executor.start_checks import check_start
from quire_engine.kernels.bindings import library
from quire_engine.models.loader import capability_rows, read_model_config
from quire_engine.worker.memory import (
    CacheSizes,
    MemoryProfiler,
    largest_step,
    measure_rates,
    memory_table,
)
from quire_engine.worker.model_runner import LoadedModel, ModelRunner
from quire_engine.worker.worker import AsyncStep, LocalRank, Ranks, Worker, on_device

log = logging.getLogger(__name__)

MakeRanks = Callable[[LoadedModel, CacheSizes], Ranks]


class TorchExecutor:
    """Executes one step at a time. Implements ``AsyncExecutor``. Use it from one thread.

    ``depth`` is the constant number of steps that may be in flight. ``config`` is the model's configuration,
    ``max_model_len`` the longest sequence in tokens, and ``rates`` the speeds measured after loading. ``weight_stats``
    counts the reads of layers that are kept on disk or in host memory, on rank 0; None if all layers stay on the
    device. If the executor shares experts with other ``engines``, they run their forward passes together.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache_sizes: CacheSizes,
        *,
        depth: int = 1,
        num_loras_held: int = 0,
        make_ranks: MakeRanks | None = None,
        engines: EngineGroup | None = None,
    ) -> None:
        self.config = model.config
        self.max_model_len = model.max_model_len
        self.weight_stats = model.model.weight_stats
        self.rates = UNMEASURED
        self.depth = depth
        with on_device(model.device):
            ranks = (make_ranks or _make_local_rank)(model, cache_sizes)
        num_tokens = min(depth * model.max_num_batched_tokens, model.max_model_len)
        self._kv_cache_config = replace(ranks.runner.kv_cache_config, max_step_tokens=num_tokens)
        run_pass = None
        if engines is not None:
            run_pass = partial(engines.run_pass, execute_dummy_batch=ranks.execute_dummy_batch)
        self._disks = RankDisks()
        report = self._disks.results.add
        self._worker = Worker(model, ranks, num_loras_held=num_loras_held, run_pass=run_pass, report=report)
        self._engines = engines
        self._is_closed = False
        self._close_ranks: Callable[[], object] = lambda: None

    @classmethod
    def load(
        cls,
        config: EngineArgs,
        on_lost: Callable[[str], None] | None = None,
        *,
        owns_process: bool = False,
        nodes: NodeArgs | None = None,
        startup: StartupTimer | None = None,
    ) -> "TorchExecutor":
        """Loads the model of ``config`` onto a device and makes its KV pools. Raises ``ModelError`` with one sentence
        if that is not possible.

        ``max_model_len`` defaults to the model's own limit. Without ``kv_cache_memory``, runs the largest step that
        ``max_num_batched_tokens`` and ``max_num_seqs`` allow, and gives the rest of the device's memory to the pools.
        ``gpu_memory_utilization`` limits the fraction of the memory that all of this may use (see ``worker.memory``).

        ``async_scheduling`` allows a step to be launched while another runs; ``_depth`` decides the default.
        ``enforce_eager`` disables graph capture.

        With a ``tensor_parallel_size`` or ``pipeline_parallel_size`` above 1, other processes share the model until
        ``close``. ``on_lost`` is called on another thread, with the reason, if they cannot continue. ``nodes``
        describes the machines of the ranks, if there are several; this machine is node 0 and waits for the others. With
        a ``data_parallel_size`` above 1, ``nodes`` says which engine of the group this is and where the engines meet.

        If the engine ``owns_process``, sets torch's thread count and the heap's treatment of freed memory for the
        process. ``startup`` times the phases.
        """
        nnodes = 1 if nodes is None else nodes.nnodes
        threads = (configure_threads if owns_process else usable_threads)(config.num_ranks // nnodes)
        model_config, device = read_model_config(config.model, config), resolve_device(config.device)
        check_start(config, model_config, device, nnodes)
        settings = RankSettings(config, model_config, str(device), threads, nnodes)
        with ExitStack() as opened:
            engines, leader = None, None
            if config.data_parallel_size > 1:
                engines = join_engines(config, model_config, device, nodes, on_lost)
                opened.callback(engines.close)
                settings = replace(settings, place=engines.place)
            if settings.size > 1:
                leader = MultiprocLeader(settings, on_lost, nodes, engines)
                opened.callback(leader.close)
            try:
                timer = startup or StartupTimer()
                executor = cls._load(settings, leader, engines, opened, timer, owns_process=owns_process)
                if engines is not None:
                    engines.lockstep.finish(executor.execute_dummy_batch)
            except ExecutorError as error:
                if engines is None:
                    raise
                raise ModelError(str(error)) from error  # another engine was lost during loading
            executor._close_ranks = weakref.finalize(executor, opened.pop_all().close)
        if leader is not None:
            leader.announce_ready()
        return executor

    @classmethod
    def _load(
        cls,
        settings: RankSettings,
        leader: MultiprocLeader | None,
        engines: EngineGroup | None,
        opened: ExitStack,
        startup: StartupTimer,
        *,
        owns_process: bool,
    ) -> "TorchExecutor":
        """Loads the model, or rank 0's shard of it, and makes an executor on all ranks. Its KV pools have the size that
        ``compute_rank_cache_sizes`` decides. ``opened`` collects what must be closed afterwards.
        """
        config = settings.engine
        profiler = MemoryProfiler(settings.device_for(0), settings.lora_bytes)
        group = settings.make_group(0) if leader is None else leader.group
        startup.begin(StartupPhase.KERNELS)
        if settings.device == "cpu" and settings.config.is_causal:  # encoders run without compiled kernels
            library()
        startup.begin(StartupPhase.WEIGHTS)
        model = settings.load(0, group)
        if owns_process and model.device.type == "cpu":
            tune_malloc()
        if leader is not None:
            leader.connect()
        elif engines is not None:
            opened.callback(group.close)
            with on_device(model.device):
                group.connect(engines.store, None, engines.store)
        if engines is not None:
            engines.connect(group)
        make_ranks = _make_local_rank if leader is None else leader.make_ranks
        startup.begin(StartupPhase.MEMORY)
        budget = model.cache_budget(config)
        with ExitStack() as profiled:
            make_smallest = partial(
                cls,
                model,
                model.min_cache_sizes,
                num_loras_held=config.num_loras_held,
                make_ranks=make_ranks,
                engines=engines,
            )
            run_largest = partial(cls._run_largest_step, make_smallest, config, profiled)
            work = run_largest if budget.kv_cache_bytes is None else None
            profiles = [profiler.profile(work)] if leader is None else leader.profile_memory(profiler, work)
        num_layers = settings.num_layers()
        decided = compute_rank_cache_sizes(budget, profiles, model.min_cache_sizes, num_layers, settings.nnodes)
        depth, held = _depth(config, model), config.num_loras_held
        startup.begin(StartupPhase.GRAPHS)
        executor = cls(model, decided.sizes, depth=depth, num_loras_held=held, make_ranks=make_ranks, engines=engines)
        startup.begin(StartupPhase.WARMUP)
        num_tokens = min(config.max_num_batched_tokens, model.max_model_len)
        if engines is not None:
            executor.execute_dummy_batch()  # a barrier: no timed step waits for an engine that still loads
        executor.rates = measure_rates(executor, num_tokens, model.config.vocab_size)
        capacity = executor.kv_cache_config
        capacity = replace(capacity, block_bytes=capacity.block_bytes * decided.num_layers // num_layers[0])
        for row in memory_table(budget, decided.profile, capacity, model.max_model_len):
            log.info("memory: %s", row)
        if config.kv_disk_path is not None:
            block_bytes = executor.kv_cache_config.block_bytes * sum(num_layers) // num_layers[0]
            executor.open_disk(config, config.kv_disk_path, block_bytes)
        return executor

    @classmethod
    def _run_largest_step(
        cls, make_executor: Callable[[], "TorchExecutor"], limits: EngineArgs, profiled: ExitStack
    ) -> None:
        """Runs the largest step that ``limits`` allow, on an executor with the least KV memory. ``profiled`` closes
        that executor, after its memory has been read, because the memory includes its graphs.
        """
        executor = profiled.enter_context(closing(make_executor()))
        block_size, vocab_size = executor.kv_cache_config.block_size, executor.config.vocab_size
        num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        length = executor.max_model_len
        lora = DUMMY_LORA if limits.enable_lora else None
        pooler = executor.config.pooler_config
        pooling = None if pooler is None else PoolingParams(pooler.task)
        step = largest_step(
            *(num_tokens, num_seqs, length, block_size, vocab_size),
            lora=lora,
            pooling=pooling,
            num_tables=executor.kv_cache_config.num_tables,
        )
        executor.execute_model(step)
        if lora is not None:
            executor.remove_lora(lora.lora_int_id)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The blocks of both pools. Constant."""
        return self._kv_cache_config

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations: ``float32`` or ``bfloat16``."""
        return str(self._worker.runner.dtype).removeprefix("torch.")

    @property
    def disk_contents(self) -> DiskContents | None:
        """What the disk tier held at the start; None without one."""
        return self._disks.contents

    @property
    def data_parallel(self) -> DataParallel | None:
        """This engine's part in its data-parallel group, or None if it is alone."""
        return None if self._engines is None else DataParallel(self._engines.lockstep, self.execute_dummy_batch)

    def execute_dummy_batch(self) -> None:
        """See ``DataParallel.execute_dummy_batch``."""
        assert self._engines is not None, "this engine is alone"
        with on_device(self._worker.device):
            self._engines.execute_dummy_batch(self._worker.ranks.execute_dummy_batch)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """See ``Executor.execute_model``."""
        launched = self.execute_model_async(scheduler_output)
        launched.sample_tokens()
        return launched.get_output()

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> AsyncStep:
        """See ``AsyncExecutor.execute_model_async`` and ``Worker.execute``."""
        step = self._worker.execute(scheduler_output)
        if self._engines is not None and scheduler_output.rows:
            step.output.waited_for_others = not self._engines.has_most_tokens
        return step

    def open_disk(self, config: EngineArgs, path: Path, block_bytes: int) -> None:
        """Opens the disk tier of the prefix cache in ``path``. ``block_bytes`` is the size of a block on all ranks
        together. If the disk cannot be used, logs a warning and serves without the tier.
        """
        space, fingerprint = int(config.kv_disk_space * (1 << 30)), self._fingerprint(config)
        if not self.kv_cache_config.host_blocks or space < block_bytes:
            log.warning("KV blocks are not kept on disk: --kv-disk-space or the host pool does not hold one")
            return

        def open_on_ranks(folder: str, num_slots: int) -> Sequence[Any]:
            return self._worker.call_all("open_disk", folder, fingerprint, num_slots)

        self._disks.open(path, space // block_bytes, block_bytes, config.num_ranks, open_on_ranks)

    def _fingerprint(self, config: EngineArgs) -> str:
        """Returns all that decides the numbers in a KV block, apart from what the block's hash covers."""
        numbers = (config.dtype, config.kv_cache_dtype, config.quantization, config.deterministic, config.attention)
        block_size = self._kv_cache_config.block_size
        facts = (__version__, self.config.model_revision, self.dtype_name, self._worker.device.type, block_size)
        sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
        return repr((facts, numbers, sizes))

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """See ``Executor.take_transfers``."""
        return self._disks.results.take(timeout)

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """See ``Worker.check_lora``. Raises ``LoRAError`` also if the model could have no adapters."""
        facts = {"architecture": self.config.architecture}
        if refusal := find_refusal(capability_rows(self.config), {Feature.LORA}, facts):
            raise LoRAError(f"This engine serves no adapters: {refusal}")
        return self._worker.check_lora(lora)

    def remove_lora(self, lora_id: int) -> None:
        """See ``Worker.drop_lora``."""
        self._worker.drop_lora(lora_id)

    @property
    def can_sleep(self) -> bool:
        """Whether this is a ``Sleeper``: no other engine needs its experts, and all its weights are in memory."""
        return self._engines is None and self.weight_stats is None

    def sleep(self) -> None:
        """See ``Sleeper.sleep``. If one rank cannot sleep, all ranks wake up again."""
        self._change_sleep("sleep", undo="wake_up")

    def wake_up(self) -> None:
        """See ``Sleeper.wake_up``. If one rank cannot wake up, all ranks sleep again."""
        self._change_sleep("wake_up", undo="sleep")

    def _change_sleep(self, change: str, *, undo: str) -> None:
        assert self.can_sleep, "it cannot sleep"
        if reasons := [answer for answer in self._worker.call_all(change) if answer is not None]:
            self._worker.call_all(undo)
            raise SleepError(reasons[0])

    def close(self) -> None:
        """Frees the memory of KV pools and weights, and ends the other ranks. Nothing can run afterwards. May be called
        again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.close()
        self._disks.close()
        self._close_ranks()


def _make_local_rank(model: LoadedModel, cache_sizes: CacheSizes) -> Ranks:
    """Makes the ``Ranks`` of a model that runs in one process."""
    return LocalRank(ModelRunner(model, cache_sizes))


def _depth(config: EngineArgs, model: LoadedModel) -> int:
    """Returns how many steps may be in flight at once."""
    if config.pipeline_parallel_size > 1:
        return config.pipeline_parallel_size
    overlaps = config.async_scheduling
    if overlaps is None:
        # Not with speculation: a draft is looked up after a token that must be known. Not where launching a step takes
        # as long as the step, because its output would be published that much later. Not with recurrent state, which
        # cannot be rolled back if it was computed ahead.
        waits = model.model.waits_for_device or model.model.recurrent_layers is not None
        overlaps = model.device.type == "cuda" and config.speculative_method == "none" and not waits
    return 2 if overlaps else 1
