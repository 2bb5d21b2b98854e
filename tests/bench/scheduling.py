"""What scheduling and bookkeeping cost a step, without a model: `make bench`.

A step here is plan + commit + publish of the real scheduler and the real pools; the executor only answers with a token.
"""

import argparse
import statistics
import time

from quire_engine.core import EngineCore, StepOutput
from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.memory import KvMemory
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.plan import StepPlan, StepResult
from quire_engine.scheduling.scheduler import Scheduler
from quire_proto.sampling import SamplingParams


class InstantExecutor:
    """Answers every chunk with token 5 at once."""

    depth = 1

    def __init__(self, capacity: KvCapacity) -> None:
        self.capacity = capacity

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult({chunk.sequence_id: 5 for chunk in plan.chunks if chunk.draws})

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    for running, waiting in ((64, 0), (64, 10_000), (256, 10_000)):
        milliseconds = measure(running, waiting, options.steps)
        print(
            f"  {running:>4} running, {waiting:>6} waiting: "
            f"median {statistics.median(milliseconds):.3f} ms a step, "
            f"p99 {statistics.quantiles(milliseconds, n=100)[98]:.3f} ms"
        )


def measure(running: int, waiting: int, steps: int) -> list[float]:
    """Milliseconds of each decode step once ``running`` sequences run."""
    capacity = KvCapacity(16, 1 + running * 64, 0)
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=1024)
    core = EngineCore(Scheduler(config, KvMemory(capacity)), InstantExecutor(capacity), ignore)
    params = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True)
    for index in range(running + waiting):
        core.scheduler.add(Request(str(index), [index % 1000 + 1] * 200, params))
    while len(core.scheduler.running) < running or any(s.num_uncomputed > 1 for s in core.scheduler.running):
        core.step()
    return [timed(core) for _ in range(steps)]


def timed(core: EngineCore) -> float:
    begin = time.perf_counter()
    core.step()
    return 1e3 * (time.perf_counter() - begin)


def ignore(step: StepOutput) -> None:
    del step


if __name__ == "__main__":
    main()
