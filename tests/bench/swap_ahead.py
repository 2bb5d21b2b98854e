"""What a preemption costs those beside it, with and without blocks swapped ahead of need: `make bench`.

A saturated engine in the simulator, an A100 with a model of 8 B parameters, and more sequences than the KV pool holds
to their ends, with short prompts and with long ones. For each setting: the steps that preempt, blocks that such a step
waits for, the longest wait, how much longer that makes the gap between two tokens of everyone beside it than it would
be, and what is copied in all. Counts and seconds are those of a formula, so the same everywhere.
"""

import random
from collections.abc import Iterator
from typing import Any

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulator import Simulation
from quire_engine.simulation.trace import Arrival

BLOCK, REQUESTS = 16, 400
WORKLOADS = {"prompts of 32 to 512 tokens": (32, 512, 3_000), "prompts of 2,000 to 8,000 tokens": (2_000, 8_000, 8_000)}
SETTINGS = (0.0, 0.8)


class Recorded(Simulation):
    """Keeps the trace of each step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[StepTrace] = []

    def _on_step(self, step: EngineCoreOutputs) -> None:
        self.steps.append(step.trace)
        super()._on_step(step)


def arrivals(shortest: int, longest: int) -> Iterator[Arrival]:
    """All at once, so that the pool is full from the start."""
    generator = random.Random(0)
    for index in range(REQUESTS):
        prompt, output = generator.randint(shortest, longest), generator.randint(256, 1024)
        yield Arrival(0.0, prompt, output, prefix_ids=(index,), block=prompt)


def main() -> None:
    for name, (shortest, longest, blocks) in WORKLOADS.items():
        print(f"  {REQUESTS} requests, {name}, outputs of 256 to 1,024, {blocks} blocks in either pool:")
        for swap_ahead in SETTINGS:
            print(f"  --swap-ahead {swap_ahead:<4}: {run(swap_ahead, blocks, arrivals(shortest, longest))}")


def run(swap_ahead: float, blocks: int, requests: Iterator[Arrival]) -> str:
    """Runs the requests and returns the row."""
    preset = PRESETS["a100-8b"]
    capacity = KVCacheConfig(BLOCK, blocks, blocks, preset.token_bytes * BLOCK)
    limits = SchedulerConfig(max_model_len=16_384, max_num_seqs=256, swap_ahead=swap_ahead)
    simulation = Recorded(limits, capacity, preset.latency)
    simulation.run(requests)
    stats, steps = simulation.scheduler.stats, simulation.steps
    preempting = [step for step in steps if step.preempted]
    wait = max(step.timings.swap for step in preempting)
    growth = max(step.seconds / (step.seconds - step.timings.swap) for step in preempting)
    return (
        f"{len(preempting) / len(steps):5.1%} of {len(steps)} steps preempt ({stats.preemptions_by_swap} swapped, "
        f"{stats.preemptions_by_recompute} computed again), wait for {max(step.swapped_blocks for step in preempting)} "
        f"blocks and {wait * 1e3:.2f} ms at most, gap {growth:.2f} times; copied {stats.blocks_copied_out} at need, "
        f"{stats.blocks_copied_ahead} ahead ({stats.blocks_used_ahead} used)"
    )


if __name__ == "__main__":
    main()
