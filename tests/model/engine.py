"""Runs prompts through the whole synchronous engine: scheduler, pools and the torch executor, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_engine.core import EngineCore, StepOutput
from quire_engine.executor.torch.runner import TorchExecutor
from quire_engine.kv.memory import KvMemory
from quire_engine.models.config import ModelConfig
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.statistics import Statistics
from quire_proto.sampling import SamplingParams

BLOCK_SIZE = 16
FLOAT_BYTES = 4


@dataclass
class Run:
    """What a run made: the output of each prompt, and the scheduler's counters."""

    outputs: list[list[int]]
    statistics: Statistics


def load(folder: Path, device_blocks: int, host_blocks: int) -> TorchExecutor:
    """The model in float32, with pools of exactly so many blocks."""
    config = ModelConfig.read(folder)
    block_bytes = FLOAT_BYTES * config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim
    executor = TorchExecutor.load(
        folder,
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=device_blocks * block_bytes,
        swap_bytes=host_blocks * block_bytes,
    )
    assert (executor.capacity.device_blocks, executor.capacity.host_blocks) == (device_blocks, host_blocks)
    return executor


def run(
    executor: TorchExecutor,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    chunk: int = 2048,
    prefix_caching: bool = True,
    max_num_seqs: int = 64,
) -> Run:
    """All prompts at once, to the end; every block must be back afterwards."""
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}

    def receive(step: StepOutput) -> None:
        for output in step.outputs:
            assert output.error is None, output.error
            outputs[output.request_id] += output.token_ids

    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        max_model_len=executor.max_model_len,
        eos_token_ids=frozenset(executor.config.eos_token_ids),
        vocab_size=executor.config.vocab_size,
        model_revision=executor.config.model_revision,
    )
    memory = KvMemory(executor.capacity, prefix_caching=prefix_caching)
    core = EngineCore(Scheduler(config, memory), executor, receive)
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        core.scheduler.add(Request(str(index), prompt, wanted))
    while core.scheduler.has_work:
        core.step()
    memory.check()
    assert memory.device.num_free == memory.device.num_blocks
    assert memory.host.num_free == memory.host.num_blocks
    return Run(list(outputs.values()), core.scheduler.statistics)
