"""The figures of a run, under the keys of ``vllm bench serve``, whose definitions they follow:

* TTFT: from sending a request to its first event with a token.
* TPOT: from the first event with a token to the last, over the output tokens but the first; for each request.
* ITL: between two such events of a request; all gaps of all requests together.
* E2EL: from sending a request to its last event with a token.
* Goodput: requests a second that met every objective; a failed one met none.

Where requests are sent at times of their own, TTFT and E2EL are also counted from when a request should have been sent
(``…_including_client_queue``). ``docs/benchmarks.md`` has the definitions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil, isinf
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_cli.bench.config import QUEUE_METRICS, ServeBenchConfig
from quire_cli.bench.load import Load, Run
from quire_cli.bench.stream import RequestOutput

Floats = npt.NDArray[np.float64]
# What makes a client too slow to be believed.
MAX_LAG = 0.010  # seconds by which 1 % of the requests may be sent late through the client's own fault
MAX_CPU = 0.7  # of a core, in a run of more than ``MIN_SECONDS``
MIN_SECONDS = 1.0


def compute_result(
    config: ServeBenchConfig, load: Load, run: Run, count_tokens: Callable[[str], int | None]
) -> dict[str, Any]:
    """All figures of a run, and of every request (``DETAILS``). ``count_tokens`` counts a text's tokens where
    the server does not say how many there were, and returns None if it cannot.
    """
    counted_by = _count_output_tokens(run.outputs, count_tokens)
    good = [output for output in run.outputs if output.success]
    total_input = sum(output.prompt_len for output in good)
    total_output = sum(output.output_tokens for output in good)
    events = sum(output.num_events for output in good)
    most_tokens, most_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.outputs) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / run.duration,
        "request_goodput": _count_good(good, config.goodput) / run.duration if config.goodput else None,
        "output_throughput": total_output / run.duration,
        "total_token_throughput": (total_input + total_output) / run.duration,
        "input_lens": [output.prompt_len for output in run.outputs],
        "output_lens": [output.output_tokens if output.success else 0 for output in run.outputs],
        "ttfts": [output.ttft for output in run.outputs],
        "itls": [output.itl for output in run.outputs],
        "latencies": [output.latency for output in run.outputs],
        "start_times": [output.start_time for output in run.outputs],
        "queue_times": [output.client_queue_time for output in run.outputs],
        "generated_texts": [output.generated_text for output in run.outputs],
        "errors": [output.error for output in run.outputs],
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        "rtfx": 0.0,
        "failures": dict(Counter(output.error for output in run.outputs if not output.success).most_common()),
        "tokens_per_event": total_output / events if events else 0.0,
        "tokens_counted_by": counted_by,
        "client_cpu_seconds": run.cpu_seconds,
        "client_cpu_us_per_event": 1e6 * run.cpu_seconds / max(1, sum(output.num_events for output in run.outputs)),
        "client_p99_lag_ms": _percentile([output.lag for output in run.outputs], 99) if load.is_open else None,
    }
    values = _values(good)
    for name in selected_metrics(config, load):
        result |= _statistics(name, values[name], config.metric_percentiles)
    return result | {"warnings": _warnings(result, load)}


DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""The keys with a value for each request that are saved with ``--save-detailed`` only."""


def selected_metrics(config: ServeBenchConfig, load: Load) -> list[str]:
    """Returns the metrics to report: what the settings name, and latencies from intended times if requests have any."""
    extra = QUEUE_METRICS[1:] if load.is_open else ()
    return list(dict.fromkeys((*config.percentile_metrics, *extra)))


def describe_run(config: ServeBenchConfig, load: Load, model: str, date: str) -> dict[str, Any]:
    """The keys of a result that say what was measured."""
    return {
        "date": date,
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": config.label,
        "model_id": model,
        "tokenizer_id": None if config.tokenizer is None else str(config.tokenizer),
        "num_prompts": config.num_prompts,
        **config.metadata,
        "request_rate": "inf" if isinf(load.rate) else load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }


def _count_output_tokens(outputs: Sequence[RequestOutput], count_tokens: Callable[[str], int | None]) -> str:
    """Fills ``output_tokens`` where the server did not say; says where the numbers are from."""
    counted_by = "usage"
    for output in outputs:
        if output.success and not output.output_tokens:
            counted = count_tokens(output.generated_text)
            counted_by = "events" if counted is None else "tokenizer"
            output.output_tokens = output.num_events if counted is None else max(1, counted)
    return counted_by


def _values(good: Sequence[RequestOutput]) -> Mapping[str, Sequence[float]]:
    """The seconds of each metric."""
    return {
        "ttft": [output.ttft for output in good],
        "tpot": [_tpot(output) for output in good if output.output_tokens > 1],
        "itl": [gap for output in good for gap in output.itl],
        "e2el": [output.latency for output in good],
        "client_queue_time": [output.client_queue_time for output in good],
        "ttft_including_client_queue": [output.client_queue_time + output.ttft for output in good],
        "e2el_including_client_queue": [output.client_queue_time + output.latency for output in good],
    }


def _tpot(output: RequestOutput) -> float:
    """Of an output of one token 0, which meets every objective."""
    return (output.latency - output.ttft) / (output.output_tokens - 1) if output.output_tokens > 1 else 0.0


def _count_good(good: Sequence[RequestOutput], objectives: Mapping[str, float]) -> int:
    """The requests that met every objective, in milliseconds."""
    reads: Mapping[str, Callable[[RequestOutput], float]] = {
        "ttft": lambda output: output.ttft,
        "tpot": _tpot,
        "e2el": lambda output: output.latency,
    }
    return sum(all(1e3 * reads[name](output) <= most for name, most in objectives.items()) for output in good)


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds, all 0 without values."""
    array = 1e3 * np.array(seconds or [0.0])
    result = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    return result | {f"p{each:g}_{name}_ms": float(np.percentile(array, each)) for each in percentiles}


def _percentile(seconds: Sequence[float], percentile: float) -> float:
    """In milliseconds."""
    return 1e3 * float(np.percentile(np.array(seconds or [0.0]), percentile))


def _peaks(good: Sequence[RequestOutput]) -> tuple[float, int]:
    """The most events with tokens, and the most running requests, in any second after the first was sent."""
    if not good:
        return 0.0, 0
    begin = min(output.start_time for output in good)
    seconds = ceil(max(output.start_time + output.latency for output in good) - begin) + 1
    tokens, running = np.zeros(seconds), np.zeros(seconds)
    for output in good:
        start = output.start_time - begin
        times = start + output.ttft + np.cumsum([0.0, *output.itl])
        np.add.at(tokens, np.minimum(times.astype(np.int64), seconds - 1), 1)
        running[int(start) : int(start + output.latency) + 1] += 1
    return float(tokens.max()), int(running.max())


def _warnings(result: Mapping[str, Any], load: Load) -> list[str]:
    """What a reader of the figures has to know, one sentence each."""
    found = []
    if result["failed"]:
        found.append(f"{result['failed']} requests failed; latencies are those of the {result['completed']} others.")
    if result["tokens_per_event"] > 1.05:
        found.append(
            f"An event carries {result['tokens_per_event']:.2f} tokens on average, so ITL is the time between events, "
            "not tokens; TPOT is by tokens."
        )
    if result["tokens_counted_by"] != "usage":
        found.append(f"The server sent no usage: output tokens are counted by {result['tokens_counted_by']}.")
    busy = result["client_cpu_seconds"] / result["duration"]
    if busy > MAX_CPU and result["duration"] > MIN_SECONDS:
        found.append(f"The client used {busy:.0%} of a core: latencies may be its own.")
    if load.is_open and result["client_p99_lag_ms"] > 1e3 * MAX_LAG:
        found.append(
            f"The client could not keep up: 1 % of the requests were sent {result['client_p99_lag_ms']:.1f} ms or more "
            "after their time. Believe the latencies including the client's queue."
        )
    if load.is_open and load.max_concurrency and result["max_concurrent_requests"] >= load.max_concurrency:
        found.append(
            "--max-concurrency held requests back, so the load was less than asked for: believe the latencies "
            "including the client's queue."
        )
    return found
