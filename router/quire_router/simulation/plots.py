"""A simulation as pictures: TTFT over the load, and how it is distributed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire_router.simulation.recorder import RunRecord
from quire_router.simulation.report import ttft

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_plots(path: Path, records: Mapping[float, Mapping[str, RunRecord]]) -> None:
    """Writes one picture in the format that the file's name says: the mean TTFT of each policy over the utilisation,
    and below it, for each utilisation, its distribution. Raises ``ImportError`` without matplotlib, which is in the
    extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 * (1 + len(records))), layout="constrained")
    over_load, *distributions = figure.subplots(1 + len(records), 1)
    _draw_means(over_load, records)
    for axes, (load, row) in zip(distributions, records.items(), strict=True):
        for name, record in row.items():
            values = _values(record)
            axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name, linewidth=1)
        _label(axes, f"TTFT at utilisation {load:g}, s", "part of requests")
        axes.set_xscale("log")
    figure.savefig(path)


def _draw_means(axes: "Axes", records: Mapping[float, Mapping[str, RunRecord]]) -> None:
    loads = sorted(records)
    for name in records[loads[0]]:
        means = [float(np.mean(_values(records[load][name]) or [0.0])) for load in loads]
        axes.plot(loads, means, label=name, marker="o", linewidth=1)
    _label(axes, "utilisation", "mean TTFT, s")
    axes.set_yscale("log")


def _values(record: RunRecord) -> list[float]:
    return sorted(ttft(trace) for trace in record.traces if trace.first_token is not None)


def _label(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    axes.legend()
