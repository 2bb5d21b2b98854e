"""The command ``quire-engine simulate``: reads the settings and the trace, simulates each policy, prints the report."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from quire_proto.cli import read_settings

from quire_engine.config import Policy
from quire_engine.errors import quit_with
from quire_engine.simulation.config import SimulationConfig
from quire_engine.simulation.report import SimulationReport, draw_plots, make_report, make_table
from quire_engine.simulation.simulator import Simulation, SimulationRecorder
from quire_engine.simulation.trace import Arrival, TraceError, read_trace


def simulate(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, 1 with one sentence for a file that it cannot read
    or write.
    """
    config = read_settings(SimulationConfig, arguments)
    try:
        arrivals = read_trace(config.trace, start=config.start, limit=config.limit, rate=config.rate, seed=config.seed)
    except TraceError as error:
        quit_with(1, str(error))
    recorders: dict[str, SimulationRecorder] = {
        policy: _simulate_policy(config, policy, arrivals) for policy in config.policies
    }
    reports = {policy: make_report(recorder) for policy, recorder in recorders.items()}
    sys.stdout.write(f"{_as_json(config, reports) if config.as_json else make_table(reports)}\n")
    if config.plot is not None:
        _plot(config.plot, recorders)


def _simulate_policy(config: SimulationConfig, policy: Policy, arrivals: Sequence[Arrival]) -> SimulationRecorder:
    simulation = Simulation(
        config.scheduler_config(policy),
        config.kv_cache_config,
        config.latency,
        seed=config.seed,
        prefix_caching=config.enable_prefix_caching,
        host_caching=config.enable_host_caching,
    )
    return simulation.run(arrivals)


def _as_json(config: SimulationConfig, reports: Mapping[str, SimulationReport]) -> str:
    """The settings and the report of each policy, as JSON."""
    settings = config.model_dump(mode="json", exclude={"as_json", "plot", "compare", "scheduling_policy"})
    settings |= {"latency": asdict(config.latency), "capacity": asdict(config.kv_cache_config)}
    policies = {policy: asdict(report) for policy, report in reports.items()}
    return json.dumps({"settings": settings, "policies": policies}, indent=2)


def _plot(path: Path, recorders: Mapping[str, SimulationRecorder]) -> None:
    try:
        draw_plots(path, recorders)
    except ImportError:
        quit_with(1, "Plots need matplotlib: pip install 'quire-engine[plot]'.")
    except (OSError, ValueError) as error:
        quit_with(1, f"The plot cannot be written: {error}.")
