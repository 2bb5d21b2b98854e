"""The command ``quire-engine simulate``: reads settings and trace, simulates each variant, prints the report."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from quire_proto.cli import read_settings
from quire_proto.extras import install_command
from quire_proto.terminal import fail, waiting

from quire_engine.simulation.comparison import draw_comparison, make_comparison
from quire_engine.simulation.config import SimulationConfig, Variant
from quire_engine.simulation.report import SimulationReport, check_can_plot, draw_plots, make_report, make_table
from quire_engine.simulation.simulator import Simulation, SimulationRecorder
from quire_engine.simulation.trace import Arrival, TraceError, read_trace


def simulate(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, and with 1 and one sentence for a file that it cannot read
    or write.
    """
    config = read_settings(SimulationConfig, arguments)
    if config.plot is not None:
        try:
            check_can_plot()
        except ImportError:
            fail(f"--plot needs matplotlib: {install_command('quire-engine', 'plot')}.")
    try:
        arrivals = read_trace(config.trace, start=config.start, limit=config.limit, rate=config.rate, seed=config.seed)
    except TraceError as error:
        fail(str(error))
    variants = config.variants
    recorders: dict[str, SimulationRecorder] = {}
    for name, variant in variants.items():
        with waiting(f"run {len(recorders) + 1} of {len(variants)}: {name}"):
            recorders[name] = _simulate_variant(config, variant, arrivals)
    reports = {name: make_report(recorder) for name, recorder in recorders.items()}
    format_table = make_comparison if _compares_engines(config) else make_table
    sys.stdout.write(f"{_as_json(config, reports) if config.as_json else format_table(reports)}\n")
    if config.plot is not None:
        _plot(config, config.plot, recorders, reports)


def _simulate_variant(config: SimulationConfig, variant: Variant, arrivals: Sequence[Arrival]) -> SimulationRecorder:
    simulation = Simulation(
        config.scheduler_config(variant.policy),
        config.kv_cache_config,
        config.latency,
        seed=config.seed,
        prefix_caching=config.enable_prefix_caching,
        host_caching=config.enable_host_caching,
        num_disk_blocks=config.num_disk_blocks,
        memory=variant.memory,
        batching=variant.batching,
    )
    return simulation.run(arrivals)


def _compares_engines(config: SimulationConfig) -> bool:
    """Whether runs differ in more than one engine's order of admission."""
    return max(len(config.batching), len(config.memory)) > 1


def _as_json(config: SimulationConfig, reports: Mapping[str, SimulationReport]) -> str:
    """Returns the settings and the report of each run, as JSON."""
    varied = {"compare", "scheduling_policy", "batching", "memory"}
    settings = config.model_dump(mode="json", exclude={"as_json", "plot", *varied})
    settings |= {"latency": asdict(config.latency), "capacity": asdict(config.kv_cache_config)}
    variants = config.variants
    runs = {name: {**variants[name]._asdict(), **asdict(report)} for name, report in reports.items()}
    return json.dumps({"settings": settings, "runs": runs}, indent=2)


def _plot(
    config: SimulationConfig,
    path: Path,
    recorders: Mapping[str, SimulationRecorder],
    reports: Mapping[str, SimulationReport],
) -> None:
    try:
        if _compares_engines(config):
            draw_comparison(path, reports)
        else:
            draw_plots(path, recorders)
    except (OSError, ValueError) as error:
        fail(f"The plot cannot be written: {error}.")
