"""The ``Executor`` protocol: executes scheduler outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import ModelOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast this engine computes and copies, which decides between swapping and computing again. Measured by the
    executor when it starts: prompt tokens that it computes and bytes that it copies between the
    pools (one way), each a second.
    """

    tokens_per_second: float
    bytes_per_second: float


UNMEASURED = Rates(tokens_per_second=1e3, bytes_per_second=1e9)
"""What is assumed where nothing was measured: a slow CPU."""


@dataclass(slots=True)
class WeightStats:
    """The weights of layers of which some are streamed: the bytes that they take in the memory of the device that
    computes with them, in the host's where that is another, and on disk; the bytes that were read, and the seconds that
    steps waited for them, which stay 0 on a GPU: it waits by itself.
    """

    memory_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0


class ExecutorError(Exception):
    """The executor cannot go on, and no single request is at fault: the engine must end."""


class CopyError(ExecutorError):
    """A block copy failed. No single request is at fault and the pools cannot be trusted any more: the engine must
    end.
    """


class SleepError(Exception):
    """An engine cannot go to sleep, or cannot wake up; it is as it was before. The text is a clause that says why."""


class Sleeper(Protocol):
    """Gives back the memory of an executor that has nothing to do. Between ``sleep`` and ``wake_up`` nothing may be
    executed, and KV blocks of the device have no contents after that.
    """

    def sleep(self) -> None:
        """Gives back the memory of weights and KV blocks. Blocks of the host pool stay. Raises ``SleepError``."""
        ...

    def wake_up(self) -> None:
        """Takes it again, with the same weights. Raises ``SleepError``."""
        ...


class Executor(Protocol):
    """Executes scheduler outputs, one after the other, on one device."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """What the scheduler's pools are made from. Constant."""
        ...

    @property
    def rates(self) -> Rates:
        """How fast it computes and copies. Constant."""
        ...

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once. Constant: 1 runs step by step, and what has more is an
        ``AsyncExecutor``: 2 where steps overlap, or as many as a pipeline has stages.
        """
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Copies, computes and samples.

        Raises ``ExecutorError`` when the engine cannot go on, as when a copy failed. Any other exception means that the
        forward pass failed: the copies are done, the tokens of the chunks are not, and the chunks may be run again,
        together or alone.
        """
        ...

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """The results of transfers between host and disk that have come since the last call, each once. Waits for one,
        for at most ``timeout`` seconds. Called only where there are any to come.
        """
        ...

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter, if any is held for it. No later step has it."""
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


class AsyncModelOutput(Protocol):
    """A step that is in flight. ``sample_tokens`` is called once, then ``get_output`` once.

    A sequence may end after the launch, by the token that was pending then or because it was aborted: its chunk was
    computed for nothing, and nobody looks at what is drawn for it, an error included. If the step before fails, this
    one has computed garbage: it is drawn and taken all the same, what it returns or raises is thrown away (but for an
    ``ExecutorError``), and its chunks are run again. In both cases any token may stand in the place of the pending one.
    """

    def sample_tokens(self) -> None:
        """Has the tokens drawn. By now the rows have every token before the one to be drawn, as the step before has had
        its ``get_output``: grammars, penalties and whatever else looks at tokens is done here. Returns without waiting
        for the device, as far as that can be.
        """
        ...

    def get_output(self) -> ModelOutput:
        """Waits until the step is done. Raises as ``Executor.execute_model``."""
        ...


class AsyncExecutor(Executor, Protocol):
    """Computes a step while the next one is scheduled. Steps are carried out in the order of their launch: what one
    writes, the next one reads, and what one reads or writes, copies in either direction included, only later ones
    overwrite. The scheduler relies on it: blocks are given to others while a step in flight still uses them.

    With depth 2, a round of the loop is: schedule a step, launch it, update from the output of the step before, and
    then have this step's tokens drawn. So when a step is launched, the one before it has had its ``sample_tokens`` but
    not its ``get_output``, and nothing else is in flight; or nothing is, and then no chunk awaits a token.
    A pipeline has as many steps in flight as stages. None of their chunks awaits a token, and each has its
    ``sample_tokens`` right before its ``get_output``, in the order of the launches.

    ``execute_model`` may be called when nothing is in flight.
    """

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> AsyncModelOutput:
        """Begins with the copies and the forward pass. Raises as ``Executor.execute_model``; then nothing of the step
        but its copies is in flight.
        """
        ...
