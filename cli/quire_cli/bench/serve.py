"""The command ``quire bench serve``: one run for each request rate."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import uvloop
from quire_proto.cli import read_settings, reject_unknown_env
from quire_proto.extras import install_command
from quire_proto.terminal import CLEAR_LINE, DIM, INTERRUPTED, PLAIN, fail, has_color, waiting

from quire_cli.bench.client import HttpClient, ServerError
from quire_cli.bench.config import ServeBenchConfig, join_values
from quire_cli.bench.dataset import DatasetError, RequestFactory
from quire_cli.bench.load import Load, run_load
from quire_cli.bench.metrics import compute_result, describe_run
from quire_cli.bench.report import draw_plot, format_result, format_sweep, save_result
from quire_cli.machine.server import find_server

READY_PERIOD = 0.5  # seconds between two questions whether the server is there
REFUSALS = ("HTTP 429", "HTTP 503")  # how a failure begins for which the server had no room
MAX_KINDS = 3  # of failures that are named in one sentence
WARMUP_SEED = 1 << 40  # what is added to the seed for requests that are not measured


def bench_serve(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings; with 1 and one sentence if the server cannot be reached, a
    file cannot be read or written, or a request failed; with 130 after Ctrl-C, and the figures until then.
    """
    reject_unknown_env(ServeBenchConfig)
    config = read_settings(ServeBenchConfig, join_values(arguments))
    if not config.model_fields_set & {"base_url", "host", "port"}:
        config = config.model_copy(update={"base_url": find_server(None)})
    try:
        results = uvloop.run(measure(config))
        _report_all(config, results)
    except (ServerError, DatasetError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted before an answer was complete", status=INTERRUPTED)
    if sentence := describe_failures(results):
        fail(sentence)


async def measure(config: ServeBenchConfig) -> list[dict[str, Any]]:
    """Measures each rate, and prints and saves its figures. Returns them all. Raises ``ServerError``,
    ``DatasetError``.
    """
    client = HttpClient(config.url, config.headers, timeout=config.request_timeout, insecure=config.insecure)
    try:
        with waiting(f"waiting for {config.url}"):
            await _wait_ready(client, config.ready_check_timeout_sec)
            model = config.model or await _first_model(client)
        factory = RequestFactory(config, model)
        with waiting(f"warming up with {config.num_warmups} requests"):
            await _warm_up(config, client, factory)
        return [await _measure_rate(config, client, factory, model, run) for run in range(len(config.request_rate))]
    finally:
        client.close()


async def _measure_rate(
    config: ServeBenchConfig, client: HttpClient, factory: RequestFactory, model: str, run: int
) -> dict[str, Any]:
    """The run of one rate, with prompts of its own, so that no run finds the prompts of another in a cache."""
    load = Load(config.request_rate[run], config.burstiness, config.concurrency, config.is_self_timed)
    seed = config.seed + run
    with waiting(f"making {config.num_prompts} prompts"):
        requests = factory.make(config.num_prompts, seed)
    sys.stderr.write(f"{_describe(load)}: {len(requests)} requests\n")
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    watch = partial(_show, len(requests)) if has_color(sys.stderr) else None
    try:
        found = await run_load(client, config.path, requests, load, np.random.default_rng([seed, 1]), watch=watch)
    finally:
        sys.stderr.write(CLEAR_LINE if watch else "")
    result = describe_run(config, load, model, date) | compute_result(config, load, found, factory.count_tokens)
    if result["completed"]:
        sys.stdout.write(f"{format_result(config, load, result)}\n")
    if config.save_result or config.append_result:
        shared = config.append_result or (run > 0 and config.result_filename is not None)
        try:
            path = save_result(config, result, append=shared)
        except OSError as error:
            fail(f"The figures cannot be written: {error}.")
        sys.stderr.write(f"The figures are in {path}.\n")
    if found.interrupted:
        done = f"{len(found.outputs)} of {len(requests)} requests"
        fail(f"interrupted: these are the figures of {done}", status=INTERRUPTED)
    return result


def _show(total: int, ended: int, sent: int, seconds: float) -> None:
    """Writes the line that moves while a run is on."""
    text = f"{ended} of {total} answered, {sent - ended} running ({seconds:.0f} s)"
    sys.stderr.write(f"{CLEAR_LINE}{DIM}{text}{PLAIN}")
    sys.stderr.flush()


def _describe(load: Load) -> str:
    if load.self_timed:
        return "The times of the trace"
    rate = f"{load.rate:g} requests a second" if load.is_open else "All requests at once"
    return rate + (f", at most {load.max_concurrency} running" if load.max_concurrency else "")


async def _wait_ready(client: HttpClient, seconds: float) -> None:
    """Waits until the server lists its models, for at most that long; not at all for 0 seconds."""
    end = client.now() + seconds
    while seconds:
        try:
            await _first_model(client)
            return
        except ServerError as error:
            if client.now() > end:
                raise ServerError(f"The server is not ready after {seconds:g} s: {error}") from None
        await asyncio.sleep(READY_PERIOD)


async def _first_model(client: HttpClient) -> str:
    models = (await client.get("/v1/models")).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise ServerError("The server lists no model: name it with --model.")
    return str(models[0]["id"])


async def _warm_up(config: ServeBenchConfig, client: HttpClient, factory: RequestFactory) -> None:
    """Runs requests with other prompts, as many at once as are measured. Raises ``ServerError`` if one fails."""
    requests = factory.make(config.num_warmups, config.seed + WARMUP_SEED)
    load = Load(max_concurrency=config.concurrency)
    found = await run_load(client, config.path, requests, load, np.random.default_rng(0))
    if failed := next((output.error for output in found.outputs if not output.success), None):
        raise ServerError(f"A request to warm up failed: {failed}")


def _report_all(config: ServeBenchConfig, results: Sequence[dict[str, Any]]) -> None:
    if len(results) > 1:
        sys.stdout.write(f"{format_sweep(results)}\n")
    if config.plot is None:
        return
    try:
        draw_plot(config.plot, results)
    except ImportError:
        fail(f"--plot needs matplotlib: {install_command('quire-llm', 'plot')}.")
    except (OSError, ValueError) as error:
        fail(f"The plot cannot be written: {error}.")


def describe_failures(results: Sequence[dict[str, Any]]) -> str:
    """One sentence: how many requests of all runs failed, of what, and what to do where the server had no room for
    them. Empty if none did.
    """
    failures: Counter[str] = Counter()
    for result in results:
        failures.update(result["failures"])
    total = failures.total() + sum(result["completed"] for result in results)
    named = failures.most_common(MAX_KINDS)
    kinds = [f"{count} times {text.rstrip('.')}" for text, count in named]
    if others := failures.total() - sum(count for _, count in named):
        kinds.append(f"{others} times something else")
    advice = ""
    if any(text.startswith(REFUSALS) for text in failures):
        advice = "; --max-concurrency sends fewer at once, and the router's --max-queued-requests lets more wait"
    return f"{failures.total()} of {total} requests failed: {', '.join(kinds)}{advice}." if failures else ""
