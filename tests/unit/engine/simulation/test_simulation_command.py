"""``quire-engine simulate``: the same command as the engine's, figures for people and programs, and plain refusals."""

import json
import sys
from pathlib import Path

import pytest
from quire_engine.cli import main
from quire_engine.simulation.simulator import Simulation

from tests.support.traces import random_rows, write_azure


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_azure(tmp_path / "trace.csv", random_rows(60, 1, 20.0)))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["quire-engine", "simulate", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_policies_stand_side_by_side_in_the_table(command, trace) -> None:
    lines = command("--trace", trace, "--compare", "fcfs,sjf", "--max-num-seqs", "4").splitlines()
    assert lines[0].split() == ["fcfs", "sjf"]
    rows = {line[:18].strip(): line for line in lines}
    for name in ("TTFT, s", "ITL, ms", "waiting, s", "KV waste", "preemptions", "prefix hits", "queue", "pace"):
        assert name in rows
    assert rows["requests"].count("60 of 60 completed") == 2


def test_json_holds_settings_and_figures_and_repeats(command, trace) -> None:
    arguments = ("--trace", trace, "--json", "--rate", "3", "--num-gpu-blocks-override", "400", "--jitter", "0.2")
    one, two, other = (json.loads(command(*arguments, "--seed", seed)) for seed in ("1", "1", "2"))
    for document in (one, two, other):
        pace = document["runs"]["fcfs"].pop("pace")
        assert pace["steps_per_second"] > 0
    assert one == two
    assert one["runs"] != other["runs"]
    assert one["settings"]["capacity"]["device_blocks"] == 401
    assert one["settings"]["latency"]["jitter"] == 0.2
    figures = one["runs"]["fcfs"]
    assert figures["completed"] == 60
    assert set(figures["ttft"]) == {"mean", "p50", "p90", "p99", "max"}


def test_json_counts_preemptions_by_their_reason(command, trace) -> None:
    arguments = ("--trace", trace, "--json", "--rate", "50", "--num-gpu-blocks-override", "200", "--swap-space", "0")
    figures = json.loads(command(*arguments))["runs"]["fcfs"]
    assert sum(figures["preemption_reasons"].values()) == figures["preemptions_by_recompute"] > 0


def test_json_counts_requests_that_can_never_run(command, trace) -> None:
    figures = json.loads(command("--trace", trace, "--json", "--max-model-len", "1"))["runs"]["fcfs"]
    assert sum(figures["errors"].values()) == 60
    assert figures["completed"] == 0


def test_a_disk_of_a_stated_size_and_speed_is_part_of_the_engine(command, trace) -> None:
    arguments = ("--trace", trace, "--json", "--kv-disk-space", "3", "--disk-bytes-per-second", "7e9")
    document = json.loads(command(*arguments))
    assert document["settings"]["kv_disk_space"] == 3
    assert document["settings"]["latency"]["disk_bytes_per_second"] == 7e9
    assert document["runs"]["fcfs"]["disk_blocks_stored"] == 0, "no two prompts of this trace share a prefix"


def test_limits_come_from_the_engines_environment_variables_too(command, trace, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_MAX_NUM_SEQS", "3")
    assert json.loads(command("--trace", trace, "--json"))["runs"]["fcfs"]["running"]["max"] == 3


def test_a_plot_is_written(command, trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    command("--trace", trace, "--plot", str(picture), "--compare", "fcfs,sjf")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_with_the_way_to_get_it(command, trace, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(Simulation, "run", lambda *args: pytest.fail("it simulates what it cannot plot"))
    with pytest.raises(SystemExit) as end:
        command("--trace", trace, "--plot", "plot.png")
    assert end.value.code == 1
    assert "pip install 'matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "--trace"),
        (("--trace", "nowhere.csv"), 1, "nowhere.csv"),
        (("--trace", "TRACE", "--compare", "fcfs,lifo"), 2, "lifo"),
        (("--trace", "TRACE", "--rate", "0"), 2, "--rate"),
        (("--trace", "TRACE", "--rate", "nan"), 2, "--rate"),
        (("--trace", "TRACE", "--jitter", "1"), 2, "--jitter"),
        (("--trace", "TRACE", "--tokens-per-second", "0"), 2, "--tokens-per-second"),
        (("--trace", "TRACE", "--tokens-per-second", "1e-300"), 2, "--tokens-per-second"),
        (("--trace", "TRACE", "--bytes-per-second", "inf"), 2, "--bytes-per-second"),
        (("--trace", "TRACE", "--rate", "1e-300"), 2, "--rate"),
        (("--trace", "TRACE", "--overhead-seconds", "1e300"), 2, "--overhead-seconds"),
        (("--trace", "TRACE", "--kv-cache-memory", "100000000000000000000"), 2, "are simulated"),
        (("--trace", "TRACE", "--swap-space", "1000000"), 2, "are simulated"),
        (("--trace", "TRACE", "--start", "60"), 1, "row 60"),
        (("--trace", "TRACE", "--kv-cache-memory", "5"), 2, "KV pool"),
        (("--trace", "TRACE", "--preset", "abacus"), 2, "--preset"),
        (("--trace", "TRACE", "--kv-disk-space", "1", "--memory", "max"), 2, "--memory paged"),
        (("--trace", "TRACE", "--kv-disk-space", "1", "--swap-space", "0"), 2, "--swap-space"),
        (("--trace", "TRACE", "--kv-disk-space", "1", "--no-enable-host-caching"), 2, "--enable-host-caching"),
        (("--trace", "TRACE", "--kv-disk-space", "1e-9"), 2, "hold a block"),
        (("--trace", "TRACE", "--disk-bytes-per-second", "0"), 2, "--disk-bytes-per-second"),
        (("--trace", "TRACE", "--plot", "nowhere/plot.png"), 1, "plot"),
        (("--trace", "TRACE", "--plot", "plot.txt"), 1, "plot"),
    ],
)
def test_wrong_settings_end_with_one_sentence(command, trace, capsys, arguments, status, said) -> None:
    with pytest.raises(SystemExit) as end:
        command(*(trace if argument == "TRACE" else argument for argument in arguments))
    assert end.value.code == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_without_the_subcommand_the_engine_itself_reads_its_settings(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["quire-engine", "--trace", "x"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "simulate" not in capsys.readouterr().err
