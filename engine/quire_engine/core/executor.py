"""The ``Executor`` protocol: executes scheduler outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import ModelOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast this engine computes and copies; decides between swapping and recomputing. The executor measures it at
    its start: prompt tokens computed per second, and bytes copied between the pools per second (one way).
    """

    tokens_per_second: float
    bytes_per_second: float


UNMEASURED = Rates(tokens_per_second=1e3, bytes_per_second=1e9)
"""Assumed if nothing was measured: a slow CPU."""


@dataclass(slots=True)
class WeightStats:
    """Statistics of streamed weights: the bytes that they occupy in the memory of the computing device, in host memory
    if that is separate, and on disk. Also the bytes read so far, and the seconds that steps waited for reads.
    ``wait_seconds`` stays 0 on a GPU, which waits by itself.
    """

    memory_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0


class ExecutorError(Exception):
    """The executor cannot continue, and no single request is at fault: the engine must end."""


class CopyError(ExecutorError):
    """A block copy failed. No single request is at fault, and the pools' contents cannot be trusted any more: the
    engine must end.
    """


class SleepError(Exception):
    """An engine cannot go to sleep or wake up; its state is unchanged. The text is a clause that says why."""


class Sleeper(Protocol):
    """Frees the memory of an idle executor. Between ``sleep`` and ``wake_up`` nothing may be executed. Afterwards the
    device's KV blocks have no contents.
    """

    def sleep(self) -> None:
        """Frees the memory of weights and device KV blocks. Blocks of the host pool stay. Raises ``SleepError``."""
        ...

    def wake_up(self) -> None:
        """Allocates the memory again and restores the same weights. Raises ``SleepError``."""
        ...


class Executor(Protocol):
    """Executes scheduler outputs one at a time on one device."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The memory from which the scheduler makes its pools. Constant."""
        ...

    @property
    def rates(self) -> Rates:
        """How fast the executor computes and copies. Constant."""
        ...

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once. Constant. 1 runs step by step. An executor with more is an
        ``AsyncExecutor``: 2 if steps overlap, or the number of stages of a pipeline.
        """
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Copies, computes and samples.

        Raises ``ExecutorError`` if the engine cannot continue, for example because a copy failed. Any other exception
        means that the forward pass failed: the copies are done, the chunks' tokens are not computed, and the chunks may
        be run again, together or alone.
        """
        ...

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """Returns the results of transfers between host and disk since the last call, each once. Waits up to
        ``timeout`` seconds for one. Called only while transfers are in flight.
        """
        ...

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter, if it has any. No later step uses it."""
        ...

    def close(self) -> None:
        """Frees the device's memory."""
        ...


class AsyncModelOutput(Protocol):
    """A step in flight. ``sample_tokens`` is called once, then ``get_output`` once.

    A sequence may end after the launch, by its pending token or by an abort. Its chunk was then computed for nothing,
    and what is sampled for it, including an error, is ignored. If the step before fails, this step has computed
    garbage: ``sample_tokens`` and ``get_output`` are still called, their result or error is discarded (except an
    ``ExecutorError``), and the chunks are run again. In both cases any token may stand in place of the pending one.
    """

    def sample_tokens(self) -> None:
        """Starts sampling. The rows now have every token before the ones to sample, because the step before has had its
        ``get_output``. Grammars, penalties and everything else that reads tokens is therefore done here. Returns
        without waiting for the device if possible. Raises only ``ExecutorError``: ``get_output`` raises anything else
        that fails here.
        """
        ...

    def get_output(self) -> ModelOutput:
        """Waits until the step is done. Raises like ``Executor.execute_model``."""
        ...


class AsyncExecutor(Executor, Protocol):
    """Computes a step while the next one is scheduled. Steps run in the order of their launch: a step reads what
    earlier steps wrote, and only later steps overwrite what it reads or writes, including copies in either direction.
    The scheduler relies on this: it reuses blocks while a step in flight still uses them.

    With depth 2, a round of the loop schedules a step, launches it, updates from the output of the step before, and
    then samples this step's tokens. So at a launch either nothing is in flight, and then no chunk awaits a token; or
    exactly one step is, which has had its ``sample_tokens`` but not its ``get_output``.
    A pipeline has as many steps in flight as stages. None of their chunks awaits a token. Each has its
    ``sample_tokens`` right before its ``get_output``, in the order of the launches.

    ``execute_model`` may be called when nothing is in flight.
    """

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> AsyncModelOutput:
        """Starts the copies and the forward pass. Raises like ``Executor.execute_model``; then only the copies of the
        step are in flight.
        """
        ...
