"""What scheduling costs a step, without a model: `make bench`.

The real scheduler and the real pools, with an executor that only answers. Every step about one sequence ends, one is
admitted and one arrives, so that each policy has its work to do. Measured are ``schedule`` and ``update_from_output``,
as the step loop itself reports them.
"""

import argparse
import random
import statistics
from typing import get_args

from quire_engine.config import Policy
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_proto.sampling import SamplingParams

SIZES = ((64, 0), (64, 10_000), (256, 10_000))
MAX_MODEL_LEN = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    for policy in get_args(Policy):
        for running, waiting in SIZES:
            milliseconds = Bench(policy, running, waiting).measure(options.steps)
            print(
                f"  {policy:>8}, {running:>4} running, {waiting:>6} waiting: plan + commit "
                f"median {statistics.median(milliseconds):.3f} ms a step, "
                f"p99 {statistics.quantiles(milliseconds, n=100)[98]:.3f} ms"
            )


class Bench:
    """An engine that always has so many sequences running and so many more waiting."""

    def __init__(self, policy: Policy, running: int, waiting: int) -> None:
        self._running = running
        self._live = running + waiting
        self._random = random.Random(0)
        self._arrived = 0
        self._ended = 0
        self._milliseconds: list[float] = []
        capacity = KVCacheConfig(16, 1 + running * MAX_MODEL_LEN // 16, 0)
        limits = SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=MAX_MODEL_LEN, scheduling_policy=policy
        )
        executor = SimulatedExecutor(capacity, PRESETS["cpu"].latency, sleep=lambda _: None)
        scheduler = Scheduler(limits, KVCacheManager(capacity), rates=executor.rates)
        self._core = EngineCore(scheduler, executor, self._receive)

    def measure(self, steps: int) -> list[float]:
        """Milliseconds of ``schedule`` and ``update_from_output`` in each of so many steps, once the batch is full."""
        while len(self._core.scheduler.running) < self._running:
            self._step()
        for _ in range(steps):
            self._step()
        return self._milliseconds[-steps:]

    def _step(self) -> None:
        while self._arrived - self._ended < self._live:
            self._arrive()
        self._core.step()

    def _arrive(self) -> None:
        prompt = [self._arrived % 1000 + 1] * self._random.randint(50, 350)
        params = SamplingParams(max_tokens=self._random.randint(100, 400), temperature=0, ignore_eos=True)
        self._core.scheduler.add_request(Request(str(self._arrived), prompt, params, priority=self._arrived % 3))
        self._arrived += 1

    def _receive(self, step: EngineCoreOutputs) -> None:
        self._ended += sum(output.ends_request for output in step.outputs)
        self._milliseconds.append(1e3 * (step.trace.schedule + step.trace.update))


if __name__ == "__main__":
    main()
