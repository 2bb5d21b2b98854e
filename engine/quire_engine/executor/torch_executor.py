"""``TorchExecutor``: makes an input batch of a scheduler output, runs the model on it and samples tokens from the
logits.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from quire_proto import __version__
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import PoolingParams

from quire_engine.config import EngineArgs, NodeArgs
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.data_parallel import DataParallel
from quire_engine.core.executor import UNMEASURED, ExecutorError
from quire_engine.core.kv_disk import DiskContents, TransferResult
from quire_engine.core.lora import DUMMY_LORA, LoRARequest
from quire_engine.core.startup import StartupPhase, StartupTimer
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.device.accelerator import configure_threads, inference_on, resolve_device, upload, usable_threads
from quire_engine.device.host import tune_malloc
from quire_engine.errors import LoRAError, ModelError
from quire_engine.executor.engine_group import EngineGroup, join_engines
from quire_engine.executor.multiproc import MultiprocLeader, compute_rank_cache_sizes
from quire_engine.executor.pooler import Pooler, PoolerOutput
from quire_engine.executor.rank_worker import RankSettings, check_parallel_sizes
from quire_engine.kernels.bindings import library
from quire_engine.models.llama import Llama
from quire_engine.models.loader import read_model_config
from quire_engine.sampling.logits_processors import Draw
from quire_engine.sampling.prompt_logprobs import compute_prompt_logprobs
from quire_engine.sampling.sampler import PlainSamplerOutput, Sampler, SamplerInput, SamplerOutput
from quire_engine.worker.block_file import FolderLock
from quire_engine.worker.input_batch import AppendedDraws, InputBatch, ModelInput, RowDraw, prepare_inputs
from quire_engine.worker.kv_cache import StepEvent
from quire_engine.worker.memory import (
    CacheBudget,
    CacheSizes,
    MemoryProfiler,
    largest_step,
    measure_rates,
    memory_table,
)
from quire_engine.worker.model_runner import LoadedModel, ModelRunner, Runner
from quire_engine.worker.request_states import Indices, RequestStates
from quire_engine.worker.transfer_results import TransferResults

log = logging.getLogger(__name__)

RunnerFactory = Callable[[LoadedModel, CacheSizes], Runner]
Forward = Callable[[ModelInput, torch.Tensor | None], torch.Tensor]


class TorchExecutor:
    """Executes one step after the other. Used by one thread. An ``AsyncExecutor``.

    ``depth`` is constant: steps that may be in flight at once. ``config`` is the model's, ``max_model_len`` the longest
    sequence in tokens, and ``rates`` are measured once it is loaded. ``num_loras_held`` adapters are held in host
    memory, those that were used last. ``disk_contents`` is what the disk tier has at the start, None without one.
    ``weight_stats`` are those of layers that are read from disk, on rank 0 if there are several; None if none are. If
    it shares experts with the executors of other ``engines``, its forward passes are theirs.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache_sizes: CacheSizes,
        *,
        depth: int = 1,
        num_loras_held: int = 0,
        make_runner: RunnerFactory = ModelRunner,
        engines: EngineGroup | None = None,
    ) -> None:
        self.config = model.config
        self.max_model_len = model.max_model_len
        self.weight_stats = model.model.weight_stats if isinstance(model.model, Llama) else None
        self.rates = UNMEASURED
        self.depth = depth
        self._device = model.device
        with inference_on(model.device):
            self._runner = make_runner(model, cache_sizes)
        num_tokens = min(depth * model.max_num_batched_tokens, model.max_model_len)
        self._kv_cache_config = replace(self._runner.kv_cache_config, max_step_tokens=num_tokens)
        self._states = RequestStates(len(self._kv_cache_config.groups), model.config.vocab_size)
        self._sampler = Sampler(model.config.vocab_size)
        pooler = model.config.pooler_config
        self._pooler = None if pooler is None else Pooler(pooler, model.classifier)
        self._lora_manager = model.loras
        self._num_loras_held = num_loras_held
        self._previous_step: AsyncStep | None = None
        self._engines = engines
        self._is_closed = False
        self._close_ranks: Callable[[], object] = lambda: None
        self.disk_contents: DiskContents | None = None
        self._disk_lock: FolderLock | None = None
        self._transfer_results = TransferResults()

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
        """Loads the model of ``config`` onto a device, and makes KV pools for it.

        ``max_model_len`` defaults to the model's own limit. Without ``kv_cache_memory``, the largest step that
        ``max_num_batched_tokens`` and ``max_num_seqs`` allow is run, and the pools take what is left of the device's
        memory; ``gpu_memory_utilization`` is the part of it that may be taken in all (see ``worker.memory``).
        ``async_scheduling`` says whether a step may be launched while another runs; by default it may on CUDA, see
        ``_depth``. With ``enforce_eager`` no graphs are captured. With a ``tensor_parallel_size`` or a
        ``pipeline_parallel_size`` above 1 other processes share the model until ``close``; ``on_lost`` is called, on
        another thread, with the reason why they cannot go on. ``nodes`` are the machines that have the ranks, if there
        are several; this one is node 0, and waits for the others. With a ``data_parallel_size`` above 1 they say which
        engine of a group this is, and where it meets the others, for which it waits. An engine that ``owns_process``
        sets the number of torch's threads and how the heap treats freed memory, for all of it. ``startup`` times the
        phases. Raises ``ModelError``, with one sentence, for what cannot be.
        """
        nnodes = 1 if nodes is None else nodes.nnodes
        threads = (configure_threads if owns_process else usable_threads)(config.num_ranks // nnodes)
        model_config, device = read_model_config(config.model, config), resolve_device(config.device)
        check_parallel_sizes(config, model_config, device, nnodes)
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
                raise ModelError(str(error)) from error  # another engine was lost while this one loaded
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
        """Loads the model, or rank 0's shard of it, and makes an executor with KV pools of the size that the
        memory has room for, on all ranks. What is to be closed behind it is ``opened``.
        """
        config = settings.engine
        profiler = MemoryProfiler(settings.device_for(0), settings.lora_bytes)
        group = settings.make_group(0) if leader is None else leader.group
        startup.begin(StartupPhase.KERNELS)
        if settings.device == "cpu":
            library()
        startup.begin(StartupPhase.WEIGHTS)
        model = settings.load(0, group)
        if owns_process and model.device.type == "cpu":
            tune_malloc()
        if leader is not None:
            leader.connect()
        elif engines is not None:
            opened.callback(group.close)
            with inference_on(model.device):
                group.connect(engines.store, None, engines.store)
        if engines is not None:
            engines.connect(group)
        make_runner: RunnerFactory = ModelRunner if leader is None else leader.make_runner
        startup.begin(StartupPhase.MEMORY)
        budget = CacheBudget(config.kv_cache_memory, config.swap_bytes, config.gpu_memory_utilization)
        with ExitStack() as profiled:
            make_smallest = partial(
                cls,
                model,
                model.min_cache_sizes,
                num_loras_held=config.num_loras_held,
                make_runner=make_runner,
                engines=engines,
            )
            run_largest = partial(cls._run_largest_step, make_smallest, config, profiled)
            work = run_largest if budget.kv_cache_bytes is None else None
            kept = model.kept_bytes(config.max_num_seqs)
            profiles = [profiler.profile(work, kept)] if leader is None else leader.profile_memory(profiler, work)
        num_layers = settings.num_layers()
        decided = compute_rank_cache_sizes(budget, profiles, model.min_cache_sizes, num_layers, settings.nnodes)
        depth, held = _depth(config, model), config.num_loras_held
        startup.begin(StartupPhase.GRAPHS)
        executor = cls(model, decided.sizes, depth=depth, num_loras_held=held, make_runner=make_runner, engines=engines)
        startup.begin(StartupPhase.WARMUP)
        num_tokens = min(config.max_num_batched_tokens, model.max_model_len)
        if engines is not None:
            executor.execute_dummy_batch()  # ends when all have come here: no timed step waits for one that still loads
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
        """Runs the largest step that ``limits`` allow on an executor with the least KV memory. It is closed with
        ``profiled``: not before its memory is read, as graphs are part of it.
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
            num_groups=len(executor.kv_cache_config.groups),
        )
        executor.execute_model(step)
        if lora is not None:
            executor.remove_lora(lora.lora_int_id)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Blocks of both pools; constant."""
        return self._kv_cache_config

    @property
    def dtype_name(self) -> str:
        """What weights and activations are held in: ``float32`` or ``bfloat16``."""
        return str(self._runner.dtype).removeprefix("torch.")

    @property
    def data_parallel(self) -> DataParallel | None:
        """This engine's part in its group; None if it is alone."""
        return None if self._engines is None else DataParallel(self._engines.lockstep, self.execute_dummy_batch)

    def execute_dummy_batch(self) -> None:
        """See ``DataParallel.execute_dummy_batch``."""
        assert self._engines is not None, "this engine is alone"
        with device_errors(), inference_on(self._device):
            self._engines.execute_dummy_batch(self._runner.execute_dummy_batch)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """See ``Executor.execute_model``."""
        launched = self.execute_model_async(scheduler_output)
        launched.sample_tokens()
        return launched.get_output()

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> "AsyncStep":
        """See ``AsyncExecutor.execute_model_async``. On the CPU the forward pass is over when this returns.

        ``timings`` are the host's: on CUDA ``swap`` and ``sample`` are launches, and ``forward`` is the launch and the
        wait for the step, whatever it is that takes long there.
        """
        forward = self._runner.forward if self._engines is None else self._forward_together
        capacity = self._kv_cache_config
        self._states.update(scheduler_output)
        step = AsyncStep(self._runner, forward, self._states, self._sampler, self._pooler, device=self._device)
        if self._pooler is not None:
            self._pooler.remove(scheduler_output.freed_rows)
        with device_errors(), inference_on(self._device):
            start = perf_counter()
            if not scheduler_output.copies.is_empty:
                self._runner.copy(scheduler_output.copies)
            copied = perf_counter()
            if scheduler_output.rows:
                failed = self._load_loras(scheduler_output.rows, step.output) if self._states.loras else ()
                batch = prepare_inputs(self._states, scheduler_output, capacity.block_size, capacity.groups, failed)
                step.launch(batch, self._previous_step)
                step.output.waited_for_others = self._engines is not None and not self._engines.has_most_tokens
            step.output.timings.swap, step.output.timings.forward = copied - start, perf_counter() - copied
        self._previous_step = step
        return step

    def _forward_together(self, batch: ModelInput, pending: torch.Tensor | None) -> torch.Tensor:
        """The forward pass of one engine of a group."""
        assert self._engines is not None, "this engine is alone"
        work = partial(self._runner.forward, batch, pending)
        return self._engines.run_pass(work, self._runner.execute_dummy_batch)

    def open_disk(self, config: EngineArgs, path: Path, block_bytes: int) -> None:
        """Opens the disk tier of the prefix cache below ``path``. A block has ``block_bytes`` on all ranks together.
        Where that cannot be, a warning is logged, and the engine does without.
        """
        num_slots = int(config.kv_disk_space * (1 << 30)) // block_bytes
        if not (num_slots and self.kv_cache_config.host_blocks):
            log.warning("KV blocks are not kept on disk: --kv-disk-space or the host pool does not hold one")
            return
        if self._disk_lock is not None:
            self._disk_lock.close()
        lock: FolderLock | None = None
        results = TransferResults(config.num_ranks)
        try:
            lock = FolderLock(path)
            num_slots = min(num_slots, lock.file_system_bytes // block_bytes)
            contents = self._runner.open_disk(lock.folder, self._fingerprint(config), num_slots, results.add)
        except OSError as error:
            log.warning("KV blocks are not kept on disk: %s cannot be used: %s", path, error)
            if lock is not None:
                lock.close()
            return
        self.disk_contents, self._disk_lock, self._transfer_results = contents, lock, results
        log.info("KV blocks on disk: %d of %d found in %s", len(contents.stored), num_slots, lock.folder)

    def _fingerprint(self, config: EngineArgs) -> str:
        """All that decides what numbers a block of KV memory has, but what its hash names."""
        numbers = (config.dtype, config.kv_cache_dtype, config.quantization, config.deterministic, config.attention)
        block_size = self._kv_cache_config.block_size
        facts = (__version__, self.config.model_revision, self.dtype_name, self._device.type, block_size)
        sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
        return repr((facts, numbers, sizes))

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """See ``Executor.take_transfers``."""
        return self._transfer_results.take(timeout)

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """The adapter as steps may have it, with its digest: its folder was read. May be called from any thread. Raises
        ``LoRAError`` for one that is none of this model, or if the model serves no adapters.
        """
        if self._lora_manager is None:
            raise LoRAError("This engine serves no adapters: start it with --enable-lora, or enable_lora=True.")
        return self._lora_manager.check(lora)

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter, if any is held for it. No step has it any more."""
        if self._lora_manager is not None and lora_id in self._lora_manager.held:
            self._runner.remove_lora(lora_id)

    def _load_loras(self, rows: Sequence[int], output: ModelOutput) -> list[int]:
        """Has all ranks hold the adapters of the step's ``rows``. Returns the ids of those that cannot be read, whose
        chunks get an error in ``output``.
        """
        manager, loras = self._lora_manager, self._states.loras
        assert manager is not None, "a step has adapters, and the model has no slots for them"
        wanted = {loras[row].lora_int_id: loras[row] for row in rows if row in loras}
        failed: list[int] = []
        for lora_id in [lora_id for lora_id in wanted if lora_id not in manager.held]:
            try:
                self._runner.add_lora(wanted[lora_id])
            except LoRAError as error:
                log.error("the adapter %s cannot be used: %s", wanted[lora_id].lora_name, error)
                failed.append(lora_id)
            if len(manager.held) > self._num_loras_held:
                self._runner.remove_lora(next(each for each in manager.held if each not in wanted))
        for number, row in enumerate(rows):
            if row in loras and loras[row].lora_int_id in failed:
                message = f"The adapter {loras[row].lora_name} cannot be read any more."
                output.errors[number] = QuireError(ErrorCode.UNAVAILABLE, message, param="model")
        return failed

    @property
    def can_sleep(self) -> bool:
        """Whether this is a ``Sleeper``: its weights are all its own, and all in the memory of one device."""
        return isinstance(self._runner, ModelRunner) and self._engines is None and self.weight_stats is None

    def sleep(self) -> None:
        """See ``Sleeper.sleep``."""
        assert isinstance(self._runner, ModelRunner), "it cannot sleep"
        self._previous_step = None
        with inference_on(self._device):
            self._runner.sleep()

    def wake_up(self) -> None:
        """See ``Sleeper.wake_up``."""
        assert isinstance(self._runner, ModelRunner), "it cannot sleep"
        with inference_on(self._device):
            self._runner.wake_up()

    def close(self) -> None:
        """Gives the memory of KV pools and weights back, and ends the other ranks. Nothing can be run any more. May be
        called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._runner.close()
        self._lora_manager = self._previous_step = None
        if self._disk_lock is not None:
            self._disk_lock.close()
            self._disk_lock = None
        self._sampler.close()
        self._close_ranks()


def _depth(config: EngineArgs, model: LoadedModel) -> int:
    """The steps that may be in flight at once."""
    if config.pipeline_parallel_size > 1:
        return config.pipeline_parallel_size
    overlaps = config.async_scheduling
    if overlaps is None:
        # A draft can only be looked up behind a token that is known. And where launching a step takes as long as the
        # step, what the one before has made would be published as much later. A state is never computed ahead: it could
        # not be taken back.
        waits = isinstance(model.model, Llama) and model.model.waits_for_device
        waits = waits or model.model.state_bytes > 0
        overlaps = model.device.type == "cuda" and config.speculative_method == "none" and not waits
    return 2 if overlaps else 1


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises ``ExecutorError`` for a device that failed: whatever it is asked for next fails too, so the engine must
    end.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        raise ExecutorError(f"The device failed: {error}") from error


@dataclass(slots=True)
class ForwardPass:
    """A forward pass that was launched, and what is sampled from it: ``hidden`` [T, hidden], of which the logits are
    made. ``prepared`` are the draws that were prepared for the sampler, and ``late`` those that will be when they are
    sampled.
    """

    batch: InputBatch
    prepared: "list[PreparedDraws]"
    late: list[RowDraw]
    hidden: torch.Tensor


PreparedDraws = tuple[list[RowDraw], SamplerInput]


class AsyncStep:
    """A step on the device, whose forward pass ``forward`` makes. An ``AsyncModelOutput``; ``output`` holds what is
    known of it.

    What ``sample_tokens`` raises is raised by ``get_output``, so that a step ends in one place.
    """

    def __init__(
        self,
        runner: Runner,
        forward: Forward,
        states: RequestStates,
        sampler: Sampler,
        pooler: Pooler | None,
        *,
        device: torch.device,
    ) -> None:
        self.output = ModelOutput()
        self._states = states
        self._runner = runner
        self._run_forward = forward
        self._sampler = sampler
        self._pooler = pooler
        self._device = device
        self._forward: ForwardPass | None = None
        self._appended: AppendedDraws | None = None
        self._sampled: list[SamplerOutput | PlainSamplerOutput] = []
        self._sampled_numbers: Indices | None = None
        self._pooled: PoolerOutput | None = None
        self._event: StepEvent | None = None
        self._error: Exception | None = None

    def launch(self, batch: InputBatch, previous: "AsyncStep | None") -> None:
        """Launches the forward pass of ``batch``, whose pending tokens are sampled by ``previous``.

        A draw with a grammar is prepared as soon as the tokens before it are known, so that its bitmask is filled while
        the model computes. The others would gain nothing, and are prepared together; all are at once where no token is
        pending.
        """
        early, late, pending = batch.draws, list[RowDraw](), None
        if len(batch.pending):
            assert previous is not None, "a token is pending, and no step samples it"
            pending = previous.sampled_token_ids(batch.pending)
            early = [each for each in batch.draws if not each.awaits_token and self._has_grammar(each)]
            late = [each for each in batch.draws if each.awaits_token or not self._has_grammar(each)]
        prepared = [self._prepare(early)] if early else []
        hidden = self._run_forward(batch.model_input, pending)
        self._forward = ForwardPass(batch, prepared, late, hidden)
        self._appended = batch.appended

    def _has_grammar(self, draw: RowDraw) -> bool:
        return self._states.sampling_state(draw.row, draw.choice).grammar_state is not None

    def _prepare(self, draws: list[RowDraw]) -> "PreparedDraws":
        states = self._states
        return draws, self._sampler.prepare(
            [
                Draw(
                    each.number,
                    states.sampling_state(each.row, each.choice),
                    states.tokens.row(each.row)[: each.position],
                    each.num_drafts,
                )
                for each in draws
            ]
        )

    def sample_tokens(self) -> None:
        """See ``AsyncModelOutput.sample_tokens``. Waits only for the log-probabilities of prompts. Raises
        ``ExecutorError``.
        """
        forward, self._forward = self._forward, None  # its memory is free for the next step
        start = perf_counter()
        with device_errors(), inference_on(self._device):
            try:
                if forward is not None:
                    self._sample(forward)
            except Exception as error:  # noqa: BLE001 - ``get_output`` raises it, when the device is done with the rest
                self._error = error
            if self._device.type != "cpu":
                self._event = StepEvent(self._device)
        self.output.timings.sample += perf_counter() - start

    def get_output(self) -> ModelOutput:
        """See ``AsyncModelOutput.get_output``. Waits for this step, and not for one that was launched after it."""
        assert self._forward is None, "sample_tokens comes before get_output"
        timings, start = self.output.timings, perf_counter()
        with device_errors():
            if self._event is not None:
                self._event.wait()
            if self._error is not None:
                raise self._error
            done = perf_counter()
            for sampled in self._sampled:
                sampled.fetch_into(self.output)
            if self._sampled and self._appended is not None:
                drawn = np.array(self.output.token_ids, np.int64)[self._appended.numbers]
                self._states.tokens.write(self._appended.rows, self._appended.positions, drawn)
            if self._pooled is not None:
                self._pooled.fetch_into(self.output)
        timings.forward += done - start
        timings.sample += perf_counter() - done
        return self.output

    def sampled_token_ids(self, rows: Indices) -> torch.Tensor:
        """The tokens [P] int64 that were sampled for these rows, on the device, without waiting for them. Where there
        is none, as the sampling failed, it is any token: what is made of it will not be used.
        """
        appended = self._appended
        if not self._sampled or appended is None:
            return torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        tensors = [sampled.token_ids for sampled in self._sampled]
        token_ids = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        number_of = np.zeros(max(rows.max(), appended.rows.max(initial=0)) + 1, np.int64)
        number_of[appended.rows] = appended.numbers
        places = number_of[rows]
        if self._sampled_numbers is not None:
            place_of = np.empty_like(self._sampled_numbers)
            place_of[self._sampled_numbers] = np.arange(len(place_of))
            places = place_of[places]
        if np.array_equal(places, np.arange(len(token_ids))):
            return token_ids
        return token_ids.index_select(0, upload(torch.from_numpy(places), self._device))

    def _sample(self, forward: ForwardPass) -> None:
        batch, prepared, logits = forward.batch, forward.prepared, None
        self.output.token_ids = [0] * batch.num_draws
        if batch.pooled:
            assert self._pooler is not None, "a step pools prompts, and the model says not how"
            self._pooled = self._pooler.pool(forward.hidden, batch.pooled)
        if len(batch.model_input.sampled_rows):
            start = perf_counter()
            logits = self._runner.logits(forward.hidden, batch.model_input.sampled_rows)
            seconds = perf_counter() - start  # as part of the forward pass
            self.output.timings.forward += seconds
            self.output.timings.sample -= seconds
        if batch.prompt_logprobs:
            logits_of, rows = partial(self._runner.logits, forward.hidden), batch.model_input.prompt_logprob_rows
            compute_prompt_logprobs(batch.prompt_logprobs, rows, self._sampler.vocab_size, logits_of, self.output)
        if logits is None:
            return
        if batch.is_plain:
            metadata = self._states.sampling.metadata(batch.appended.rows, batch.appended.positions)
            self._sampled = [self._sampler.sample_plain(logits, metadata)]
            return
        if forward.late:
            prepared = [*prepared, self._prepare(forward.late)]
        self._sampled_numbers = np.array([each.number for draws, _ in prepared for each in draws], np.int64)
        self._sampled = [
            self._sampler.sample(inputs, logits, [each.logits_row for each in draws]) for draws, inputs in prepared
        ]
