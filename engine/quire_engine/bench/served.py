"""Servers under load: a router with Redis and an engine beside ``vllm serve``, on one model folder and in turns, each
measured by ``quire bench serve``. Everything runs in processes of its own, as a user would start it; nothing of the
router or the client is imported.
"""

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.bench.config import BenchConfig
from quire_engine.bench.measure import SECONDS_TO_END, SHOWN_LINES, SystemFailedError, has_module, own_python, ratio
from quire_engine.bench.workload import FIRST_TOKEN, Lengths
from quire_engine.config import PREFIX, EngineArgs

# What is asked of the sampler: the most probable token, and what most clients ask for by default.
SAMPLINGS: Mapping[str, Sequence[str]] = {
    "T = 0": ("--temperature", "0"),
    "T = 1, top_p 0.95": ("--temperature", "1", "--top-p", "0.95"),
}
# Keys of the client's results, with their names here; less is better but for the first.
FIGURES: Mapping[str, str] = {
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "mean TTFT, ms",
    "p99_ttft_ms": "p99 TTFT, ms",
    "mean_tpot_ms": "mean TPOT, ms",
    "p99_itl_ms": "p99 ITL, ms",
}
HIGHER_IS_BETTER = ("output_throughput",)
NAME = "bench"  # the model's name at every server
KV_BYTES = 2 << 30  # for the KV pool of each server on a CPU; on a GPU each takes what its defaults say
START_TIMEOUT = 900.0  # seconds; vLLM compiles the model when it first sees it
RUNS_LIMIT = 3600.0  # seconds of one run of the client
WARMUP_SEED = 1 << 32
# Whatever proxy the environment names, these addresses are this machine's own.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Start = Callable[[], "Server"]


@dataclass(slots=True)
class ServedReadings:
    """One server's values, ``values[sampling][key]``, one for each round; or the reason of its failure."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failure: str | None = None

    def median(self, sampling: str, key: str) -> float | None:
        """The median over all rounds; None if there is none."""
        values = self.values.get(sampling, {}).get(key)
        return statistics.median(values) if values else None


class Server:
    """Programs that serve together, started in their order, each in a process group of its own. ``url`` answers GET
    ``/health`` with 200 once they are ready. ``make`` gets a folder for the programs' files and returns, for each, its
    name, its command and what its environment has besides ours. Raises ``SystemFailedError`` if one ends.
    """

    def __init__(
        self, url: str, make: Callable[[Path], Sequence[tuple[str, Sequence[str], Mapping[str, str]]]]
    ) -> None:
        self.url = url
        self._folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
        folder = Path(self._folder.name)
        self._programs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        try:
            for name, command, environment in make(folder):
                log = folder / f"{name}.log"
                with log.open("wb") as output:
                    process = subprocess.Popen(  # noqa: S603 - commands of our own, and no shell
                        list(command),
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment},
                        start_new_session=True,
                    )
                self._programs.append((name, log, process))
            self._wait_ready()
        except OSError as error:
            self.close()
            raise SystemFailedError(f"It cannot be started: {error}.") from None
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises ``SystemFailedError``, which quotes the program, if one has ended."""
        for name, log, process in self._programs:
            if process.poll() is not None:
                lines = [line.strip() for line in log.read_text(errors="replace")[-4096:].splitlines() if line.strip()]
                said = " / ".join(lines[-SHOWN_LINES:]) or "it said nothing"
                raise SystemFailedError(f"{name} ended with {process.returncode}: {said}")

    def close(self) -> None:
        """Ends the programs, the last one first, and kills what does not end in time."""
        for _, _, process in reversed(self._programs):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            with suppress(ProcessLookupError):  # what the program started and left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end:
            self.check()
            with suppress(OSError), DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise SystemFailedError(f"It is not ready after {START_TIMEOUT:.0f} s.")


def measure_served(
    config: BenchConfig, starts: Mapping[str, Start], vocab: int, report: Callable[[str], None], in_turn: bool
) -> dict[str, ServedReadings]:
    """Measures each server with each of ``SAMPLINGS`` in every round. With ``in_turn`` all run side by side, those not
    measured idle, and take turns in each round; otherwise one is started, measured and stopped after the other.
    """
    readings = {name: ServedReadings() for name in starts}
    for group in [list(starts)] if in_turn else [[name] for name in starts]:
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            for name in group:
                report(f"starting {name}'s server")
                with _record_failure(readings[name]):
                    servers[name] = stack.enter_context(closing(starts[name]()))
                    for sampling in SAMPLINGS:
                        report(f"warming up {name}'s server: {sampling}")
                        run_client(config, servers[name], sampling, vocab, WARMUP_SEED)
            for number in range(config.rounds):
                for index, sampling in enumerate(SAMPLINGS):
                    seed = config.seed + number * len(SAMPLINGS) + index  # no prompt is in a prefix cache already
                    for name, server in servers.items():
                        if readings[name].failure is None:
                            report(f"round {number + 1} of {config.rounds}: {name} served, {sampling}")
                            with _record_failure(readings[name]):
                                found = run_client(config, server, sampling, vocab, seed)
                                report("  " + ", ".join(f"{title} {found[key]:,.4g}" for key, title in FIGURES.items()))
                                values = readings[name].values.setdefault(sampling, {})
                                for key in FIGURES:
                                    values.setdefault(key, []).append(found[key])
    return readings


@contextmanager
def _record_failure(readings: ServedReadings) -> Iterator[None]:
    try:
        yield
    except SystemFailedError as failure:
        readings.failure = str(failure)


def run_client(config: BenchConfig, server: Server, sampling: str, vocab: int, seed: int) -> dict[str, float]:
    """The figures of one run of ``quire bench serve``. Raises ``SystemFailedError`` if a request failed."""
    inputs, outputs = Lengths.of(config.input_len), Lengths.of(config.output_len)
    ratios = {"input": _spread(inputs), "output": _spread(outputs)}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        command = [*_module("quire_cli.main"), "bench", "serve", "--base-url", server.url, "--model", NAME]
        command += ["--num-prompts", str(config.num_served_prompts), "--max-concurrency", str(config.num_prompts)]
        command += ["--random-input-len", str(_middle(inputs)), "--random-output-len", str(_middle(outputs))]
        command += ["--random-range-ratio", json.dumps(ratios), "--vocab-size", str(max(vocab, 8)), "--seed", str(seed)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_BENCH_")}
        try:
            done = subprocess.run(  # noqa: S603 - our own command
                [*command, *SAMPLINGS[sampling]],
                capture_output=True,
                text=True,
                env=environment,
                timeout=RUNS_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SystemFailedError(f"A run took more than {RUNS_LIMIT:.0f} s.") from None
        server.check()
        try:
            result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        except (OSError, ValueError):
            said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise SystemFailedError(f"The client failed: {said[0]}") from None
    if result["failed"]:
        raise SystemFailedError(f"{result['failed']} requests failed: {next(iter(result['failures']))}")
    return {key: float(result[key]) for key in FIGURES}


def _middle(lengths: Lengths) -> int:
    return (lengths.least + lengths.most) // 2


def _spread(lengths: Lengths) -> float:
    """The part of the middle by which the ends of the range are below and above it."""
    return (lengths.most - lengths.least) / (lengths.most + lengths.least)


def find_servers(
    config: BenchConfig, model: Path, vllm: Path | None, *, threads: int, dtype: str, device: str
) -> dict[str, Start]:
    """A function that starts each server: ours, and vLLM's with the interpreter ``vllm``. ``config`` is as the user
    gave it, with ``max_model_len``: settings that he made hold for our engine. ``device`` is the type of torch's.
    """
    starts: dict[str, Start] = {"quire": lambda: start_quire(config, model, device)}
    if vllm is not None:
        starts["vllm"] = lambda: start_vllm(config, vllm, model, threads, dtype)
    return starts


def start_quire(config: BenchConfig, model: Path, device: str) -> Server:
    """Redis where it is installed, an engine and a router, with the defaults of each. Raises ``SystemFailedError``."""
    for module in ("quire_router", "quire_cli"):
        if not has_module(own_python(), module):
            raise SystemFailedError(f"{module} is not installed.")
    redis, engine, engine_metrics, http, grpc, metrics = _free_ports(6)

    def make(folder: Path) -> Sequence[tuple[str, Sequence[str], Mapping[str, str]]]:
        programs: list[tuple[str, Sequence[str], Mapping[str, str]]] = []
        router = [*_module("quire_router.main"), "--model", f"{NAME}={model}", "--engine", f"127.0.0.1:{engine}"]
        router += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        if binary := shutil.which("redis-server"):
            flags = ["--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
            programs.append(("redis", [binary, *flags, "--dir", str(folder)], {}))
            router += ["--redis-url", f"redis://127.0.0.1:{redis}/0"]
        flags = ["--model", str(model), "--served-model-name", NAME, "--port", str(engine)]
        flags += ["--metrics-port", str(engine_metrics), "--max-model-len", str(config.max_model_len)]
        quiet = ["--log-level", "warning"]
        programs.append(("engine", [*_module("quire_engine.cli"), *flags, *quiet], engine_variables(config, device)))
        programs.append(("router", [*router, *quiet], {}))
        return programs

    return Server(f"http://127.0.0.1:{http}", make)


def engine_variables(config: BenchConfig, device: str) -> dict[str, str]:
    """The engine's settings that the user gave, as variables of its process; on a CPU a KV pool of ``KV_BYTES``."""
    ours = {"model", "served_model_name", "max_model_len", "seed"}
    variables = {f"{PREFIX}KV_CACHE_MEMORY": str(KV_BYTES)} if device == "cpu" else {}
    for name in sorted((config.model_fields_set & set(EngineArgs.model_fields)) - ours):
        value = getattr(config, name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            variables[PREFIX + name.upper()] = text.lower() if isinstance(value, bool) else text
    return variables


def start_vllm(config: BenchConfig, python: Path, model: Path, threads: int, dtype: str) -> Server:
    """``vllm serve`` with its own defaults, and as many threads and as much KV memory. Raises ``SystemFailedError``."""
    (port,) = _free_ports(1)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores))),
        "PATH": f"{python.absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}",  # it compiles with what is there
        "PYTHONPATH": "",
    }
    command = [
        str(python.absolute()),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--served-model-name",
        NAME,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(config.max_model_len)]
    command += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    command += ["--pipeline-parallel-size", str(config.pipeline_parallel_size)]
    return Server(f"http://127.0.0.1:{port}", lambda _: [("vllm", command, environment)])


@contextmanager
def served_folder(model: Path, vocab: int) -> Iterator[Path]:
    """``model`` if it has a tokenizer; otherwise a folder of links to its files beside a tokenizer of words, ``w3`` for
    token 3, as servers need one. It lasts as long as the context.
    """
    if (model / "tokenizer.json").is_file():
        yield model.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder = Path(name)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        write_tokenizer(folder, vocab)
        yield folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer with a word for each of ``vocab`` tokens."""
    special = ("<unk>", "<s>", "</s>")
    words = {word: number for number, word in enumerate(special)}
    words |= {f"w{number}": number for number in range(FIRST_TOKEN, vocab)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": word, **flags} for number, word in enumerate(special)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))


def served_lines(served: Mapping[str, ServedReadings]) -> list[str]:
    """The lines of a table: a block for each sampling and figure, a line for each server."""
    lines: list[str] = []
    width = max(map(len, served), default=0)
    for sampling in SAMPLINGS:
        for key, title in FIGURES.items():
            if any(readings.median(sampling, key) is not None for readings in served.values()):
                lines += ["", f"served, {sampling}: {title}{'' if key in HIGHER_IS_BETTER else ' (less is better)'}"]
            for name, readings in served.items():
                median, times = readings.median(sampling, key), served_ratio(served, name, sampling, key)
                if median is not None:
                    values = readings.values[sampling][key]
                    shown = f"({min(values):,.1f} to {max(values):,.1f})"
                    beside = f"quire: {times:.2f} times as good" if times else ""
                    lines.append(f"  {name:<{width}}  {median:>10,.1f}  {shown:<22}  {beside}".rstrip())
    return lines + [f"{name} served: {each.failure}" for name, each in served.items() if each.failure]


def served_data(served: Mapping[str, ServedReadings]) -> dict[str, Any]:
    """All results, for JSON: medians, values of each round, and ratios under names such as ``T = 0: p99 ITL, ms``."""
    cases = {f"{sampling}: {title}": (sampling, key) for sampling in SAMPLINGS for key, title in FIGURES.items()}
    data: dict[str, Any] = {}
    for name, readings in served.items():
        medians = {case: readings.median(*what) for case, what in cases.items()}
        ratios = {case: served_ratio(served, name, *what) for case, what in cases.items()}
        data[name] = {
            "medians": {case: median for case, median in medians.items() if median is not None},
            "ratios": {case: times for case, times in ratios.items() if times is not None},
            "rounds": readings.values,
            "failure": readings.failure,
        }
    return data


def served_ratio(served: Mapping[str, ServedReadings], name: str, sampling: str, key: str) -> float | None:
    """How many times better our median is than that of the server ``name``; None for ours, or if one is missing."""
    ours = served["quire"].median(sampling, key) if "quire" in served else None
    theirs = served[name].median(sampling, key)
    if name == "quire" or not ours or not theirs:
        return None
    return ratio(ours, theirs, "throughput" if key in HIGHER_IS_BETTER else "latency")


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
