"""Runs prompts through the whole synchronous engine: scheduler, pools and the torch executor, without a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from quire_engine.config import EngineArgs, PreemptionPolicy
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import Grammar
from quire_engine.core.step_recording import StepRecorder
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.worker import state_memory
from quire_engine.worker.memory import CacheSizes
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from transformers import AutoConfig

from tests.model.models import ROWS, STATES
from tests.support.executors import load_executor

BLOCK_SIZE = 16
MAX_STEPS = 20_000
SWAPPING_PAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e12)


@dataclass
class Choice:
    """One output of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None


@dataclass
class Run:
    """What a run made: the choices of each prompt, the log-probabilities of its tokens, and the scheduler's
    counters.
    """

    choices: list[list[Choice]]
    prompt_logprobs: list[list[TokenLogprobs]]
    statistics: SchedulerStats

    @property
    def outputs(self) -> list[list[int]]:
        """The first output of each prompt."""
        return [choices[0].token_ids for choices in self.choices]


def load(
    folder: Path,
    device_blocks: int,
    host_blocks: int,
    dtype: str = "float32",
    *,
    checkpoint_tokens: int = BLOCK_SIZE,
    **settings: Any,
) -> TorchExecutor:
    """The model with pools of exactly so many blocks of all layers, which are more where layers are in groups. If it
    keeps states, it has room for those of all sequences, and a checkpoint after each ``checkpoint_tokens``.
    ``settings`` are further ones of ``EngineArgs``.
    """
    bytes_a_token = getattr(torch, dtype).itemsize * numbers_a_token(folder)
    if settings.get("kv_cache_dtype") == "int8":
        bytes_a_token = int8_bytes_a_token(folder)
    elif settings.get("kv_cache_dtype") == "fp8":
        bytes_a_token = numbers_a_token(folder)
    block_bytes = bytes_a_token * BLOCK_SIZE
    sizes = CacheSizes(device_blocks * block_bytes, host_blocks * block_bytes)
    bounds = {"MIN_CHECKPOINT_TOKENS": checkpoint_tokens, "MAX_CHECKPOINT_TOKENS": checkpoint_tokens}
    with patch.multiple(state_memory, **bounds, RUNNING_SHARE=1.0):
        if folder.name in STATES:
            sizes = _with_states(sizes, STATES[folder.name], block_bytes)
        executor = load_executor(
            folder,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            kv_cache_memory=sizes.kv_cache_bytes,
            swap_bytes=sizes.swap_bytes,
            **settings,
        )
    capacity = executor.kv_cache_config
    counts = (capacity.device_blocks, capacity.host_blocks)
    if capacity.states is None:
        assert len(capacity.groups) > 1 or counts == (device_blocks, host_blocks)
    else:
        assert counts == (device_blocks, host_blocks)
    return executor


def _with_states(blocks: CacheSizes, state_bytes: int, block_bytes: int) -> CacheSizes:
    """The sizes of pools that have these ``blocks`` beside the states of as many sequences as may run."""
    limits = EngineArgs(model=Path("model"))
    layout = state_memory.StateLayout.choose(
        *(state_bytes, (BLOCK_SIZE, block_bytes), 256),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    sizes, left = blocks, CacheSizes(0, 0)
    while left.kv_cache_bytes < blocks.kv_cache_bytes or left.swap_bytes < blocks.swap_bytes:
        more = [int(left.kv_cache_bytes < blocks.kv_cache_bytes), int(left.swap_bytes < blocks.swap_bytes)]
        sizes = CacheSizes(sizes.kv_cache_bytes + more[0] * state_bytes, sizes.swap_bytes + more[1] * state_bytes)
        states, left = layout.divide(sizes, block_bytes)
        if states.max_num_seqs < limits.max_num_seqs:
            left = CacheSizes(0, left.swap_bytes)
    return sizes


def numbers_a_token(folder: Path) -> int:
    """How many numbers the keys and values of one token are, by transformers' reading of the model."""
    return sum(rows * size for rows, size in _rows_a_token(folder))


def int8_bytes_a_token(folder: Path) -> int:
    """Bytes of the keys and values of one token in int8: a byte for each number, and a scale for each row."""
    return sum(rows * (size + 4) for rows, size in _rows_a_token(folder))


def _rows_a_token(folder: Path) -> Sequence[tuple[int, int]]:
    """How many rows of which size."""
    if folder.name in ROWS:
        return ROWS[folder.name]
    config = AutoConfig.from_pretrained(folder)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [(2 * config.num_hidden_layers * getattr(config, "num_key_value_heads", heads), head_dim)]


def run(
    executor: TorchExecutor,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    chunk: int = 2048,
    prefix_caching: bool = True,
    host_caching: bool = True,
    max_num_seqs: int = 64,
    swap_ahead: float = 0.0,
    preemption_mode: PreemptionPolicy = "auto",
    num_stages: int = 1,
    grammars: Sequence[Grammar | None] = (),
    rates: Rates = SWAPPING_PAYS,
    guesses: Callable[[Scheduler], None] = lambda _: None,
    recorder: StepRecorder | None = None,
) -> Run:
    """All prompts at once, to the end; every block must be back afterwards. ``guesses`` may have tokens guessed."""
    choices = [[Choice() for _ in range(wanted.n)] for wanted in params]
    told: list[list[TokenLogprobs]] = [[] for _ in prompts]

    def receive(step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            assert output.error is None, output.error
            choice = choices[int(output.request_id)][output.index]
            choice.token_ids += output.token_ids
            choice.logprobs += output.logprobs
            choice.finish_reason, choice.score = output.finish_reason, output.score
            told[int(output.request_id)] += output.prompt_logprobs

    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        swap_ahead=swap_ahead,
        preemption_mode=preemption_mode,
        max_model_len=executor.max_model_len,
        eos_token_ids=frozenset(executor.config.eos_token_ids),
        vocab_size=executor.config.vocab_size,
        model_revision=executor.config.model_revision,
        num_stages=num_stages,
    )
    memory = KVCacheManager(executor.kv_cache_config, prefix_caching=prefix_caching, host_caching=host_caching)
    core = EngineCore(Scheduler(config, memory, rates=rates), executor, receive, recorder=recorder)
    guesses(core.scheduler)
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        grammar = grammars[index] if grammars else None
        core.scheduler.add_request(Request(str(index), prompt, wanted, grammar=grammar))
    for _ in range(MAX_STEPS):
        if not core.scheduler.has_work:
            break
        core.step()
    assert not core.scheduler.has_work, "the engine made no progress"
    memory.check_integrity()
    assert memory.device_pool.num_free == memory.device_pool.num_blocks
    assert memory.host_pool.num_free == memory.host_pool.num_blocks
    if memory.states is not None:
        assert memory.states.device_pool.num_used == memory.states.host.pool.num_used == 0
    return Run(choices, told, core.scheduler.stats)
