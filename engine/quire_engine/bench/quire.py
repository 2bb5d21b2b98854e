"""Our own engine as a ``System``: the same core and executor as in the service, without a server."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from quire_proto.sampling import SamplingParams

from quire_engine.bench.config import BenchConfig
from quire_engine.bench.measure import SystemFailedError
from quire_engine.bench.workload import Workload
from quire_engine.core.batch_scheduler import StepPolicy, continuous_batching
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs, StepTrace
from quire_engine.core.request import Request
from quire_engine.device.accelerator import resolve_device
from quire_engine.errors import ModelError
from quire_engine.factory import load_executor, make_scheduler

if TYPE_CHECKING:
    from quire_engine.executor.torch_executor import TorchExecutor


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Medians over the steps of throughput runs that only decoded, in milliseconds. ``bookkeeping`` is
    scheduling and output processing.
    """

    step: float
    forward: float
    sample: float
    bookkeeping: float


class Quire:
    """The engine with its model. A ``System``, whose CPU steps have no padding."""

    padding: float | None
    latencies: Sequence[float] = ()

    def __init__(self, config: BenchConfig, step_policy: StepPolicy = continuous_batching) -> None:
        from quire_engine.executor.torch_executor import TorchExecutor

        self._config = config
        self._step_policy = step_policy
        try:
            executor = load_executor(config, owns_process=True)
        except ModelError as error:
            raise SystemFailedError(str(error)) from None
        if executor.config.pooler_config is not None or not isinstance(executor, TorchExecutor):
            raise SystemFailedError(f"{config.model} pools prompts, and what is measured here is to continue them.")
        self._executor = executor
        self._traces: list[StepTrace] = []
        # CUDA graphs are of certain batch sizes, and smaller batches are filled up.
        is_exact = config.enforce_eager or resolve_device(config.device).type == "cpu"
        self.padding = 0.0 if is_exact else None

    @property
    def executor(self) -> "TorchExecutor":
        """The executor."""
        return self._executor

    def seconds(self, workload: Workload) -> float:
        """See ``System.seconds``."""
        made, failed = 0, ""
        ends: list[float] = []

        def receive(step: EngineCoreOutputs) -> None:
            nonlocal made, failed
            made += sum(len(output.token_ids) for output in step.outputs) + len(step.tokens.token_ids)
            ends.extend([time.perf_counter()] * sum(output.ends_request for output in step.outputs))
            failed = next((str(output.error) for output in step.outputs if output.error), failed)
            self._traces.append(step.trace)

        scheduler = make_scheduler(self._config, self._executor, self._step_policy)
        core = EngineCore(scheduler, self._executor, receive)
        requests = [
            Request(str(index), prompt, _sampling(size, workload.n, index))
            for index, (prompt, size) in enumerate(zip(workload.prompts, workload.outputs, strict=True))
        ]
        begin = time.perf_counter()
        for request in requests:
            core.scheduler.add_request(request)
        while core.scheduler.has_work:
            core.step()
        seconds = time.perf_counter() - begin
        if made != workload.output_tokens:
            raise SystemFailedError(f"It made {made} of {workload.output_tokens} tokens. {failed}".rstrip())
        self.latencies = [end - begin for end in ends]
        return seconds

    def decode_steps(self, sequences: int) -> DecodeSteps | None:
        """Medians of the steps that only decoded, for ``sequences`` sequences. Returns None if there was none."""
        steps = [step for step in self._traces if step.num_prefill == 0 and step.num_decode == sequences]
        if not steps:
            return None
        return DecodeSteps(
            step=_milliseconds([step.duration for step in steps]),
            forward=_milliseconds([step.timings.forward for step in steps]),
            sample=_milliseconds([step.timings.sample for step in steps]),
            bookkeeping=_milliseconds([step.schedule + step.update for step in steps]),
        )

    def close(self) -> None:
        """See ``System.close``. What torch has cached of a GPU is given back, too: the next system needs it."""
        self._executor.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _sampling(size: int, n: int, seed: int) -> SamplingParams:
    """Greedy for one output, and sampled for several, which would be equal otherwise."""
    return SamplingParams(temperature=float(n > 1), n=n, max_tokens=size, ignore_eos=True, seed=seed)


def _milliseconds(seconds: Sequence[float]) -> float:
    return 1e3 * median(seconds)
