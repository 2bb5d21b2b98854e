"""``TorchExecutor``: makes batches of plans, has them computed, and draws tokens from the logits.

It knows plans and tensors. Which sequence gets which blocks, and why, is the scheduler's.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from quire_proto.errors import internal

from quire_engine.executor.torch.batch import StepBatch, pack
from quire_engine.executor.torch.devices import resolve_device
from quire_engine.executor.torch.gauge import MemoryGauge
from quire_engine.executor.torch.model_runner import ModelRunner
from quire_engine.executor.torch.parts import Parts, load_parts
from quire_engine.executor.torch.profile import largest_step, measure_rates
from quire_engine.executor.torch.sizing import PoolRequest, Pools, decide, table
from quire_engine.executor.torch.threads import configure_threads
from quire_engine.kv.capacity import KvCapacity
from quire_engine.models.loading import read_model_config
from quire_engine.models.options import LoadOptions, Quantization
from quire_engine.sampling import StepSampler, score_prompts
from quire_engine.scheduling.plan import Chunk, StepPlan, StepResult, StepTimings
from quire_engine.scheduling.rates import UNMEASURED

log = logging.getLogger(__name__)


class TorchExecutor:
    """Carries out plans one after the other. Used by one thread."""

    def __init__(self, parts: Parts, pools: Pools) -> None:
        self.config = parts.config
        self.max_model_len = parts.max_model_len
        self.rates = UNMEASURED
        self._runner = ModelRunner(parts, pools)
        self._sampler = StepSampler(parts.config.vocab_size)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: Quantization | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        deterministic: bool = False,
        block_size: int = 16,
        kv_cache_bytes: int | None = None,
        swap_bytes: int,
        memory_utilization: float | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        attention: str = "auto",
    ) -> "TorchExecutor":
        """Loads the model of ``folder`` onto a device, and makes KV pools for it.

        ``device`` is auto, cpu or cuda, and ``dtype`` auto, float32, bfloat16 or float16. ``max_model_len`` defaults to
        the model's own limit. Without ``kv_cache_bytes``, the largest step that the two limits allow is run, and the
        pools take what is left of the device's memory; ``memory_utilization`` is the part of it that may be taken in
        all (see ``sizing``). Raises ``ModelError``, with one sentence, for whatever makes the folder or these settings
        impossible.
        """
        configure_threads()
        config = read_model_config(folder)
        options = LoadOptions(resolve_device(device), dtype, quantization, deterministic)
        gauge = MemoryGauge(options.device)
        parts = load_parts(
            config, folder, options, block_size=block_size, max_model_len=max_model_len, attention=attention
        )
        largest = partial(cls._run_largest, parts, max_num_batched_tokens, max_num_seqs)
        measured = gauge.read(largest if kv_cache_bytes is None else None)
        request = PoolRequest(kv_cache_bytes, swap_bytes, memory_utilization)
        executor = cls(parts, decide(request, measured, parts.smallest_pools))
        prompt = min(max_num_batched_tokens, parts.max_model_len)
        executor.rates = measure_rates(executor, prompt, config.vocab_size)
        log.info("memory, as decided\n%s", table(request, measured, executor.capacity, parts.max_model_len))
        return executor

    @classmethod
    def _run_largest(cls, parts: Parts, tokens: int, sequences: int) -> None:
        """Runs a step of as many tokens and sequences, in the least KV memory, and gives that back."""
        with closing(cls(parts, parts.smallest_pools)) as trial:
            size, vocab_size = trial.capacity.block_size, parts.config.vocab_size
            trial.run(largest_step(tokens, sequences, parts.max_model_len, size, vocab_size))

    @property
    def capacity(self) -> KvCapacity:
        """Blocks of both pools; constant."""
        return self._runner.capacity

    @property
    def depth(self) -> int:
        """Plans that may be under way at once."""
        return 1

    @property
    def dtype_name(self) -> str:
        """What weights and KV memory are held in: ``float32`` or ``bfloat16``."""
        return str(self._runner.dtype).removeprefix("torch.")

    def run(self, plan: StepPlan) -> StepResult:
        """See ``Executor.run``."""
        result = StepResult()
        self._sampler.forget(plan.ended)
        with torch.inference_mode():
            self._copy(plan, result.timings)
            chunks = _chunks_with_tokens(plan.chunks, result)
            if chunks:
                self._compute(pack(chunks, self.capacity.block_size), result)
        return result

    def close(self) -> None:
        """Gives the KV memory back. Nothing can be run any more."""
        self._runner.close()
        self._sampler.close()

    def _copy(self, plan: StepPlan, timings: StepTimings) -> None:
        with _timed(timings, "swap"):
            self._runner.copy(plan.copies_out, plan.copies_within, plan.copies_in)

    def _compute(self, batch: StepBatch, result: StepResult) -> None:
        with _timed(result.timings, "forward"):
            pending = self._sampler.begin(batch.draws)
            hidden = self._runner.forward(batch.forward)
            logits = self._runner.logits(hidden, batch.forward.sampled_rows) if batch.draws else None
        with _timed(result.timings, "sample"):
            if batch.scored:
                logits_of = partial(self._runner.logits, hidden)
                score_prompts(batch.scored, batch.forward.scored_rows, self.config.vocab_size, logits_of, result)
            if logits is not None:
                self._sampler.finish(pending, logits, batch.draw_rows, result)


def _chunks_with_tokens(chunks: Sequence[Chunk], result: StepResult) -> list[Chunk]:
    """The chunks that there is something to compute for; one without tokens has nothing to draw from either."""
    for chunk in chunks:
        if not chunk.token_ids:
            result.errors.update((draw.sequence_id, internal()) for draw in chunk.draws)
    return [chunk for chunk in chunks if chunk.token_ids]


@contextmanager
def _timed(timings: StepTimings, part: str) -> Iterator[None]:
    """Adds the seconds of the block to one field of ``timings``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, part, getattr(timings, part) + time.perf_counter() - start)
