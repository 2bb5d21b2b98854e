"""The command ``quire-engine bench``: finds the installed peers, measures all systems, and prints a ``BenchReport``."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_proto.cli import read_settings
from quire_proto.terminal import fail

from quire_engine.bench.config import PEERS, QUANTIZED_PEERS, SERVED, VARIANTS, BenchConfig
from quire_engine.bench.lengths import DRAWN_AT_MOST, make_workload
from quire_engine.bench.measure import (
    LOWER_IS_BETTER,
    UNITS,
    Figure,
    Measured,
    PeerProcess,
    Plan,
    Readings,
    System,
    SystemFailedError,
    has_module,
    own_python,
    ratio,
    run_apart,
    run_in_turn,
)
from quire_engine.bench.quire import DecodeSteps
from quire_engine.bench.served import (
    ServedReadings,
    find_servers,
    measure_served,
    served_data,
    served_folder,
    served_lines,
)
from quire_engine.bench.workload import SHAPES, Lengths, Workload, model_of_shape, random_workload
from quire_engine.core.batch_scheduler import StepPolicy, continuous_batching
from quire_engine.errors import ModelError
from quire_engine.simulation.step_policies import STEP_POLICIES

if TYPE_CHECKING:
    import torch

    from quire_engine.bench.quire import Quire
    from quire_engine.bench.roofline import Ceilings, Costs, Machine


OURS = "quire"
KV_TOKENS = 1 << 16  # of a peer whose memory is set by nothing else


def bench(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, 1 with one sentence if our own engine cannot run, when
    the peers' figures are still shown. SIGTERM ends what was started, too.
    """
    config = read_settings(BenchConfig, arguments)
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        report = _measure(_with_defaults(config), config)
    except (ModelError, SystemFailedError) as error:
        fail(str(error))
    sys.stdout.write(f"{report.as_table()}\n")
    if config.json_path is not None:
        try:
            config.json_path.write_text(json.dumps(report.as_data(), indent=2) + "\n")
        except OSError as error:
            fail(f"The figures cannot be written: {error}.")
    for readings in (report.readings, report.served):
        if OURS in readings and readings[OURS].failure:
            fail(str(readings[OURS].failure))


def _terminate(number: int, _frame: object) -> None:
    # An exception, so that peers and servers, which have process groups of their own, are ended on the way out.
    raise SystemExit(128 + number)


def _with_defaults(config: BenchConfig) -> BenchConfig:
    """The settings with a model folder instead of a shape, and the limits that the workloads need."""
    changes: dict[str, object] = {"enable_prefix_caching": False, "scheduling_policy": "fcfs"}
    if config.shape is not None:
        changes["model"] = model_of_shape(config.shape, config.seed)
    if "max_num_seqs" not in config.model_fields_set:
        changes["max_num_seqs"] = min(config.num_outputs * config.num_prompts, 256)
    if "swap_space" not in config.model_fields_set:
        changes["swap_space"] = 0.0
    return config.model_copy(update=changes)


def _limit_to_model(config: BenchConfig, most: int) -> BenchConfig:
    """The settings with the ``max_model_len`` that the workloads need, at most ``most`` tokens. Raises
    ``ModelError``.
    """
    limit = min(most, config.max_model_len or most)
    if "prefill_len" not in config.model_fields_set:
        config = config.model_copy(update={"prefill_len": min(config.prefill_len, limit - 1)})
    if config.longest > limit:
        raise ModelError(
            f"The longest request has {config.longest} tokens, and the model takes {limit}: lower --prefill-len, or "
            "the input and output lengths."
        )
    drawn = min(limit, DRAWN_AT_MOST) if config.ranges is None else 0
    return config.model_copy(update={"max_model_len": config.max_model_len or max(config.longest, drawn)})


def _measure(config: BenchConfig, given: BenchConfig) -> "BenchReport":
    """``config`` has the defaults of this benchmark; servers are started with what the user set, which is ``given``."""
    from quire_engine.device.host import limit_onednn_caches

    limit_onednn_caches()
    from quire_engine.device.accelerator import configure_threads, resolve_device
    from quire_engine.models.loader import read_model_config

    threads, device = configure_threads(), resolve_device(config.device)
    model = read_model_config(config.model)
    config = _limit_to_model(config, model.max_length)
    plan = _plan(config, model.vocab_size)
    engine: list[Quire] = []
    systems: dict[str, Callable[[], System]] = {OURS: partial(_start_quire, config, engine)}
    for name in config.also:
        step_policy = STEP_POLICIES.get(name, continuous_batching)
        varied = config.model_copy(update=dict(VARIANTS[name]))
        systems[f"{OURS} {name}"] = partial(_start_quire, varied, [], step_policy)
    systems |= find_peers(config, lambda: _peer_settings(config, engine, device, threads))
    in_turn = device.type == "cpu" if config.in_turn is None else config.in_turn
    limits = Limits(config, engine, device)
    if not plan.workloads:
        systems = {}
    readings = (run_in_turn if in_turn else run_apart)(systems, plan, _print_progress, limits.measure)
    dtype = engine[0].executor.dtype_name if engine else config.dtype
    served: dict[str, ServedReadings] = {}
    if SERVED in config.measure:
        uses_vllm = not {"auto", "vllm"}.isdisjoint(config.against)
        vllm = _python(config, "vllm") if uses_vllm else None
        with served_folder(config.model, model.vocab_size) as folder:
            limited = given.model_copy(update={"max_model_len": config.max_model_len})
            served_dtype = "bfloat16" if dtype == "auto" else dtype
            starts = find_servers(limited, folder, vllm, threads=threads, dtype=served_dtype, device=device.type)
            served = measure_served(config, starts, model.vocab_size, _print_progress, in_turn=in_turn)
    return BenchReport(
        title=_title(config, threads, device, dtype),
        readings=readings,
        served=served,
        best=limits.best(plan),
        steps=engine[0].decode_steps(config.num_prompts) if engine else None,
        settings=config.model_dump(mode="json"),
    )


def _start_quire(config: BenchConfig, engine: "list[Quire]", step_policy: StepPolicy = continuous_batching) -> System:
    from quire_engine.bench.quire import Quire

    engine.append(Quire(config, step_policy))
    return engine[0]


def _plan(config: BenchConfig, vocab: int) -> Plan:
    """The workloads of each round. Prompts are new in each round, and equal for all systems."""

    def random(count: int, sizes: Lengths, answers: Lengths, number: int) -> Workload:
        return random_workload(count, sizes, answers, vocab, config.seed + number)

    def throughput(number: int) -> Workload:
        count, seed, n = config.num_prompts, config.seed + number, config.num_outputs
        if config.ranges is not None:
            return random_workload(count, *config.ranges, vocab, seed, n=n)
        assert config.lengths is not None
        return make_workload(config.lengths, count, config.max_model_len or DRAWN_AT_MOST, vocab, n=n, seed=seed)

    one, latency = Lengths(1, 1), Lengths(config.latency_input_len, config.latency_input_len)
    stream = Lengths(config.latency_output_len, config.latency_output_len)
    workloads: dict[Measured, Callable[[int], Workload]] = {
        "throughput": throughput,
        "latency": partial(random, 1, latency, stream),
        "prefill": partial(random, 1, Lengths(config.prefill_len, config.prefill_len), one),
    }
    measured = {figure: make for figure, make in workloads.items() if figure in config.measure}
    has_latencies = not {"static", "phased"}.isdisjoint(config.also)
    return Plan(measured, config.rounds, config.warm_up_output_len, has_latencies)


def _peer_settings(
    config: BenchConfig, engine: "list[Quire]", device: "torch.device", threads: int
) -> dict[str, object]:
    """A peer's settings: the same model, limits and threads as our engine."""
    return {
        "model": str(config.model.resolve()),
        "device": device.type,
        "dtype": engine[0].executor.dtype_name if engine else "bfloat16",
        "threads": threads,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_tokens": engine[0].executor.kv_cache_config.num_tokens if engine else KV_TOKENS,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }


class Limits:
    """The roofline, for models whose costs are known: those with their own implementation, in one process, and from
    plain weights. Nothing is measured before our ``engine`` has started.
    """

    def __init__(self, config: BenchConfig, engine: "list[Quire]", device: "torch.device") -> None:
        self._config = config
        self._engine = engine
        self._device = device
        self._found: tuple[Costs, Machine] | None = None

    def measure(self) -> None:
        """Measures the machine's limits once more."""
        if self._found is None and self._engine:
            self._found = self._find()
        if self._found is not None:
            self._found[1].measure()

    def best(self, plan: Plan) -> dict[Figure, float]:
        """The roofline of each figure of the plan; empty if unknown."""
        if self._found is None:
            return {}
        costs, machine = self._found
        workloads = {figure: make(0) for figure, make in plan.workloads.items()}
        return {
            figure: _best(figure, workload, costs, machine.ceilings)
            for figure, workload in workloads.items()
            if workload.n == 1
        }

    def _find(self) -> "tuple[Costs, Machine] | None":
        import torch

        from quire_engine.bench.roofline import Costs, Machine, Widths
        from quire_engine.checkpoint.architecture import architecture_of
        from quire_engine.checkpoint.config import config_path, is_supported, quantization_of, read_config_json
        from quire_engine.checkpoint.weights import LoadOptions
        from quire_engine.models.loader import read_decoder_config
        from quire_engine.worker.attention_selector import resolve_kv_cache_dtype

        config = self._config
        raw = read_config_json(config.model)
        is_plain = quantization_of(config.model, raw) is None
        num_ranks = max(config.tensor_parallel_size, config.pipeline_parallel_size)
        if not (is_supported(architecture_of(config_path(config.model), raw), raw) and is_plain and num_ranks == 1):
            return None
        model = read_decoder_config(config.model)
        dtype: torch.dtype = getattr(torch, self._engine[0].executor.dtype_name)
        options = LoadOptions(config, self._device)
        widths = Widths.of(options, dtype, resolve_kv_cache_dtype(config.kv_cache_dtype, dtype))
        costs = Costs.of(model, widths)
        return costs, Machine(dtype, options, costs.weights)


def _best(figure: Measured, workload: Workload, costs: "Costs", ceilings: "Ceilings") -> float:
    from quire_engine.bench.measure import first_tokens
    from quire_engine.bench.roofline import least_seconds

    seconds = least_seconds(workload, costs, ceilings)
    if figure == "latency":
        rest = seconds - least_seconds(first_tokens(workload), costs, ceilings)
        return 1e3 * rest / (workload.output_tokens - 1)
    return (workload.output_tokens if figure == "throughput" else sum(map(len, workload.prompts))) / seconds


def _title(config: BenchConfig, threads: int, device: "torch.device", dtype: str) -> str:
    import torch

    where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    shape = config.shape if config.shape in SHAPES else config.shape and "a shape"
    what = f"{shape or config.model.resolve().name}, {config.quantization or dtype}, {where}"
    lengths = f"of {config.input_len} tokens in and {config.output_len} out"
    if config.lengths is not None:
        lengths = f"of the lengths of {Path(config.lengths).name}"
    if config.num_outputs > 1:
        lengths += f", {config.num_outputs} outputs each"
    parts = {
        "throughput": f"{config.num_prompts} requests {lengths}",
        "latency": f"one stream of {config.latency_input_len} in and {config.latency_output_len} out",
        "prefill": f"a prompt of {config.prefill_len}",
        SERVED: f"served {config.num_served_prompts} requests {lengths}, {config.num_prompts} at once",
    }
    measured = "; ".join(text for name, text in parts.items() if name in config.measure)
    return f"{what}: {measured}; medians of {config.rounds} rounds"


def _print_progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results, as a table and as plain data. ``title`` names the model, the device and the workloads. ``readings``
    are those of all systems, ours first. ``best`` is the roofline in the units of each figure, if known, and
    ``settings`` are those of the run.
    """

    title: str
    readings: Mapping[str, Readings]
    best: Mapping[Figure, float]
    steps: DecodeSteps | None
    settings: Mapping[str, Any]
    served: Mapping[str, ServedReadings] = dataclass_field(default_factory=dict)

    def ratios(self) -> dict[str, dict[Figure, float]]:
        """How many times better our median is than that of each other system."""
        found: dict[str, dict[Figure, float]] = {}
        for name, readings in self.readings.items():
            ours = self.readings[self.rival(name)]
            for figure in UNITS:
                mine, other = ours.median(figure), readings.median(figure)
                if name != OURS and mine and other:
                    found.setdefault(name, {})[figure] = ratio(mine, other, figure)
        return found

    def rival(self, name: str) -> str:
        """What ``name`` is compared with: our engine, in as few bits as a quantised peer if it was measured so."""
        variant = f"{OURS} {QUANTIZED_PEERS.get(name)}"
        return variant if variant in self.readings else OURS

    def as_data(self) -> dict[str, Any]:
        """All results, for JSON."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "units": dict(UNITS),
            "systems": {
                name: {
                    "medians": {figure: readings.median(figure) for figure in readings.values},
                    "rounds": readings.values,
                    "padding": readings.padding,
                    "failure": readings.failure,
                }
                for name, readings in self.readings.items()
            },
            "ratios": self.ratios(),
            "served": served_data(self.served),
            "roofline": dict(self.best),
            "decode_steps_ms": None if self.steps is None else asdict(self.steps),
        }

    def as_table(self) -> str:
        """A text with a block for each figure and a line for each system."""
        lines = [self.title]
        for figure, unit in UNITS.items():
            if OURS in self.readings and self.readings[OURS].median(figure) is not None:
                lines += ["", f"{figure}, {unit}{' (less is better)' if figure in LOWER_IS_BETTER else ''}"]
                lines += self._lines(figure)
        lines += [f"{name}: {each.failure}" for name, each in self.readings.items() if each.failure]
        if self.steps is not None:
            steps = self.steps
            lines += [
                "",
                f"decode step of the whole batch: {steps.step:.2f} ms, of which forward {steps.forward:.2f}, "
                f"sampling {steps.sample:.2f}, scheduling and bookkeeping {steps.bookkeeping:.2f}",
            ]
        lines += served_lines(self.served)
        return "\n".join(lines)

    def _lines(self, figure: Figure) -> list[str]:
        ratios, width = self.ratios(), max(map(len, (*self.readings, "roofline")))
        lines = []
        for name, readings in self.readings.items():
            median = readings.median(figure)
            if median is not None:
                times = ratios.get(name, {}).get(figure)
                beside = f"{self.rival(name)}: {times:.2f} times as good" if times else ""
                if figure == "throughput" and readings.padding is not None:
                    beside = f"{beside:<30}  {readings.padding:.0%} padding"
                shown = f"({_number(min(readings.values[figure]))} to {_number(max(readings.values[figure]))})"
                lines.append(f"  {name:<{width}}  {_number(median):>10}  {shown:<22}  {beside}".rstrip())
        ours, best = self.readings[OURS].median(figure), self.best.get(figure)
        if ours and best:
            part = ratio(ours, best, figure)
            # Better than the roofline: the machine was slower while its limits were measured.
            beside = f"quire: {part:.0%} of it" if part < 1 else "exceeded, so no limit: the machine is not steady"
            lines.append(f"  {'roofline':<{width}}  {_number(best):>10}  {'':<22}  {beside}")
        return lines


def _number(value: float) -> str:
    """Three decimals below 10, one below 100, else none."""
    digits = 3 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's module, the script that runs it, the interpreter of the environment that ``make peers`` creates, and the
    settings that only this peer has.
    """

    module: str
    script: str
    peer_python: Path | None = None
    settings: Mapping[str, object] = dataclass_field(default_factory=dict)


SLOW = ("transformers-serial", "transformers-cb")
LLAMA = Path(".peers/llama/bin/python")
INSTALLED = {
    "transformers": Peer("transformers", "run_transformers.py", None, {"batching": "static"}),
    "transformers-serial": Peer("transformers", "run_transformers.py", None, {"batching": "serial"}),
    "transformers-cb": Peer("transformers", "run_transformers.py", None, {"batching": "continuous"}),
    "vllm": Peer("vllm", "run_vllm.py", Path(".peers/vllm/bin/python")),
    "llama.cpp": Peer("llama_cpp", "run_llama_cpp.py", LLAMA),
    "llama.cpp-q4_k_m": Peer("llama_cpp", "run_llama_cpp.py", LLAMA, {"ftype": "q4_k_m"}),
    "llama.cpp-q8_0": Peer("llama_cpp", "run_llama_cpp.py", LLAMA, {"ftype": "q8_0"}),
}


def find_peers(config: BenchConfig, settings: Callable[[], Mapping[str, object]]) -> dict[str, Callable[[], System]]:
    """A function that starts each peer to measure: those named in ``--against``, or, with ``auto``, those that are
    installed. ``settings`` returns a peer's settings, which are known once our engine has started. Raises
    ``SystemFailedError`` for a named peer that is not installed.
    """
    if "none" in config.against:
        return {}
    found: dict[str, Callable[[], System]] = {}
    for name in PEERS:
        wanted = name in config.against or ("auto" in config.against and _is_comparable(config, name))
        python = _python(config, name) if wanted else None
        if python is not None:
            found[name] = partial(_start, python, INSTALLED[name], settings)
        elif name in config.against:
            raise SystemFailedError(f"{name} is not installed; docs/benchmarks.md says how.")
    return found


def _is_comparable(config: BenchConfig, name: str) -> bool:
    """Whether the engine is measured in as many bits as the peer, and the peer takes its requests. Ways of transformers
    that are there to be compared with its static batches are measured when they are named.
    """
    if name in SLOW or (config.num_outputs > 1 and INSTALLED[name].module == "llama_cpp"):
        return False
    variant = QUANTIZED_PEERS.get(name)
    return variant is None or variant in (config.quantization, *config.also)


def _python(config: BenchConfig, name: str) -> Path | None:
    """The first interpreter whose environment has the peer; None if there is none."""
    given = {"vllm": config.vllm_python, "llama_cpp": config.llama_python}.get(INSTALLED[name].module)
    peer_python = INSTALLED[name].peer_python
    candidates = [given] if given else [own_python(), *([peer_python] if peer_python else [])]
    return next((python for python in candidates if has_module(python, INSTALLED[name].module)), None)


def _start(python: Path, peer: Peer, settings: Callable[[], Mapping[str, object]]) -> System:
    return PeerProcess(python, peer.script, {**settings(), **peer.settings}, os.environ)
