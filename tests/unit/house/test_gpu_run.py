"""The runner of the GPU's rows, with rows that need none: each has its limit, and what is known is never lost."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.bench import gpu_rows
from tests.bench.gpu_run import Figure, Model, PowerMeter, Row, Run

SMALL = Model("tiny", "bf16")


def row(name: str, script: str, seconds: float = 30.0, **fields: object) -> Row:
    """A row of a Python script, whose figures are the JSON that it writes to the file of its first argument."""
    return Row(name, (sys.executable, "-c", script, "{json}", "{model}"), seconds, gpu_rows.read_json, **fields)


def writing(*figures: dict[str, object], then: str = "") -> str:
    return f"import json, sys, time; open(sys.argv[1], 'w').write(json.dumps({list(figures)!r})); {then}"


def results(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())["rows"]


def test_figures_are_printed_and_written_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = {"name": "decode", "value": 1.5, "unit": "ms", "share": 0.7}
    Run(tmp_path, facts={"device": "a GPU"}).run([row("first", writing(figure)), row("second", writing())])
    first, second = results(tmp_path)
    assert (first["state"], second["state"]) == ("done", "done")
    assert first["figures"][0]["value"] == 1.5
    table = (tmp_path / "results.md").read_text()
    assert "| first | decode | 1.5 ms | 70% |  |" in table
    assert "device: a GPU" in table
    assert "  decode: 1.5 ms, 70% of the roofline" in capsys.readouterr().out


def test_a_row_that_takes_too_long_is_cut_with_all_its_processes_and_keeps_its_figures(tmp_path: Path) -> None:
    child = "import subprocess; subprocess.run(['sleep', '77.25'], start_new_session=True)"
    began = time.monotonic()
    Run(tmp_path).run([row("slow", writing({"name": "a", "value": 1, "unit": "s"}, then=child), 3.0), row("next", "")])
    assert time.monotonic() - began < 20
    slow, following = results(tmp_path)
    assert (slow["state"], slow["why"]) == ("cut", "it took more than 3 s")
    assert len(slow["figures"]) == 1
    assert following["state"] == "done"
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
    assert not any(command == b"sleep\x0077.25\x00" for command in _existing(commands))


def _existing(commands: object) -> list[bytes]:
    found = []
    iterator = iter(commands)  # type: ignore[call-overload]
    while True:
        try:
            found.append(next(iterator))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except StopIteration:
            return found


def test_a_row_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    Run(tmp_path).run([row("bad", "print('first'); raise SystemExit('no kernel | for that')"), row("next", "")])
    bad, following = results(tmp_path)
    assert (bad["state"], bad["why"]) == ("failed", "it ended with 1: first / no kernel | for that")
    assert following["state"] == "done"
    assert "no kernel \\| for that" in (tmp_path / "results.md").read_text()
    assert "no kernel" in (tmp_path / "run.log").read_text()


def test_figures_that_cannot_be_read_fail_their_row_alone(tmp_path: Path) -> None:
    Run(tmp_path).run([row("odd", "import sys; open(sys.argv[1], 'w').write('no JSON')"), row("next", "")])
    assert [each["state"] for each in results(tmp_path)] == ["failed", "done"]


def test_rows_after_the_end_of_the_run_and_those_that_lack_something_are_not_run(tmp_path: Path) -> None:
    rows = [row("first", "import time; time.sleep(60)"), row("late", ""), row("peer", "", absent="it is not there")]
    Run(tmp_path, seconds=6.0).run(rows)
    first, late, peer = results(tmp_path)
    assert (first["state"], late["state"], peer["state"]) == ("cut", "not run", "not run")
    assert late["why"] == "the 6 s of the run are over"
    assert peer["why"] == "it is not there"
    assert "| peer | **not run**: it is not there |" in (tmp_path / "results.md").read_text()


def test_models_are_written_once_each_and_given_to_their_rows(tmp_path: Path) -> None:
    made: list[Model] = []

    def make(model: Model) -> Path:
        made.append(model)
        if model.form == "int4":
            raise OSError("the disk is full")
        return tmp_path / model.form

    given = "import json, sys; json.dump([dict(name=sys.argv[2], value=1, unit='')], open(sys.argv[1], 'w'))"
    rows = [row(str(number), given, model=SMALL) for number in range(2)]
    Run(tmp_path, make_model=make).run([*rows, row("full", given, model=Model("tiny", "int4"))])
    one, two, full = results(tmp_path)
    assert one["figures"][0]["name"] == two["figures"][0]["name"] == str(tmp_path / "bf16")
    assert (full["state"], full["why"]) == ("failed", "its model cannot be written: the disk is full")
    assert len(made) == 2


def test_power_is_that_of_a_row_and_of_the_time_in_which_a_figure_was_measured(tmp_path: Path) -> None:
    watts = [100.0]
    meter = PowerMeter(lambda: watts[0])
    script = """
import json, sys, time
time.sleep(1)
began = time.time()
open(sys.argv[1] + ".busy", "w").close()
time.sleep(1.5)
json.dump([dict(name="busy", value=1, unit="", began=began + 0.5, ended=time.time())], open(sys.argv[1], "w"))
"""
    busy = tmp_path / "row.json.busy"
    meter._read = lambda: 700.0 if busy.exists() else 100.0
    Run(tmp_path, meter=meter).run([row("first", script)])
    meter.close()
    (first,) = results(tmp_path)
    assert first["figures"][0]["watts"] == 700
    assert first["most_watts"] == 700
    assert 100 < first["mean_watts"] < 700


def test_without_a_meter_there_is_no_power(tmp_path: Path) -> None:
    Run(tmp_path).run([row("first", writing({"name": "a", "value": 1, "unit": "s", "began": 0, "ended": 1}))])
    (first,) = results(tmp_path)
    assert first["mean_watts"] is first["figures"][0]["watts"] is None


def test_the_rows_are_in_order_of_value_and_each_has_its_limit() -> None:
    rows = gpu_rows.rows("cuda")
    names = [each.name for each in rows]
    assert names[0] == "tests/gpu, short"
    forms = [f"Qwen3-{size}, {form}" for form in ("bf16", "FP8", "INT4") for size in ("0.6B", "8B")]
    assert names[1:7] == forms
    assert names[7:] == ["nano-vLLM's workload", "profile of 256 sequences", "swap and copy rates", "sleep and wake"]
    assert all(0 < each.seconds < 480 for each in rows)


def test_rows_of_an_absent_peer_say_why_they_are_not_run(tmp_path: Path) -> None:
    rows = gpu_rows.peer_rows("cuda", Path("python"), "its slices were not carried to this machine")
    Run(tmp_path).run(rows)
    assert {each["state"] for each in results(tmp_path)} == {"not run"}
    assert len(rows) == len(gpu_rows.rows("cuda"))


def test_what_programs_print_is_read(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    lines = ("a.py::one[x y] PASSED [ 25%]", "a.py::two PASSED [ 50%]", "b.py::three FAILED [ 75%]", "b.py::four ")
    ended = gpu_rows.read_pytest("".join(f"tests/gpu/{line}\n" for line in lines), nothing)
    assert [(each.name, each.value) for each in ended] == [("passed", 2), ("failed", 1)]
    profile = gpu_rows.read_profile(
        "256 sequences: 4.501 ms a step, 56,876 tokens/s\nof the host: output 0.8\n"
        "the GPU is busy for 4.202 ms a step, with 371 kernels:\n    1071.2 us in  28.0  batch_decode<a, b>\n",
        nothing,
    )
    assert profile[0] == Figure("step", 4.501, "ms")
    assert profile[-1] == Figure("batch_decode<a, b>", 1071.2, "us a step")
    output = "round 1: asleep after 0.21 s with 9 MiB of 40, awake after 0.35 s\nawake after 0.40 s, 0.52 s at most"
    wake = gpu_rows.read_wake(output, nothing)
    assert [each.value for each in wake] == [0.21, 0.40, 0.52]
    assert gpu_rows.read_json("", nothing) == gpu_rows.read_bench("", nothing) == []


def test_figures_of_the_benchmark_have_their_share_of_the_roofline(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    medians = {"throughput": 16_900.0, "latency": 2.0}
    units = {"throughput": "output tokens/s", "latency": "ms/token"}
    best = {"throughput": 24_000.0, "latency": 1.0}
    file.write_text(json.dumps({"units": units, "roofline": best, "systems": {"quire": {"medians": medians}}}))
    throughput, latency = gpu_rows.read_bench("", file)
    assert throughput.share == pytest.approx(0.704, abs=1e-3)
    assert latency.share == 0.5
