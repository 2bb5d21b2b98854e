"""``quire-router simulate``: the routers' own command, figures for people and programs, and plain refusals."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire_router.main import main
from quire_router.simulation.config import POLICIES

from tests.support.traces import random_rows, write_azure, write_mooncake

SMALL = ("--engines", "3", "--gsp-num-groups", "6", "--gsp-prompts-per-group", "5", "--gsp-output-len", "8")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["quire-router", "simulate", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_policies_stand_below_each_other_for_each_utilisation(command) -> None:
    lines = command(*SMALL, "--limit", "20", "--utilisation", "0.5,0.9").splitlines()
    headings = [line for line in lines if line.startswith("utilisation")]
    assert [line.partition(";")[0] for line in headings] == [
        f"utilisation {load}, 3 engines, 1 routers" for load in ("0.5", "0.9")
    ]
    assert all("20 requests within" in line for line in headings)
    assert [line.split()[0] for line in lines if line.split()[0] in POLICIES] == 2 * list(POLICIES)
    assert "TTFT mean, s" in lines[1]
    assert lines[1].count("imbalance") == 1


def test_a_terminal_shows_which_run_is_on(command, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def noted(text: str) -> Iterator[None]:
        shown.append(text)
        yield

    monkeypatch.setattr("quire_router.simulation.command.waiting", noted)
    command(*SMALL, "--limit", "5", "--utilisation", "0.5", "--policies", "cost,round_robin")
    assert shown == ["run 1 of 2: cost at utilisation 0.5", "run 2 of 2: round_robin at utilisation 0.5"]


def test_equal_seeds_print_the_same_byte_for_byte(command) -> None:
    arguments = (
        *SMALL,
        "--json",
        "--replicas",
        "2",
        "--policies",
        "cost,power_of_two",
        "--tenants",
        "2",
        "--flood",
        "4",
    )
    one, two, other = (command(*arguments, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == two
    assert json.loads(one)["runs"] != json.loads(other)["runs"]


def test_json_holds_settings_and_figures(command) -> None:
    document = json.loads(command(*SMALL, "--json", "--policies", "cost", "--tenants", "2", "--flood", "4"))
    assert document["settings"]["engines"] == 3
    assert document["settings"]["latency"]["tokens_per_second"] == 10_400
    (run,) = document["runs"]
    assert (run["policy"], run["utilisation"]) == ("cost", 0.9)
    assert run["report"]["completed"] == 30
    assert set(run["report"]["ttft"]) == {"mean", "p50", "p90", "p99", "max"}
    assert set(run["tenants"]) == {"calm", "flooded", "flood"}


def test_both_kinds_of_traces_are_read(command, tmp_path: Path) -> None:
    azure = write_azure(tmp_path / "trace.csv", random_rows(40, 1, 20.0))
    mooncake = write_mooncake(tmp_path / "trace.jsonl", [(3000 * i, 1500, 4, [0, 1, i + 2]) for i in range(30)])
    plain = json.loads(command("--trace", str(azure), "--json", "--policies", "cost", "--engines", "2"))
    assert plain["runs"][0]["report"]["hit_rate"] == 0
    shared = json.loads(command("--trace", str(mooncake), "--json", "--policies", "cost", "--engines", "2"))
    assert 0.5 < shared["runs"][0]["report"]["hit_rate"] < 1024 / 1500
    assert shared["runs"][0]["report"]["requests"] == 30


def test_a_flood_is_shown_beside_normal_load(command) -> None:
    lines = command(*SMALL, "--policies", "cost", "--tenants", "3", "--flood", "5").splitlines()
    assert [line.split()[-3:] for line in lines if "without" in line or "flood" in line[:40]]
    assert "turn p95, s" in "\n".join(lines)


def test_engines_are_set_as_in_the_engines_simulator(command, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_MAX_NUM_SEQS", "3")
    document = json.loads(command(*SMALL, "--json", "--policies", "cost", "--preset", "h100-8b"))
    assert document["settings"]["max_num_seqs"] == 3
    assert document["settings"]["latency"]["tokens_per_second"] == 29_700


def test_a_plot_is_written(command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    command(*SMALL, "--plot", str(picture), "--policies", "cost,round_robin", "--utilisation", "0.5,0.9")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("matplotlib.figure", ("--plot", "plot.png", "--policies", "cost"), "pip install 'matplotlib"),
        ("quire_engine", (), "pip install ./engine"),
    ],
)
def test_a_missing_dependency_is_reported_with_its_extra(
    command, monkeypatch, capsys, missing, arguments, said
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as end:
        command(*SMALL, *arguments)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--trace", "nowhere.csv"), 1, "nowhere.csv"),
        (("--policies", "cost,magic"), 2, "magic"),
        (("--policies", ""), 2, "--policies"),
        (("--utilisation", "0"), 2, "--utilisation"),
        (("--utilisation", "0.5,much"), 2, "--utilisation"),
        (("--utilisation", "nan"), 2, "--utilisation"),
        (("--replicas", "0"), 2, "--replicas"),
        (("--engines", "0"), 2, "--engines"),
        (("--share-age", "-1"), 2, "--share-age"),
        (("--load-age", "inf"), 2, "--load-age"),
        (("--share-delay", "1e300"), 2, "--share-delay"),
        (("--share-age", "1e300"), 2, "--share-age"),
        (("--flood", "3"), 2, "--tenants"),
        (("--gsp-question-len", "0"), 2, "--gsp-question-len"),
        (("--preset", "abacus"), 2, "--preset"),
        (("--plot", "nowhere/plot.png", "--policies", "cost"), 1, "plot"),
    ],
)
def test_wrong_settings_end_with_one_sentence(command, capsys, arguments, status, said) -> None:
    with pytest.raises(SystemExit) as end:
        command(*SMALL, *arguments)
    assert end.value.code == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
