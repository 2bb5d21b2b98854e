"""``quire-engine bench``: what it measures, how it takes turns, what it makes of systems that fail."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.bench import measure, roofline
from quire_engine.bench.bench_command import BenchReport, bench
from quire_engine.bench.measure import (
    PeerProcess,
    Plan,
    Readings,
    System,
    SystemFailedError,
    ratio,
    run_apart,
    run_in_turn,
)
from quire_engine.bench.roofline import TRIES, Ceiling, Ceilings, Costs, Machine, Widths, least_seconds
from quire_engine.bench.workload import SHAPES, Lengths, Workload, model_of_shape, random_workload
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig, Quantization
from quire_engine.errors import ModelError
from quire_engine.models.loader import read_model_config
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.kernels import cache_with_kernels

TINY = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}


# The command, but for the limits of the machine, which it finds with less.
COMMAND = """
from quire_engine.bench import roofline
roofline.PRODUCT_SIDES, roofline.LEAST_READ = (64,), 1 << 20
from quire_engine.cli import main
main()
"""


class Steady:
    """Takes ``prompt`` seconds for each token of a prompt and ``output`` for each token that it makes."""

    padding = 0.25
    latencies: tuple[float, ...] = (1.0, 2.0, 6.0)

    def __init__(self, journal: list[str], name: str, prompt: float, output: float) -> None:
        self.journal, self.name, self.prompt, self.output = journal, name, prompt, output
        journal.append(f"{name} starts")

    def seconds(self, workload: Workload) -> float:
        self.journal.append(self.name)
        return self.prompt * sum(map(len, workload.prompts)) + self.output * workload.output_tokens

    def close(self) -> None:
        self.journal.append(f"{self.name} ends")


def plan(rounds: int = 2) -> Plan:
    return Plan(
        {
            "throughput": lambda number: Workload([[5] * 10, [6] * 10], [4, 6]),
            "latency": lambda number: Workload([[5] * 10], [11]),
            "prefill": lambda number: Workload([[number] * 50], [1]),
        },
        rounds,
    )


def test_figures_are_what_the_time_says() -> None:
    readings = run_in_turn({"a": lambda: Steady([], "a", 0.01, 0.02)}, plan(), lambda text: None)["a"]
    assert readings.median("throughput") == pytest.approx(10 / (0.01 * 20 + 0.02 * 10))
    assert readings.median("latency") == pytest.approx(20.0), "milliseconds a token, without the prompt"
    assert readings.padding == 0.25
    assert readings.median("prefill") == pytest.approx(50 / (0.01 * 50 + 0.02))
    assert all(len(values) == 2 for values in readings.values.values()), "the warm-up does not count"


def test_latencies_of_requests_are_figures_where_they_are_asked_for_and_known() -> None:
    only = {"throughput": plan().workloads["throughput"]}
    for has_latencies, known, expected in ((True, (1.0, 2.0, 6.0), 3.0), (True, (), None), (False, (1.0,), None)):
        system = Steady([], "a", 0.01, 0.02)
        system.latencies = known
        asked = Plan(only, 2, has_latencies=has_latencies)
        readings = run_in_turn({"a": lambda system=system: system}, asked, lambda text: None)["a"]
        assert readings.median("E2EL mean") == expected
    assert ratio(2.0, 6.0, "E2EL p99") == 3.0, "less is better"


def test_a_line_is_written_before_anything_that_takes_long_and_each_value_as_soon_as_it_is_known() -> None:
    """Each line comes before what it names: a system takes in a workload after its line. A value is indented."""
    said: list[str] = []

    class Telling(Steady):
        def seconds(self, workload: Workload) -> float:
            said.append("…")
            return super().seconds(workload)

    run_in_turn({"a": lambda: Telling([], "a", 0.01, 0.02)}, plan(2), said.append)
    values = [line for line in said if line.startswith("  ")]
    assert [line.split(maxsplit=1)[1] for line in values] == ["output tokens/s", "ms/token", "tokens/s"] * 2
    assert values[0] == "  25 output tokens/s"
    said = [line for line in said if line not in values]
    figures = ["throughput", "latency", "prefill"]
    assert [line for line in said if line != "…"] == [
        "starting a",
        *(f"warming up a: {figure}" for figure in figures),
        *(f"round {number} of 2: a, {figure}" for number in (1, 2) for figure in figures),
    ]
    assert [before for before, line in pairwise(said) if line == "…" and before != "…"] == said_lines(said)[1:]


def said_lines(said: list[str]) -> list[str]:
    return [line for line in said if line != "…"]


def test_a_run_before_the_first_round_may_be_shorter() -> None:
    journal: list[int] = []

    class Counting(Steady):
        def seconds(self, workload: Workload) -> float:
            journal.append(workload.output_tokens)
            return super().seconds(workload)

    short = Plan({"throughput": plan().workloads["throughput"]}, 1, warm_up_len=5)
    run_in_turn({"a": lambda: Counting([], "a", 1, 1)}, short, lambda text: None)
    assert journal == [4 + 5, 4 + 6]


def test_systems_take_turns_in_each_round_or_run_one_after_the_other() -> None:
    journal: list[str] = []
    systems: dict[str, Callable[[], System]] = {
        name: lambda name=name: Steady(journal, name, 1, 1)  # type: ignore[misc]
        for name in "ab"
    }
    only = Plan({"prefill": plan().workloads["prefill"]}, 2)
    run_in_turn(systems, only, lambda text: None)
    assert journal == ["a starts", "a", "b starts", "b", "a", "b", "a", "b", "b ends", "a ends"]
    journal.clear()
    run_apart(systems, only, lambda text: None)
    assert journal == ["a starts", "a", "a", "a", "a ends", "b starts", "b", "b", "b", "b ends"]


def test_a_system_that_fails_does_not_stop_the_others() -> None:
    class Breaks(Steady):
        def seconds(self, workload: Workload) -> float:
            if len(self.journal) > 6:
                raise SystemFailedError("it broke")
            return super().seconds(workload)

    def never() -> System:
        raise SystemFailedError("it cannot start")

    journal: list[str] = []
    systems: dict[str, Callable[[], System]] = {
        "breaks": lambda: Breaks(journal, "breaks", 1, 1),
        "never": never,
        "works": lambda: Steady([], "works", 1, 1),
    }
    readings = run_in_turn(systems, plan(3), lambda text: None)
    assert readings["breaks"].failure == "it broke"
    assert readings["never"].failure == "it cannot start"
    assert len(readings["works"].values["prefill"]) == 3
    assert journal[-1] == "breaks ends", "what was started is ended"


def test_less_is_better_for_latency_only() -> None:
    assert ratio(10, 5, "throughput") == 2
    assert ratio(10, 5, "latency") == 0.5


def test_a_report_shows_ratios_and_failures() -> None:
    readings = {
        "quire": Readings({"throughput": [100.0, 300.0, 200.0]}),
        "slow": Readings({"throughput": [50.0, 80.0, 100.0]}),
        "gone": Readings({}, failure="It is not here."),
    }
    report = BenchReport("a title", readings, {"throughput": 400.0}, None, {"rounds": 3})
    assert report.ratios() == {"slow": {"throughput": 2.5}}
    table = report.as_table()
    assert "quire: 2.50 times as good" in table
    assert "quire: 50% of it" in table
    assert "gone: It is not here." in table
    data = json.loads(json.dumps(report.as_data()))
    assert data["systems"]["slow"]["medians"] == {"throughput": 80.0}
    assert data["systems"]["gone"]["failure"] == "It is not here."


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 1000))
def test_workloads_repeat_and_stay_within_their_bounds(least: int, more: int, seed: int) -> None:
    lengths = Lengths(least, least + more)
    one, two = (random_workload(5, lengths, lengths, 100, seed) for _ in range(2))
    assert one == two
    assert all(least <= size <= least + more for size in (*map(len, one.prompts), *one.outputs))
    assert all(3 <= token < 100 for prompt in one.prompts for token in prompt)


@pytest.mark.parametrize("text", ["", "0", "-3", "5..4", "a..b", "1..2..3", "1.5"])
def test_ranges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number or a range|must begin"):
        Lengths.of(text)


def test_ranges_are_read_as_they_are_written() -> None:
    assert [str(Lengths.of(text)) for text in ("7", "7..7", "100..1024")] == ["7", "7", "100..1024"]


@pytest.mark.parametrize("shape", [SHAPES["135m"], SHAPES["qwen3-0.6b"], TINY])
def test_costs_count_the_weights_that_a_step_reads(shape: dict[str, Any], tmp_path: Path) -> None:
    """The oracle is the model itself: the elements of its linear layers."""
    settings = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **settings)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape["model_type"]]]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name: part.weight.numel() for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    costs = Costs.of(read_model_config(tmp_path), Widths(2, 2, 2))  # type: ignore[arg-type]
    assert costs.head == linear.pop("lm_head")
    assert costs.layers == sum(linear.values())
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // heads
    assert costs.context == 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
    assert costs.attention == 4 * shape["num_hidden_layers"] * heads * head_dim


def test_the_roofline_takes_the_slower_of_products_and_reads() -> None:
    costs = Costs(layers=100, head=10, context=3, attention=7, widths=Widths(layers=1, head=4, context=2))
    one = Workload([[1] * 4], [3])
    operations = 2 * (4 * 100 + 10) + 10 * 7, 2 * 110 + 5 * 7, 2 * 110 + 6 * 7
    size = 140, 140 + 5 * 6, 140 + 6 * 6
    assert least_seconds(one, costs, Ceilings(1.0, 1e9)) == pytest.approx(sum(operations))
    assert least_seconds(one, costs, Ceilings(1e9, 1.0)) == pytest.approx(sum(size))


class Clock:
    """Time that only kernels take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(roofline.time, "perf_counter", lambda: self.now)

    def kernel(self, calls: list[str], name: str, *seconds: float) -> Callable[[], None]:
        """One whose calls take so long, the last of these times for ever."""
        left = list(seconds)

        def work() -> None:
            calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_a_limit_is_the_best_of_all_kernels_and_of_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), list[str]()
    kernels = [
        (100.0, clock.kernel(calls, "disturbed", *[10.0] * TRIES, 5.0, 2.0, 4.0)),
        (300.0, clock.kernel(calls, "steady", 10.0)),
        (1.0, clock.kernel(calls, "slow", 10.0)),
    ]
    ceiling = Ceiling(kernels, torch.device("cpu"))
    ceiling.measure()
    assert ceiling.rate == 30.0
    assert set(calls) == {"disturbed", "steady", "slow"}
    calls.clear()
    ceiling.measure()
    assert ceiling.rate == 50.0
    assert set(calls) == {"disturbed", "steady"}, "what is far from the limit is not measured again"
    ceiling.measure()
    assert ceiling.rate == 50.0, "a limit never falls"


@pytest.mark.parametrize(
    ("quantization", "layers", "head"), [(None, 2, 2), ("int8", 1, 1), ("int4", (4 + 2 * 16 / 32) / 8, 1)]
)
def test_bytes_of_a_weight_are_those_that_its_layer_holds(
    quantization: Quantization | None, layers: float, head: float
) -> None:
    options = LoadOptions(ExecutorConfig(quantization=quantization))
    widths = Widths.of(options, torch.bfloat16, torch.int8)
    per_channel = 0.02  # a scale and a bias of each output
    assert widths.layers == pytest.approx(layers, abs=per_channel)
    assert widths.head == pytest.approx(head, abs=per_channel)
    assert widths.context == 1


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_limits_of_this_machine_are_found_for_small_and_for_large_models(
    quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LoadOptions(ExecutorConfig(quantization=quantization))
    monkeypatch.setattr(roofline, "PRODUCT_SIDES", (256, 512))
    for weights in (1, 1 << 25):
        machine = Machine(torch.float32, options, weights)
        machine.measure()
        first = machine.ceilings
        machine.measure()
        assert 1e6 < first.operations <= machine.ceilings.operations
        assert 1e6 < first.bytes <= machine.ceilings.bytes


@pytest.mark.parametrize("run", [run_in_turn, run_apart])
def test_the_machine_is_measured_before_each_systems_turn(run: Callable[..., dict[str, Readings]]) -> None:
    journal: list[str] = []
    systems = {name: (lambda name=name: Steady(journal, name, 0.1, 0.1)) for name in ("a", "b")}
    run(systems, plan(rounds=3), lambda text: None, lambda: journal.append("measured"))
    turns = [entry for entry, before in zip(journal[1:], journal, strict=False) if before == "measured"]
    assert sorted(turns) == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize(("best", "share"), [(160.0, "quire: 62% of it"), (100.0, None), (80.0, None)])
def test_a_share_of_the_roofline_is_shown_only_where_it_is_defined(best: float, share: str | None) -> None:
    readings = {"quire": Readings({"throughput": [100.0]})}
    (line,) = (
        line
        for line in BenchReport("", readings, {"throughput": best}, None, {}).as_table().splitlines()
        if "roofline" in line
    )
    assert ("%" in line) == (share is not None)
    assert share is None or share in line
    assert share is not None or "exceeded" in line


def test_a_shape_is_written_once_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = model_of_shape(json.dumps(TINY), 0)
    assert read_model_config(folder).vocab_size == 300
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_of_shape(json.dumps(TINY), 0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert model_of_shape(json.dumps(TINY), 1) != folder, "another seed, other weights"
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, model_of_shape(json.dumps(TINY), 1).name}


@pytest.mark.parametrize(
    "shape", ["huge", "{}", "[1]", '{"model_type": "nonsense"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_shape_that_is_none_is_refused(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError):
        model_of_shape(shape, 0)


class Scripts:
    """A folder of peers' scripts, with a real interpreter to run them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "lines.py").write_bytes((measure.SCRIPTS / "lines.py").read_bytes())
        monkeypatch.setattr(measure, "SCRIPTS", folder)
        monkeypatch.setattr(measure, "SECONDS_TO_END", 1.0)

    def start(self, body: str, **settings: object) -> PeerProcess:
        (self.folder / "run_it.py").write_text(f"import lines, os, sys, time\n{body}\n")
        return PeerProcess(Path(sys.executable), "run_it.py", settings, os.environ)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(tmp_path, monkeypatch)


SERVE = "answers = lines.take_output()\nlines.serve(answers, 'peer 1', {run})"
ONE = Workload([[5, 6]], [3])


def test_a_peers_own_output_does_not_disturb_its_result(scripts: Scripts) -> None:
    body = "def run(prompts, outputs, n):\n    print('chatter'); time.sleep(0.05)\n    return sum(outputs), 16\n"
    child = scripts.start(body + SERVE.format(run="run"))
    assert child.name == "peer 1"
    assert child.padding is None
    assert 0.05 <= child.seconds(ONE) < 5
    assert child.padding == 0.75, "4 of 16 positions are needed"
    child.close()


def test_a_peer_that_generates_too_few_tokens_is_refused(scripts: Scripts) -> None:
    child = scripts.start(SERVE.format(run="lambda prompts, outputs, n: (2, 4)"))
    with pytest.raises(SystemFailedError, match="2 of 3 tokens"):
        child.seconds(ONE)
    child.close()


def test_a_peer_that_dies_is_quoted(scripts: Scripts) -> None:
    child = scripts.start(SERVE.format(run="lambda prompts, outputs, n: 1 // 0"))
    with pytest.raises(SystemFailedError, match="ZeroDivisionError"):
        child.seconds(ONE)
    child.close()
    with pytest.raises(SystemFailedError, match="no such thing"):
        scripts.start("sys.exit('no such thing')")


def test_a_peer_that_does_not_end_is_ended_with_its_children(scripts: Scripts) -> None:
    body = "import subprocess\nlasting = subprocess.Popen(['sleep', '60'])\nanswers = lines.take_output()\n"
    child = scripts.start(body + "lines.say(answers, ready=str(lasting.pid))\ntime.sleep(60)")
    lasting = int(child.name)
    child.close()
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(lasting)], capture_output=True, text=True, check=False)
    assert state.stdout.strip()[:1] in ("", "Z")


@pytest.mark.soak
def test_the_command_runs_beside_transformers_and_writes_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    short = ("--num-prompts", "2", "--input-len", "4..8", "--output-len", "3", "--latency-input-len", "4")
    small = ("--latency-output-len", "4", "--prefill-len", "16", "--rounds", "1", "--kv-cache-memory", "2000000")
    command = (sys.executable, "-c", COMMAND, "bench", "--shape", json.dumps(TINY))
    variants = ("--also", "static", "--max-num-seqs", "1")
    done = subprocess.run(
        [*command, *short, *small, "--against", "transformers", *variants, "--json", str(figures)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_with_kernels(tmp_path))},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "times as good" in done.stdout
    assert done.stdout.count("roofline") == 3
    systems = json.loads(figures.read_text())["systems"]
    for name in ("quire", "quire static", "transformers"):
        assert systems[name]["failure"] is None
        of_requests = {"E2EL mean", "E2EL p99"} if name.startswith("quire") else set()
        assert set(systems[name]["medians"]) == {"throughput", "latency", "prefill"} | of_requests


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give either --model or --shape."),
        (["--model", "demo/model", "--shape", "135m"], "Give either --model or --shape."),
        (["--shape", "135m", "--against", "nobody"], "--against: nobody is not one of"),
        (["--shape", "135m", "--also", "magic"], "--also: magic is not one of"),
        (["--shape", "135m", "--also", "static"], "--also static needs --max-num-seqs below --num-prompts"),
        (["--shape", "135m", "--measure", "beauty"], "--measure: beauty is not one of"),
        (["--shape", "135m", "--input-len", "5..2"], "--input-len: '5..2' must begin"),
        (["--shape", "135m", "--lengths", "chatgpt"], "--lengths: chatgpt is not sharegpt, azure, a range"),
        (["--shape", "135m", "--lengths", "azure", "--measure", "served"], "takes --input-len and --output-len"),
    ],
)
def test_wrong_settings_are_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as ended:
        bench(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# In one process, which takes seconds to import what each of them needs.
EACH = """
import json, sys
from quire_engine.bench.bench_command import bench
for arguments in json.loads(sys.argv[1]):
    try:
        bench(arguments)
    except SystemExit as ended:
        print(ended.code)
    print("then", file=sys.stderr)
"""


@pytest.mark.soak
def test_an_unavailable_peer_and_a_prompt_that_is_too_long_are_refused_at_once(tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY))
    lengths = ("--input-len", "4", "--output-len", "4", "--latency-input-len", "4", "--latency-output-len", "4")
    refused = (("--against", "vllm", "--vllm-python", "/nonexistent"), ("--against", "none", "--prefill-len", "300"))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            EACH,
            json.dumps([["--shape", str(shape), *lengths, *arguments] for arguments in refused]),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_with_kernels(tmp_path))},
        timeout=240,
        check=False,
    )
    assert done.stdout.split() == ["1", "1"], done.stderr
    peer, length = done.stderr.split("then\n")[:2]
    assert "vllm is not installed; docs/benchmarks.md says how." in peer
    assert "has 301 tokens, and the model takes 256: lower --prefill-len" in length
