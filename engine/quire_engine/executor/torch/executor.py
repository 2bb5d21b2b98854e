"""``TorchExecutor``: makes batches of plans, has them computed, and draws tokens from the logits.

It knows plans and tensors. Which sequence gets which blocks, and why, is the scheduler's.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from quire_proto.errors import internal

from quire_engine.config import EngineArgs, SchedulerArgs
from quire_engine.executor.torch.batch import InputBatch, prepare_inputs
from quire_engine.executor.torch.devices import inference_on, resolve_device
from quire_engine.executor.torch.gauge import MemoryProfiler
from quire_engine.executor.torch.heap import tune_malloc
from quire_engine.executor.torch.model_runner import ModelRunner, Runner
from quire_engine.executor.torch.parts import LoadedModel
from quire_engine.executor.torch.profile import largest_step, measure_rates
from quire_engine.executor.torch.ranks.checks import check_tensor_parallel_size
from quire_engine.executor.torch.ranks.leader import RankGroup, start_ranks
from quire_engine.executor.torch.ranks.memory import compute_rank_cache_sizes, with_all_ranks_bytes
from quire_engine.executor.torch.ranks.settings import RankSettings
from quire_engine.executor.torch.sizing import CacheBudget, CacheSizes, format_memory_table
from quire_engine.executor.torch.step import AsyncStep, ForwardPass, device_errors, timed
from quire_engine.executor.torch.threads import configure_threads, usable_threads
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.models.loading import read_model_config
from quire_engine.sampling import Sampler
from quire_engine.scheduling.plan import ModelOutput, ScheduledChunk, SchedulerOutput, StepTimings
from quire_engine.scheduling.rates import UNMEASURED

log = logging.getLogger(__name__)


class TorchExecutor:
    """Carries out plans one after the other. Used by one thread. An ``AsyncExecutor``.

    ``depth`` is constant: plans that may be under way at once. ``config`` is the model's, ``max_model_len`` the longest
    sequence in tokens, and ``rates`` are measured once it is loaded.
    """

    def __init__(
        self,
        model: LoadedModel,
        sizes: CacheSizes,
        *,
        depth: int = 1,
        make_runner: Callable[[LoadedModel, CacheSizes], Runner] = ModelRunner,
    ) -> None:
        self.config = model.config
        self.max_model_len = model.max_model_len
        self.rates = UNMEASURED
        self.depth = depth
        self._device = model.device
        with inference_on(model.device):
            self._runner = make_runner(model, sizes)
        self._sampler = Sampler(model.config.vocab_size)
        self._previous_step: AsyncStep | None = None
        self._close_ranks: Callable[[], object] = lambda: None

    @classmethod
    def load(
        cls, config: EngineArgs, on_lost: Callable[[str], None] | None = None, *, owns_process: bool = False
    ) -> "TorchExecutor":
        """Loads the model of ``config`` onto a device, and makes KV pools for it.

        ``max_model_len`` defaults to the model's own limit. Without ``kv_cache_memory``, the largest step that
        ``max_num_batched_tokens`` and ``max_num_seqs`` allow is run, and the pools take what is left of the device's
        memory; ``gpu_memory_utilization`` is the part of it that may be taken in all (see ``sizing``).
        ``async_scheduling`` says whether a step may be launched while another runs; by default it may on CUDA. With
        ``enforce_eager`` no graphs are recorded. With a ``tensor_parallel_size`` above 1 other processes share the
        model until ``close``; ``on_lost`` is called, on another thread, with the reason why they cannot go on. An
        engine that ``owns_process`` sets the number of torch's threads and how the heap treats freed memory, for all of
        it. Raises ``ModelError``, with one sentence, for what cannot be.
        """
        size = config.tensor_parallel_size
        threads = (configure_threads if owns_process else usable_threads)(size)
        model, device = read_model_config(config.model), resolve_device(config.device)
        check_tensor_parallel_size(model, size, device)
        settings = RankSettings(config, model, str(device), threads)
        with ExitStack() as failing:
            leading = start_ranks(settings, on_lost)
            failing.callback(leading.close)
            executor = cls._load(leading, settings, owns_process=owns_process)
            failing.pop_all()
        executor._close_ranks = weakref.finalize(executor, leading.close)
        return executor

    @classmethod
    def _load(cls, leading: RankGroup, settings: RankSettings, *, owns_process: bool) -> "TorchExecutor":
        """Loads this process's part of the model, and makes pools on all ranks."""
        config = settings.engine
        request = CacheBudget(config.kv_cache_memory, config.swap_bytes, config.gpu_memory_utilization)
        gauge = MemoryProfiler(settings.device_for(0))
        parts = settings.load(leading.communicator)
        if owns_process and parts.device.type == "cpu":
            tune_malloc()
        leading.connect()
        with ExitStack() as trials:
            make_trial = partial(cls, parts, parts.min_cache_sizes, make_runner=leading.make_runner)
            largest = partial(cls._run_largest, make_trial, config, trials)
            measures = leading.profile_memory(gauge, largest if request.kv_cache_bytes is None else None)
        pools, measured = compute_rank_cache_sizes(request, measures, parts.min_cache_sizes)
        overlaps = parts.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        executor = cls(parts, pools, depth=2 if overlaps else 1, make_runner=leading.make_runner)
        tokens = min(config.max_num_batched_tokens, parts.max_model_len)
        executor.rates = measure_rates(executor, tokens, parts.config.vocab_size)
        capacity = with_all_ranks_bytes(executor.kv_cache_config, measures)
        log.info("memory, as decided\n%s", format_memory_table(request, measured, capacity, parts.max_model_len))
        return executor

    @classmethod
    def _run_largest(cls, make_trial: Callable[[], "TorchExecutor"], limits: SchedulerArgs, trials: ExitStack) -> None:
        """Runs the largest step that ``limits`` allow on an executor with the least KV memory. It is closed with
        ``trials``: not before its memory is read, as graphs are part of it.
        """
        trial = trials.enter_context(closing(make_trial()))
        size, vocab_size = trial.kv_cache_config.block_size, trial.config.vocab_size
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        trial.execute_model(largest_step(tokens, sequences, trial.max_model_len, size, vocab_size))

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Blocks of both pools; constant."""
        return self._runner.kv_cache_config

    @property
    def dtype_name(self) -> str:
        """What weights and KV memory are held in: ``float32`` or ``bfloat16``."""
        return str(self._runner.dtype).removeprefix("torch.")

    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """See ``Executor.execute_model``."""
        launched = self.execute_model_async(plan)
        launched.sample_tokens()
        return launched.get_output()

    def execute_model_async(self, plan: SchedulerOutput) -> AsyncStep:
        """See ``AsyncExecutor.execute_model_async``. On the CPU the forward pass is over when this returns.

        ``timings`` are the host's: on CUDA ``swap`` and ``sample`` are launches, and ``forward`` is the launch and the
        wait for the step, whatever it is that takes long there.
        """
        result = ModelOutput()
        self._sampler.remove_finished(plan.finished_seq_ids)
        with device_errors(), inference_on(self._device):
            self._copy(plan, result.timings)
            chunks = _chunks_with_tokens(plan.chunks, result)
            with timed(result.timings, "forward"):
                forward = self._forward(prepare_inputs(chunks, self.kv_cache_config.block_size)) if chunks else None
        self._previous_step = AsyncStep(self._device, forward, result)
        return self._previous_step

    def close(self) -> None:
        """Gives the KV memory back, and ends the other ranks. Nothing can be run any more."""
        self._runner.close()
        self._sampler.close()
        self._close_ranks()

    def _copy(self, plan: SchedulerOutput, timings: StepTimings) -> None:
        with timed(timings, "swap"):
            self._runner.copy(plan.blocks_to_swap_out, plan.blocks_to_copy, plan.blocks_to_swap_in)

    def _forward(self, batch: InputBatch) -> ForwardPass:
        pending = (
            self._previous_step.sampled_token_ids(batch.pending_sequence_ids)
            if self._previous_step and batch.pending_sequence_ids
            else None
        )
        return ForwardPass(batch, self._runner, self._sampler, self.config.vocab_size, pending)


def _chunks_with_tokens(chunks: Sequence[ScheduledChunk], result: ModelOutput) -> list[ScheduledChunk]:
    """The chunks that there is something to compute for; one without tokens has nothing to draw from either."""
    for chunk in chunks:
        if not chunk.token_ids:
            result.errors.update((draw.sequence_id, internal()) for draw in chunk.draws)
    return [chunk for chunk in chunks if chunk.token_ids]
