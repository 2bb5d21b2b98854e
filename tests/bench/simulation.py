"""Waste and policies on a trace, simulated: `make bench-simulation TRACE=FILE`.

First the KV waste with blocks of 16 tokens. Then ``fcfs`` against ``sjf`` at the load where the queue of ``fcfs``
begins to grow. That load is searched for: the queue is said to grow at a rate if for a tenth of the time it was never
empty. Nothing is set that is not printed; the limits are the simulator's defaults.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from quire_engine.config import Policy
from quire_engine.simulation.config import PRESETS, SimulationConfig
from quire_engine.simulation.report import SimulationReport, make_report, make_table
from quire_engine.simulation.simulator import Simulation, SimulationRecorder, StepSamples
from quire_engine.simulation.trace import Arrival, read_trace

WASTE_BAR = 0.04
STRIDE, RESOLUTION = 1.25, 1.02


def main() -> None:
    options = parse_options()
    config = SimulationConfig(trace=options.trace, preset=options.preset, limit=options.rows)
    print(f"  {len(read(config, 1.0))} requests of {config.trace.name}; {config.latency}; {config.kv_cache_config};")
    print(f"  {config.scheduler_config('fcfs')}")
    grows = Growth(config)
    stable = largest(lambda rate: not grows(rate), saturation(config))
    print_waste(make_report(run(config, "fcfs", stable)))
    for rate in (stable, stable * RESOLUTION):
        compare(config, rate)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=None, help="use so many rows instead of all")
    parser.add_argument("--preset", choices=list(PRESETS), default="a100-8b")
    return parser.parse_args()


def read(config: SimulationConfig, rate: float) -> list[Arrival]:
    return read_trace(config.trace, limit=config.limit, rate=rate)


def run(config: SimulationConfig, policy: Policy, rate: float) -> SimulationRecorder:
    return Simulation(config.scheduler_config(policy), config.kv_cache_config, config.latency).run(read(config, rate))


def saturation(config: SimulationConfig) -> float:
    """The rate that the engine keeps up with when it never lacks work: where the search begins."""
    report = make_report(run(config, "fcfs", 1e6))
    return report.requests_per_second * read(config, 1.0)[-1].time / report.requests


class Growth:
    """Whether the queue of ``fcfs`` grows at a rate: for a tenth of the time it was never empty."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config

    def __call__(self, rate: float) -> bool:
        recorder = run(self._config, "fcfs", rate)
        longest = longest_stretch(recorder.samples)
        part = longest / max(life.arrived for life in recorder.requests.values())
        print(
            f"  rate {rate:.3f}: somebody waited for {longest:.0f} s on end, {100 * part:.1f} % of the time", flush=True
        )
        return part > 0.1


def longest_stretch(samples: StepSamples) -> float:
    """The longest time in which the queue was never empty, in seconds."""
    longest = 0.0
    begin = 0.0
    for time, waiting in zip(samples.time, samples.waiting, strict=True):
        if not waiting:
            begin = time
        longest = max(longest, time - begin)
    return longest


def largest(holds: Callable[[float], bool], start: float) -> float:
    """The largest rate, to the resolution, at which ``holds`` is true; it is for small ones and not for large ones."""
    low = high = start
    if holds(start):
        while holds(high := low * STRIDE):
            low = high
    else:
        while not holds(low := high / STRIDE):
            high = low
    while high > low * RESOLUTION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def print_waste(report: SimulationReport) -> None:
    print(
        f"  KV waste: {100 * report.waste:.2f} % of the slots in held blocks (bar: {100 * WASTE_BAR:.0f} %), "
        f"{report.unreachable_blocks} blocks unreachable"
    )


def compare(config: SimulationConfig, rate: float) -> None:
    policies: tuple[Policy, ...] = ("fcfs", "sjf")
    reports = {policy: make_report(run(config, policy, rate)) for policy in policies}
    fcfs, sjf = reports.values()
    print(f"\n  rate {rate:.3f}, {config.max_overtakes} overtakes allowed\n{make_table(reports)}")
    print(
        f"  mean wait under sjf: {100 * (1 - sjf.waiting.mean / fcfs.waiting.mean):.0f} % less than under fcfs; "
        f"no request was overtaken more than {sjf.overtakes.max:.0f} times"
    )


if __name__ == "__main__":
    main()
