"""Servers under load: turns, failures, settings, the real stack of a tiny model, and the table of all results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.bench import served, table
from quire_engine.bench.bench_command import BenchReport
from quire_engine.bench.config import BenchConfig
from quire_engine.bench.measure import Readings, SystemFailedError
from quire_engine.bench.served import FIGURES, SAMPLINGS, ServedReadings, Server
from quire_engine.bench.workload import Lengths
from tokenizers import Tokenizer

from tests.support.kernels import cache_with_kernels
from tests.support.ports import free_port
from tests.support.processes import eventually
from tests.unit.engine.bench.test_bench import TINY

# A server of two tokens for each request, or of an error. It writes what it was asked into a file.
SCRIPT = """
import http.server, json, sys
refuse, port, asked = sys.argv[1] == "refuse", int(sys.argv[2]), sys.argv[3]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(asked, "a") as file:
            file.write(json.dumps(body) + chr(10))
        token = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
        usage = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}}
        events = [json.dumps(event) for event in (token, token, usage)] + ["[DONE]"]
        data = "".join(f"data: {event}" + chr(10) * 2 for event in events).encode()
        self.reply(400, b'{"error": {"message": "No."}}') if refuse else self.reply(200, data)
    def reply(self, status, data):
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def config(**settings: Any) -> BenchConfig:
    small = {"num_prompts": 2, "num_served_prompts": 3, "input_len": "4..8", "output_len": "2", "rounds": 2}
    return BenchConfig(shape="135m", **{**small, **settings})


def scripted(asked: Path, kind: str = "answer") -> Callable[[], Server]:
    def start() -> Server:
        port = free_port()
        command = [sys.executable, "-c", SCRIPT, kind, str(port), str(asked)]
        return Server(f"http://127.0.0.1:{port}", lambda _: [("scripted", command, {})])

    return start


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("in_turn", [True, False])
def test_servers_take_turns_and_get_the_same_requests_which_are_new_in_each_run(tmp_path: Path, in_turn: bool) -> None:
    journal: list[str] = []
    starts = {name: scripted(tmp_path / name) for name in ("quire", "vllm")}
    found = served.measure_served(config(), starts, 100, journal.append, in_turn)
    a, b = lines_of(tmp_path / "quire"), lines_of(tmp_path / "vllm")
    assert sorted(map(str, a)) == sorted(map(str, b))
    assert len(a) == 3 * (2 + 2 * 2), "two runs to warm up, and two for each round"
    prompts = {tuple(body["prompt"]) for body in a}
    assert len(prompts) == 3 * (1 + 2 * 2), "both runs to warm up are of the same requests"
    assert {(body["temperature"], body.get("top_p")) for body in a} == {(0, None), (1, 0.95)}
    assert all(4 <= len(body["prompt"]) <= 8 and body["max_tokens"] == 2 for body in a)
    for readings in found.values():
        assert readings.failure is None
        assert list(readings.values) == list(SAMPLINGS)
        assert {tuple(values) for values in readings.values.values()} == {tuple(FIGURES)}
        assert {len(each) for values in readings.values.values() for each in values.values()} == {2}
    turns = [line.split(": ")[1].split(" ")[0] for line in journal if line.startswith("round")]
    assert turns == (["quire", "vllm"] * 4 if in_turn else ["quire"] * 4 + ["vllm"] * 4)


def test_a_server_that_fails_does_not_stop_the_other(tmp_path: Path) -> None:
    def broken() -> Server:
        return Server("http://127.0.0.1:1", lambda _: [("broken", [sys.executable, "-c", "exit('no luck')"], {})])

    def absent() -> Server:
        return Server("http://127.0.0.1:1", lambda _: [("absent", ["/nonexistent/program"], {})])

    starts = {
        "quire": scripted(tmp_path / "a"),
        "refuses": scripted(tmp_path / "b", "refuse"),
        "broken": broken,
        "absent": absent,
    }
    found = served.measure_served(config(rounds=1), starts, 100, lambda text: None, in_turn=True)
    assert found["quire"].failure is None
    assert found["quire"].median("T = 0", "output_throughput")
    assert found["refuses"].failure == "3 requests failed: HTTP 400: No."
    assert found["broken"].failure == "broken ended with 1: no luck"
    assert str(found["absent"].failure).startswith("It cannot be started: [Errno 2]")


def test_a_program_that_ends_while_it_is_measured_is_quoted(tmp_path: Path) -> None:
    server = scripted(tmp_path / "asked")()
    [program] = [child for child in psutil.Process().children() if "refuse, port" in " ".join(child.cmdline())]
    program.kill()
    try:
        with pytest.raises(SystemFailedError, match="scripted ended with -9"):
            served.run_client(config(), server, "T = 0", 100, 0)
    finally:
        server.close()


def test_nothing_is_left_of_a_server_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "SECONDS_TO_END", 0.2)
    port, pids = free_port(), tmp_path / "pids"
    stubborn = (
        "import os, signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
    )
    command = [sys.executable, "-c", stubborn + SCRIPT, "answer", str(port), str(tmp_path / "asked")]
    Server(f"http://127.0.0.1:{port}", lambda _: [("stubborn", command, {})]).close()
    for pid in map(int, pids.read_text().split()):
        eventually(partial(has_ended, pid), message=f"process {pid} goes on")


def has_ended(pid: int) -> bool:
    """Whether it runs no more, even if nobody has waited for it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_the_engine_of_the_stack_has_the_settings_that_the_user_gave() -> None:
    given = config(quantization="int8", enable_prefix_caching=False, max_model_len=64)
    settings = {"QUIRE_ENGINE_QUANTIZATION": "int8", "QUIRE_ENGINE_ENABLE_PREFIX_CACHING": "false"}
    pool = {"QUIRE_ENGINE_KV_CACHE_MEMORY": str(served.KV_BYTES)}
    assert served.engine_variables(given, "cpu") == settings | pool
    assert served.engine_variables(given, "cuda") == settings  # each server takes what its defaults say of a GPU
    assert served.engine_variables(config(kv_cache_memory=7), "cpu")["QUIRE_ENGINE_KV_CACHE_MEMORY"] == "7"


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_a_range_of_lengths_is_one_for_the_client_too(least: int, more: int) -> None:
    """``quire bench serve`` draws from ``floor(mean * (1 - ratio))`` to ``ceil(mean * (1 + ratio))``."""
    lengths = Lengths(least, least + more)
    middle, spread = served._middle(lengths), served._spread(lengths)
    assert 0 <= spread < 1
    assert abs(middle * (1 - spread) - least) <= 1
    assert abs(middle * (1 + spread) - (least + more)) <= 1


def test_a_folder_without_a_tokenizer_gets_one_of_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with served.served_folder(tmp_path, 40) as folder:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.encode("w3 w39 </s>").ids == [3, 39, 2]
        assert tokenizer.decode([3, 39]) == "w3 w39"
        assert (folder / "config.json").read_text() == "{}"
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "the model's own folder is left as it is"
    (tmp_path / "tokenizer.json").write_text("{}")
    with served.served_folder(tmp_path, 40) as folder:
        assert folder == tmp_path


def report(**changes: Any) -> BenchReport:
    offline = {
        "quire": Readings({"throughput": [100.0], "latency": [4.0]}),
        "quire int4": Readings({"throughput": [300.0], "latency": [2.0]}),
        "vllm": Readings({"throughput": [50.0], "latency": [5.0]}),
        "llama.cpp-q4_k_m": Readings({"throughput": [150.0], "latency": [3.0]}),
        "llama.cpp-q8_0": Readings({"throughput": [200.0], "latency": [4.0]}),
        "transformers": Readings({}, failure="It is not here."),
    }
    under_load = {
        "quire": ServedReadings({"T = 0": {"output_throughput": [80.0, 90.0, 100.0], "p99_itl_ms": [20.0]}}),
        "vllm": ServedReadings({"T = 0": {"output_throughput": [60.0], "p99_itl_ms": [10.0]}}),
        "other": ServedReadings({}, failure="It broke."),
    }
    settings = {
        "title": "a title",
        "readings": offline,
        "best": {},
        "steps": None,
        "settings": {},
        "served": under_load,
    }
    return BenchReport(**{**settings, **changes})


def test_a_peer_in_fewer_bits_is_compared_with_the_engine_in_as_many() -> None:
    ratios = report().ratios()
    assert ratios["llama.cpp-q4_k_m"] == {"throughput": 2.0, "latency": 1.5}
    assert ratios["llama.cpp-q8_0"] == {"throughput": 0.5, "latency": 1.0}, "the engine was not measured in int8"
    assert "quire int4: 2.00 times as good" in report().as_table()


def test_served_figures_stand_in_the_report_with_their_ratios() -> None:
    shown = report().as_table()
    assert "served, T = 0: output tokens/s\n  quire        90.0  (80.0 to 100.0)\n" in shown
    assert "60.0  (60.0 to 60.0)          quire: 1.50 times as good" in shown
    assert "10.0  (10.0 to 10.0)          quire: 0.50 times as good" in shown
    assert "other served: It broke." in shown
    alone = report(readings={}).as_table()
    assert "served, T = 0: p99 ITL, ms (less is better)" in alone
    assert "offline" not in alone


def test_one_table_has_a_line_for_each_figure_and_a_column_for_each_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, made in zip(files, (report(), report(title="served only", readings={})), strict=True):
        file.write_text(json.dumps(made.as_data()))
    monkeypatch.setattr(sys, "argv", ["table", *map(str, files)])
    table.main()
    _, first, second = capsys.readouterr().out.strip().split("\n\n")
    title, head, *rows = first.splitlines()
    assert title == "a title"
    assert head.split() == ["quire", "quire", "int4", "vllm", "llama.cpp-q4_k_m", "llama.cpp-q8_0"]
    cells = [row.split("  ") for row in rows]
    assert [[cell.strip() for cell in row if cell] for row in cells] == [
        ["offline throughput, output tokens/s", "100", "300 (0.33)", "50.0 (2.00)", "150 (2.00)", "200 (0.50)"],
        ["offline latency, ms/token", "4.00", "2.00 (0.50)", "5.00 (1.25)", "3.00 (1.50)", "4.00 (1.00)"],
        ["served T = 0: output tokens/s", "90.0", "-", "60.0 (1.50)", "-", "-"],
        ["served T = 0: p99 ITL, ms", "20.0", "-", "10.0 (0.50)", "-", "-"],
        ["transformers: It is not here."],
        ["other served: It broke."],
    ]
    assert second.splitlines()[0] == "served only"
    assert len(second.splitlines()) == 5


def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("{}")
    for name in ("x.json", "none.json"):
        monkeypatch.setattr(sys, "argv", ["table", str(tmp_path / name)])
        with pytest.raises(SystemExit, match="1"):
            table.main()
        assert capsys.readouterr().err.startswith("error: Not a result of quire-engine bench --json")


@pytest.mark.soak
def test_the_command_serves_a_tiny_model_through_router_and_engine(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    short = ("--num-prompts", "2", "--num-served-prompts", "4", "--input-len", "4..8", "--output-len", "3")
    small = ("--rounds", "1", "--kv-cache-memory", "2000000", "--against", "none", "--measure", "served")
    command = [sys.executable, "-m", "quire_engine.cli", "bench", "--shape", json.dumps(TINY)]
    done = subprocess.run(
        [*command, *short, *small, "--json", str(figures)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_with_kernels(tmp_path))},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "served 4 requests of 4..8 tokens in and 3 out, 2 at once; medians of 1 rounds" in done.stdout
    result = json.loads(figures.read_text())
    assert result["systems"] == {}
    found = result["served"]["quire"]
    assert found["failure"] is None
    assert set(found["medians"]) == {f"{sampling}: {title}" for sampling in SAMPLINGS for title in FIGURES.values()}
    assert found["medians"]["T = 0: output tokens/s"] > 0
    assert len(table.format_table([result]).splitlines()) == 2 + 2 + len(SAMPLINGS) * len(FIGURES)


@pytest.mark.soak
def test_sigterm_ends_the_servers_that_were_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire_engine.cli", "bench", "--shape", json.dumps(TINY)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_with_kernels(tmp_path))}
    with subprocess.Popen([*command, "--against", "none", "--measure", "served"], env=environment) as running:
        started: set[psutil.Process] = set()

        def has_servers() -> bool:
            """Redis, the engine and the router: each leads a process group."""
            started.update(psutil.Process(running.pid).children(recursive=True))
            return len([each for each in started if each.is_running() and os.getpgid(each.pid) == each.pid]) == 3

        try:
            eventually(has_servers, 180)
            running.terminate()
            assert running.wait(60) == 128 + signal.SIGTERM
        finally:
            running.kill()
            left = psutil.wait_procs(list(started), timeout=10)[1]
            for process in left:
                process.kill()
    assert left == []
