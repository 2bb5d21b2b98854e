"""What giving way costs a request, by the way in which it does, at three sizes of the KV pool: `make bench`.

The simulator, an A100 with a model of 8 B parameters, and requests that come at random times, a few more at once than
the smaller pools hold to their ends. For each pool and each `--preemption-mode`: requests that were preempted; how long
they were away; the time from arrival to end and the longest gap between two tokens, of preempted and of untouched
requests and the former of all; and output tokens a second. Seconds are those of a formula, so the same everywhere.
"""

import random
from collections.abc import Iterator

from quire_engine.config import PreemptionPolicy
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.report import Percentiles, SimulationReport, make_report
from quire_engine.simulation.simulator import Simulation
from quire_engine.simulation.trace import Arrival

BLOCK, REQUESTS, RATE = 16, 600, 4.0
POOLS = (2_500, 3_000, 3_500)
MODES: tuple[PreemptionPolicy, ...] = ("swap", "recompute", "auto")
HEADER = (
    "blocks",
    "mode",
    "preempted",
    "away",
    "E2EL preempted",
    "untouched",
    "all",
    "gap preempted",
    "untouched",
    "tok/s",
)


def arrivals() -> Iterator[Arrival]:
    """Prompts of 32 to 1,024 tokens and outputs of 256 to 1,024, ``RATE`` a second on average."""
    generator, time = random.Random(0), 0.0
    for index in range(REQUESTS):
        time += generator.expovariate(RATE)
        prompt, output = generator.randint(32, 1024), generator.randint(256, 1024)
        yield Arrival(time, prompt, output, prefix_ids=(index,), block=prompt)


def main() -> None:
    print(f"  {REQUESTS} requests, {RATE:g} a second; mean / p99 in seconds, gaps in ms")
    print("  | " + " | ".join(HEADER) + " |")
    print("  |" + "---|" * len(HEADER))
    for blocks in POOLS:
        for mode in MODES:
            print(f"  | {blocks:,} | {mode} | {' | '.join(row(run(blocks, mode)))} |", flush=True)


def run(blocks: int, mode: PreemptionPolicy) -> SimulationReport:
    """The requests on a device pool of so many blocks, and a host pool of as many."""
    device = PRESETS["a100-8b"]
    capacity = KVCacheConfig(BLOCK, 1 + blocks, blocks, device.token_bytes * BLOCK)
    limits = SchedulerConfig(max_model_len=2_048, max_num_seqs=256, max_step_seconds=None, preemption_mode=mode)
    return make_report(Simulation(limits, capacity, device.latency).run(arrivals()))


def row(report: SimulationReport) -> Iterator[str]:
    """The cells behind the pool and the mode."""
    preempted, untouched = report.preempted, report.untouched
    yield f"{preempted.requests} ({report.preemptions_by_swap} + {report.preemptions_by_recompute})"
    for seconds in (preempted.away, preempted.e2el, untouched.e2el, report.e2el):
        yield _mean_p99(seconds)
    for gaps in (preempted.longest_gap, untouched.longest_gap):
        yield _mean_p99(gaps, 1e3, 0)
    yield f"{report.output_tokens_per_second:.0f}"


def _mean_p99(values: Percentiles, unit: float = 1.0, digits: int = 2) -> str:
    return f"{values.mean * unit:.{digits}f} / {values.p99 * unit:.{digits}f}"


if __name__ == "__main__":
    main()
