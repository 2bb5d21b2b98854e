"""``TorchExecutor``: makes batches of plans, has them computed, and draws tokens from the logits.

It knows plans and tensors. Which sequence gets which blocks, and why, is the scheduler's.
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch
from quire_proto.errors import internal

from quire_engine.config import EngineArgs, SchedulerArgs
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.executor import UNMEASURED, ExecutorError
from quire_engine.core.step import ModelOutput, ScheduledChunk, SchedulerOutput, StepTimings
from quire_engine.device.accelerator import configure_threads, inference_on, resolve_device, upload, usable_threads
from quire_engine.device.host import tune_malloc
from quire_engine.executor.multiproc import RankGroup, compute_rank_cache_sizes, start_ranks, with_all_ranks_bytes
from quire_engine.executor.rank_worker import RankSettings, check_tensor_parallel_size
from quire_engine.models.loader import read_model_config
from quire_engine.sampling.sampler import Sampler, SamplerInput, SamplerOutput, compute_prompt_logprobs
from quire_engine.worker.input_batch import InputBatch, prepare_inputs
from quire_engine.worker.kv_cache import StepEvent, record_event
from quire_engine.worker.memory import (
    CacheBudget,
    CacheSizes,
    MemoryProfiler,
    format_memory_table,
    largest_step,
    measure_rates,
)
from quire_engine.worker.model_runner import LoadedModel, ModelRunner, Runner

log = logging.getLogger(__name__)

# A step that is under way on the device: it has its tokens drawn, hands them to the step after it, and says what came
# of it. Knows batches and draws, neither plans nor blocks.


class ForwardPass:
    """The forward pass of one batch, launched when this is made, and the draws from it."""

    def __init__(
        self, batch: InputBatch, runner: Runner, sampler: Sampler, vocab_size: int, pending: torch.Tensor | None
    ) -> None:
        self._batch, self._runner, self._sampler, self._vocab_size = batch, runner, sampler, vocab_size
        early, self._late = _split_by_readiness(batch)
        self._prepared: list[tuple[list[int], SamplerInput]] = []
        self._prepare_draws(early)
        self._hidden = runner.forward(batch.model_input, pending)
        self._logits = runner.logits(self._hidden, batch.model_input.sampled_rows) if batch.draws else None

    def compute_prompt_logprobs(self, result: ModelOutput) -> None:
        """Writes the log-probabilities of prompts, for which it waits."""
        if self._batch.prompt_logprob_chunks:
            logits_of = partial(self._runner.logits, self._hidden)
            compute_prompt_logprobs(
                self._batch.prompt_logprob_chunks,
                self._batch.model_input.prompt_logprob_rows,
                self._vocab_size,
                logits_of,
                result,
            )

    def draw(self) -> tuple[list[int], list[SamplerOutput]]:
        """Has the tokens drawn: the ids of their sequences, and their draws in the same order. Called once."""
        self._prepare_draws(self._late)
        if self._logits is None:
            return [], []
        rows_of, draws = self._batch.draw_rows, self._batch.draws
        ids = [draws[place].sequence_id for places, _ in self._prepared for place in places]
        return ids, [
            self._sampler.sample(pending, self._logits, [rows_of[place] for place in places])
            for places, pending in self._prepared
        ]

    def _prepare_draws(self, places: list[int]) -> None:
        if places:
            self._prepared.append((places, self._sampler.prepare([self._batch.draws[place] for place in places])))


class AsyncStep:
    """An ``AsyncModelOutput``. ``forward`` is None where there was nothing to compute; ``result`` holds what is known.

    What ``sample_tokens`` raises is raised by ``get_output``, so that a step ends in one place.
    """

    def __init__(self, device: torch.device, forward: ForwardPass | None, result: ModelOutput) -> None:
        self._device = device
        self._forward = forward
        self._result = result
        self._rows: dict[int, int] = {}
        self._sampled: list[SamplerOutput] = []
        self._mark: StepEvent | None = None
        self._error: Exception | None = None

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``. Waits only for the log-probabilities of prompts. Raises
        ``ExecutorError``.
        """
        forward, self._forward = self._forward, None  # its memory is free for the next step
        with device_errors(), inference_on(self._device), timed(self._result.timings, "sample"):
            try:
                if forward is not None:
                    self._draw(forward)
            except Exception as error:  # noqa: BLE001 - ``get_output`` raises it, when the device is done with the rest
                self._error = error
            self._mark = record_event(self._device)

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``. Waits for this step, and not for one that was launched after it."""
        assert self._mark is not None, "draw comes before result"
        with device_errors():
            with timed(self._result.timings, "forward"):
                self._mark.wait()
            if self._error is not None:
                raise self._error
            with timed(self._result.timings, "sample"):
                for drawn in self._sampled:
                    drawn.fetch_into(self._result)
        return self._result

    def sampled_token_ids(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """The tokens [P] int64 that were drawn for these sequences, on the device, without waiting for them. Where
        there is none, as the draw failed, it is any token: what is made of it will not be used.
        """
        if not self._sampled:
            return torch.zeros(len(sequence_ids), dtype=torch.int64, device=self._device)
        drawn = [one.token_ids for one in self._sampled]
        token_ids = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        rows = [self._rows.get(sequence_id, 0) for sequence_id in sequence_ids]
        if rows == list(range(len(token_ids))):
            return token_ids
        return token_ids.index_select(0, upload(torch.tensor(rows), self._device))

    def _draw(self, forward: ForwardPass) -> None:
        forward.compute_prompt_logprobs(self._result)
        ids, self._sampled = forward.draw()
        self._rows = {sequence_id: row for row, sequence_id in enumerate(ids)}


def _split_by_readiness(batch: InputBatch) -> tuple[list[int], list[int]]:
    """The places of the draws that are begun with the forward pass, and of those that are begun when they are made.

    What has a grammar is begun as soon as its tokens are known, so that its mask is filled meanwhile. The others would
    gain nothing, and are made together; all are begun at once where no token is pending.
    """
    places = list(range(len(batch.draws)))
    if not any(batch.awaits_token):
        return places, []
    early = [batch.draws[place].grammar is not None and not batch.awaits_token[place] for place in places]
    return [place for place in places if early[place]], [place for place in places if not early[place]]


@contextmanager
def device_errors() -> Iterator[None]:
    """A device that failed stays so, whatever is asked of it: the engine must end."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise ExecutorError(f"The device failed: {error}") from error


@contextmanager
def timed(timings: StepTimings, part: str) -> Iterator[None]:
    """Adds the seconds of the block to one field of ``timings``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, part, getattr(timings, part) + time.perf_counter() - start)


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
