"""The figures as a table in the form of ``vllm bench serve``'s, one line for each rate of a sweep, files and a plot."""

import json
from collections.abc import Mapping, Sequence
from math import isinf
from pathlib import Path
from typing import Any

from quire_cli.bench.config import ServeBenchConfig
from quire_cli.bench.load import Load
from quire_cli.bench.metrics import DETAILS, selected_metrics

WIDTH = 50
SHORTEST_PEAK = 2.0  # seconds of a run with a peak
TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "ttft_including_client_queue": ("Time to First Token from the Intended Time", "TTFT incl. Client Queue"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}
MAX_FAILURES = 10  # kinds that are printed


def format_result(config: ServeBenchConfig, load: Load, result: Mapping[str, Any]) -> str:
    """The figures of one run as a table."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_totals(load, result)]
    for name in selected_metrics(config, load) if result["completed"] else ():
        title, short = TITLES[name]
        lines += [f"{title:-^{WIDTH}}", _row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])]
        lines += [_row(f"Median {short} (ms):", result[f"median_{name}_ms"])]
        lines += [_row(f"Std {short} (ms):", result[f"std_{name}_ms"])]
        lines += [
            _row(f"P{each:g} {short} (ms):", result[f"p{each:g}_{name}_ms"]) for each in config.metric_percentiles
        ]
    lines += [f"{'Client':-^{WIDTH}}", _row("CPU time per event (us):", result["client_cpu_us_per_event"])]
    if result["client_p99_lag_ms"] is not None:
        lines.append(_row("P99 lag in sending (ms):", result["client_p99_lag_ms"]))
    if result["failures"]:
        kinds = list(result["failures"].items())
        lines += [f"{'Failures':-^{WIDTH}}", *(f"{count} x {text}" for text, count in kinds[:MAX_FAILURES])]
        if more := sum(count for _, count in kinds[MAX_FAILURES:]):
            lines.append(f"{more} x other failures (--save-result writes all)")
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *(f"WARNING: {text}" for text in result["warnings"])])


def _totals(load: Load, result: Mapping[str, Any]) -> list[str]:
    # vLLM's buckets of a second say nothing of a run that fills less than two.
    peak = result["max_output_tokens_per_s"] if result["duration"] >= SHORTEST_PEAK else None
    rows: list[tuple[str, float | int | None]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", load.max_concurrency),
        ("Request rate configured (RPS):", None if isinf(load.rate) else load.rate),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", peak),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    return [_row(name, value) for name, value in rows if value is not None]


def _row(name: str, value: float | int) -> str:
    return f"{name:<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name:<40} {value}"


def format_sweep(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each rate."""
    head = ["rate", "req/s", "goodput", "tok/s", "TTFT mean", "TPOT mean", "E2EL mean", "failed"]
    rows = [head]
    for result in results:
        good = result["request_goodput"]
        means = (result.get(f"mean_{name}_ms") for name in ("ttft", "tpot", "e2el"))
        rows.append(
            [
                f"{result['request_rate']}",
                f"{result['request_throughput']:.2f}",
                "-" if good is None else f"{good:.2f}",
                f"{result['output_throughput']:.1f}",
                *("-" if mean is None else f"{mean:.1f} ms" for mean in means),
                str(result["failed"]),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def save_result(config: ServeBenchConfig, result: Mapping[str, Any], *, append: bool) -> Path:
    """Writes a result as JSON, as a further line with ``append``, and returns where. Raises ``OSError``."""
    name = config.result_filename or _file_name(config, result)
    path = (config.result_dir or Path()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in result.items() if config.save_detailed or key not in DETAILS}
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell():
            file.write("\n")
        json.dump(kept, file)
    return path


def _file_name(config: ServeBenchConfig, result: Mapping[str, Any]) -> str:
    concurrency = f"-concurrency{config.concurrency}" if config.concurrency else ""
    model = str(result["model_id"]).rpartition("/")[2]
    return f"{config.label or config.backend}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"


def draw_plot(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Draws TTFT, TPOT and E2EL over the output throughput, a point for each rate. Raises ``ImportError`` without
    matplotlib, which is in the extra ``plot``, and ``OSError`` or ``ValueError`` for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    names = [name for name in ("ttft", "tpot", "e2el") if f"mean_{name}_ms" in results[0]]
    if not names:
        raise ValueError("--percentile-metrics leaves out all of ttft, tpot and e2el")
    figure = Figure(figsize=(7, 3.5 * len(names)), layout="constrained")
    for name, axes in zip(names, figure.subplots(len(names), 1, squeeze=False)[:, 0], strict=True):
        across = [result["output_throughput"] for result in results]
        for key in sorted(key for key in results[0] if key.endswith(f"_{name}_ms") and not key.startswith("std")):
            axes.plot(across, [result[key] for result in results], marker="o", label=key.partition("_")[0])
        for result in results:
            axes.annotate(f"{result['request_rate']}/s", (result["output_throughput"], result[f"mean_{name}_ms"]))
        axes.set_xlabel("output tokens/s")
        axes.set_ylabel(f"{TITLES[name][1]}, ms")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
