"""``EngineCoreClient``: what a server needs of an engine core, wherever it runs. The name is vLLM's."""

from dataclasses import dataclass, field
from typing import Protocol

from quire.v1 import engine_pb2 as pb

from quire_engine.core.data_parallel import DPStats
from quire_engine.core.engine_core import Command, EngineCoreOutputs
from quire_engine.core.executor import WeightStats
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import SchedulerStats
from quire_engine.structured_output.compiler import ModelGrammars


class EngineDeadError(Exception):
    """The core's process has ended or failed. The text is one sentence that names the cause. The name is vLLM's."""


@dataclass(slots=True)
class CoreStats:
    """Totals of a core since its start. They change while it runs. ``weights`` are None without layers on disk or in
    host memory, and ``data_parallel`` without a group of engines.
    """

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    weights: WeightStats | None = None
    data_parallel: DPStats | None = None


class CoreListener(Protocol):
    """Hears from a core. Calls come in order, on any thread, and must return quickly."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Takes the outputs of a step."""
        ...

    def on_leaving(self) -> None:
        """Hears that the engine is to stop: another engine of its data-parallel group was asked to, or a node."""
        ...

    def on_end(self, failure: BaseException | None) -> None:
        """Hears that the core has ended: after ``Shutdown``, or because of ``failure``."""
        ...


class EngineCoreClient(Protocol):
    """Sends commands to a core. Thread-safe. ``EngineCore`` itself is one."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the core has freed its memory."""
        ...

    @property
    def seconds_since_progress(self) -> float:
        """See ``EngineCore.seconds_since_progress``."""
        ...

    def send(self, command: Command) -> None:
        """Queues a command, to be handled between two steps. Replies are called on any thread."""
        ...


class CoreRunner(EngineCoreClient, Protocol):
    """Runs a core: ``CoreThread`` in this process, ``CoreProcess`` in another."""

    @property
    def stats(self) -> CoreStats:
        """The core's totals, always the same object."""
        ...

    def start(self, listener: CoreListener) -> None:
        """Begins to run steps. Call it on the event loop on which commands are sent, if there is one."""
        ...

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """Reads an adapter's folder, which takes a while. Returns the adapter with its digest. Raises ``LoRAError``."""
        ...

    def leave(self) -> None:
        """Tells the engines of the same data-parallel group that this one was asked to stop."""
        ...

    def join(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the end of the core."""
        ...

    def close(self) -> None:
        """Frees the model's memory. No step may be running."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """A core whose model is loaded. ``description`` says what it serves. ``grammars`` compiles grammars for it."""

    runner: CoreRunner
    description: pb.DescribeResponse
    grammars: ModelGrammars
