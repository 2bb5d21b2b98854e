"""What placing a request costs the router: `python -m tests.bench.placement`.

Prints the CPU time of one choice, naming the prompt's blocks and asking the index included, for fleets of several
sizes and each policy. Every engine has load of its own, and for each prompt some have the beginning of it cached. A
choice comes every millisecond, and before each a few engines have said something new of their pace.
"""

import argparse
import random
import statistics
from array import array
from time import thread_time_ns
from typing import get_args

import numpy as np
from quire_proto.sampling import SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.placement.engine_table import EngineTable, StepTimes
from quire_router.placement.placer import Placer
from quire_router.placement.policies import PlacementSettings, PolicyName
from quire_router.placement.prefix_index import BlockNamespace, PrefixIndex, Tier

NAMESPACE = BlockNamespace("bench", 16)
PACE = (7e-3, 3e-5, 2e-4, 4e-5)
NEWS = 5  # paces before each choice
BETWEEN = 1e-3  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=[3, 100, 1000])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--choices", type=int, default=500)
    options = parser.parse_args()
    for engines in options.engines:
        for policy in get_args(PolicyName):
            microseconds = Bench(engines, options.blocks, policy).measure(options.choices)
            tenths = statistics.quantiles(microseconds, n=10)
            print(
                f"  {policy:>12}, {engines:>5} engines, {options.blocks} blocks: us CPU a choice: "
                f"median {tenths[4]:6.1f}, p10 {tenths[0]:6.1f}, p90 {tenths[8]:6.1f}"
            )


class Bench:
    """A fleet of so many engines under load, of which each prompt finds a part of its blocks at up to sixteen."""

    def __init__(self, engines: int, blocks: int, policy: PolicyName) -> None:
        self._random = random.Random(0)
        self._blocks = blocks
        self._now = 0.0
        self._table = EngineTable()
        self._index = PrefixIndex()
        rows = [self._table.add(f"engine-{number}") for number in range(engines)]
        for row in rows:
            self._load(row)
        self._rows = np.array(rows, np.intp)
        self._rows.flags.writeable = False
        settings = PlacementSettings(policy=policy)
        self._placer = Placer(
            self._table, self._index, settings, ([NAMESPACE] * len(self._table)).__getitem__, lambda: self._now
        )

    def measure(self, choices: int) -> list[float]:
        """Microseconds of CPU time of each choice."""
        return [self._choose(number) for number in range(choices)]

    def _load(self, row: int) -> None:
        table = self._table
        table.requests[row] = self._random.randrange(60)
        table.decoding[row] = self._random.randrange(50)
        table.pending_tokens[row] = self._random.randrange(10_000)
        table.blocks_total[row], table.blocks_free[row] = 10_000, self._random.randrange(1, 10_000)
        table.max_sequences[row] = 256
        self._set_step_times(row)

    def _set_step_times(self, row: int) -> None:
        pace = [self._random.uniform(0.8, 1.2) * seconds for seconds in PACE]
        self._table.set_step_times(row, StepTimes(*pace))

    def _choose(self, number: int) -> float:
        prompt = array("i", (number * 7919 + place for place in range(self._blocks * NAMESPACE.block_size)))
        names = list(NAMESPACE.hashes(prompt))
        for row in self._random.sample(self._rows.tolist(), min(16, len(self._rows))):
            self._index.store(row, Tier.DEVICE, names[: self._random.randrange(len(names) + 1)])
        for row in self._random.sample(self._rows.tolist(), min(NEWS, len(self._rows))):
            self._set_step_times(row)
        self._now += BETWEEN
        request = GenerationRequest(f"request-{number}", "m", prompt, SamplingParams(max_tokens=256))
        begin = thread_time_ns()
        decision = self._placer.place(request, self._rows)
        taken = thread_time_ns() - begin
        assert decision is not None
        return taken / 1000


if __name__ == "__main__":
    main()
