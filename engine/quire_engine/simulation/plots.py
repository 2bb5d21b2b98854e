"""A simulation as pictures: the queue over time, how TTFT is distributed, and the KV memory over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire_engine.simulation.recorder import SimulationRecorder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 2000


def draw_plots(path: Path, recorders: Mapping[str, SimulationRecorder]) -> None:
    """Writes one picture with a line for each policy, in the format that the file's name says. Raises ``ImportError``
    without matplotlib, which is in the extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be
    written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    queue, ttft, usage = figure.subplots(3, 1)
    for name, recorder in recorders.items():
        _draw_queue(queue, name, recorder)
        _draw_ttft(ttft, name, recorder)
        _draw_usage(usage, name, recorder)
    _label(queue, "virtual time, s", "requests waiting")
    _label(ttft, "TTFT, s", "part of requests")
    _label(usage, "virtual time, s", "KV blocks in use")
    figure.savefig(path)


def _draw_queue(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    axes.plot(_downsample(recorder.samples.time), _downsample(recorder.samples.waiting), label=name, linewidth=1)


def _draw_ttft(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    lives = recorder.requests.values()
    values = np.sort([life.first_token - life.arrived for life in lives if life.first_token is not None])
    axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name, linewidth=1)


def _draw_usage(axes: "Axes", name: str, recorder: SimulationRecorder) -> None:
    part = np.asarray(recorder.samples.used_blocks) / recorder.scheduler.kv_cache_manager.device_pool.num_blocks
    axes.plot(_downsample(recorder.samples.time), _downsample(part), label=name, linewidth=1)
    axes.set_ylim(0, 1)


def _label(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    axes.legend()


def _downsample(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Evenly chosen values, no more than a picture can show."""
    array = np.asarray(values, dtype=np.float64)
    return array[:: max(1, len(array) // POINTS)]
