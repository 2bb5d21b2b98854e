"""Runs the rows of `gpu_rows.py` on a GPU, one after the other within a limit: `scripts/gpu_run.sh`.

A row is a program with a limit of its own. What it printed is read as soon as it ends, shown, and written with all
others to ``results.json`` and ``results.md``: a run that is cut off leaves what it has. ``run.log`` has the output of
the programs. Rows for which no time is left, or what they need is absent, say "not run" and why.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

# Eight minutes, with what comes before the first row.
SECONDS, LEAST_SECONDS = 465.0, 5.0
SAMPLES_A_SECOND, PATIENCE = 10, 10
SHOWN_LINES = 3  # of the output of a program that failed


class Model(NamedTuple):
    """A model of random weights: see `random_checkpoint.py`."""

    shape: str
    form: str


@dataclass(slots=True)
class Figure:
    """A number with its unit, its share of the roofline if that is known, when it was measured (seconds since the
    epoch), and the mean power that the GPU drew then.
    """

    name: str
    value: float
    unit: str
    share: float | None = None
    began: float | None = None
    ended: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One program. ``command`` has the places ``{json}``, a file that it may write, and ``{model}``, the folder of
    ``model``. ``read`` finds the figures in its output and that file, which need not be there. ``absent`` says why it
    cannot run.
    """

    name: str
    command: Sequence[str]
    seconds: float
    read: Callable[[str, Path], list[Figure]]
    model: Model | None = None
    absent: str | None = None


@dataclass(slots=True)
class Result:
    """What became of a row: ``state`` is done, failed, cut or not run, and ``why`` says more."""

    name: str
    state: str
    why: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    mean_watts: float | None = None
    most_watts: float | None = None


class PowerMeter:
    """Samples what a GPU draws, on a thread of its own. ``read`` returns watts; without one there are no figures."""

    def __init__(self, read: Callable[[], float] | None) -> None:
        self._read = read
        self._samples: list[tuple[float, float]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if read is not None:
            self._thread.start()

    def between(self, began: float, ended: float) -> list[float]:
        """The watts of all samples in this time."""
        return [watts for when, watts in list(self._samples) if began <= when <= ended]

    def close(self) -> None:
        """Ends the thread."""
        self._ends.set()
        if self._read is not None:
            self._thread.join()

    def _sample(self) -> None:
        assert self._read is not None
        while not self._ends.wait(1 / SAMPLES_A_SECOND):
            with suppress(Exception):  # a driver that does not answer once may answer the next time
                self._samples.append((time.time(), self._read()))


def power_reader() -> Callable[[], float] | None:
    """A function that returns what the first GPU draws, in watts; None where NVML finds none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetPowerUsage(gpu)
    except Exception:  # noqa: BLE001 - NVML's errors, and those of a library that is missing
        return None
    return lambda: float(pynvml.nvmlDeviceGetPowerUsage(gpu)) / 1e3


class Run:
    """All rows, and the files that their results go to."""

    def __init__(
        self,
        out: Path,
        *,
        seconds: float = SECONDS,
        facts: dict[str, str] | None = None,
        meter: PowerMeter | None = None,
        make_model: Callable[[Model], Path] | None = None,
    ) -> None:
        self.results: list[Result] = []
        self._out, self._ends, self._facts = out, time.monotonic() + seconds, facts or {}
        self._limit = seconds
        self._meter = meter or PowerMeter(None)
        self._make_model = make_model or make_checkpoint
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.log").write_text("")

    def run(self, rows: Sequence[Row]) -> None:
        """Runs all rows. Models are written on another thread, while rows run that need none."""
        with _writers(rows, self._make_model) as models:
            for row in rows:
                result = self._run_row(row, models)
                self.results.append(result)
                self._measure_power(result)
                print("\n".join(lines_of(result)), flush=True)
                self._write()
        print(f"\n{self.table()}", flush=True)

    def table(self) -> str:
        """All results as a Markdown table, below facts of the machine."""
        head = [f"{name}: {value}  " for name, value in self._facts.items()]
        columns = ["| row | figure | | share of the roofline | W |", "|---|---|---|---|---|"]
        return "\n".join([*head, "", *columns, *(line for each in self.results for line in cells_of(each))])

    def _run_row(self, row: Row, models: "dict[Model, Future[Path]]") -> Result:
        if row.absent is not None:
            return Result(row.name, "not run", row.absent)
        if row.model is not None:  # and the others: writing them would slow down what is measured
            wait(models.values(), max(0.0, self._ends - time.monotonic()))
        began, left = time.monotonic(), self._ends - time.monotonic()
        if left < LEAST_SECONDS:
            return Result(row.name, "not run", f"the {self._limit:g} s of the run are over")
        seconds = min(row.seconds, left)
        file = self._out / "row.json"
        file.unlink(missing_ok=True)
        places = {"json": str(file)}
        try:
            if row.model is not None:
                places["model"] = str(models[row.model].result())
        except Exception as error:  # noqa: BLE001 - a row that fails must not end the run
            return Result(row.name, "failed", f"its model cannot be written: {error}", time.monotonic() - began)
        command = [_filled(part, places) for part in row.command]
        status, output = self._execute(command, seconds - (time.monotonic() - began))
        result = Result(row.name, "done", seconds=time.monotonic() - began)
        if status is None:
            result.state, result.why = "cut", f"it took more than {seconds:.0f} s"
        elif status:
            last = [line.strip() for line in output.splitlines() if line.strip()][-SHOWN_LINES:]
            result.state, result.why = "failed", f"it ended with {status}: {' / '.join(last)}"
        try:
            result.figures = row.read(output, file)
        except Exception as error:  # noqa: BLE001 - what a program prints is not ours
            result.state, result.why = "failed", result.why or f"its figures cannot be read: {error!r}"
        file.unlink(missing_ok=True)
        return result

    def _execute(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Runs a program, and kills all its processes at the limit. Returns its status, None if it was cut, and its
        output.
        """
        with (self._out / "run.log").open("a+b") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            began = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | None = process.wait(max(seconds, 0.1))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # What it started must not compute beside the next row. Engines and peers are in sessions of their own.
                for each in [*descendants(process.pid), process.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(began)
            return status, log.read().decode(errors="replace")

    def _measure_power(self, result: Result) -> None:
        now = time.time()
        watts = self._meter.between(now - result.seconds, now)
        if watts:
            result.mean_watts, result.most_watts = sum(watts) / len(watts), max(watts)
        for figure in result.figures:
            if figure.began is not None and figure.ended is not None:
                drawn = self._meter.between(figure.began, figure.ended)
                figure.watts = sum(drawn) / len(drawn) if drawn else None

    def _write(self) -> None:
        data = {"facts": self._facts, "rows": [asdict(each) for each in self.results]}
        (self._out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
        (self._out / "results.md").write_text(self.table() + "\n")


@contextmanager
def _writers(rows: Sequence[Row], make: Callable[[Model], Path]) -> "Iterator[dict[Model, Future[Path]]]":
    pool = ThreadPoolExecutor(1)
    wanted = dict.fromkeys(row.model for row in rows if row.model is not None and row.absent is None)
    try:
        yield {model: pool.submit(make, model) for model in wanted}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def descendants(process: int) -> list[int]:
    """The processes that a process started, and those that these started."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = list(children.get(process, ()))
    for each in found:  # which grows meanwhile
        found += children.get(each, ())
    return found


def make_checkpoint(model: Model) -> Path:
    """The folder of a model."""
    from tests.bench.random_checkpoint import checkpoint

    return checkpoint(model.shape, model.form)


def _filled(part: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        part = part.replace(f"{{{name}}}", value)
    return part


def lines_of(result: Result) -> Iterator[str]:
    """What is printed of a row when it ends."""
    watts = "" if result.mean_watts is None else f", {result.mean_watts:.0f} W, {result.most_watts:.0f} at most"
    yield f"{result.name}: {result.state} after {result.seconds:.0f} s{watts}{result.why and f' ({result.why})'}"
    for each in result.figures:
        share = "" if each.share is None else f", {each.share:.0%} of the roofline"
        drawn = "" if each.watts is None else f", {each.watts:.0f} W"
        yield f"  {each.name}: {_number(each.value)} {each.unit}{share}{drawn}"


def cells_of(result: Result) -> Iterator[str]:
    """The lines of a row in the Markdown table."""
    if result.state != "done" or not result.figures:
        why = f"**{result.state}**{result.why and ': '}{result.why}".replace("|", "\\|")
        yield f"| {result.name} | {why} | | | {_whole(result.mean_watts)} |"
    for each in result.figures:
        share = "" if each.share is None else f"{each.share:.0%}"
        watts = _whole(result.mean_watts if each.watts is None else each.watts)
        yield f"| {result.name} | {each.name} | {_number(each.value)} {each.unit} | {share} | {watts} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _whole(watts: float | None) -> str:
    return "" if watts is None else f"{watts:.0f}"


def facts_of(device: str) -> dict[str, str]:
    """The machine and the versions that were measured. Programs are asked: this one takes no memory of a GPU."""
    gpu = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    asked = {"GPU, driver, power limit": gpu} if device == "cuda" else {}
    asked["commit"] = ["git", "describe", "--always", "--dirty"]
    found = {"device": device}
    for name, command in asked.items():
        with suppress(OSError, subprocess.CalledProcessError):
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name] = said.strip().partition("\n")[0]
    for name in ("torch", "triton", "transformers", "flashinfer-python"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    from tests.bench.gpu_rows import TINY, peer_rows, rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".run/gpu"), metavar="FOLDER", help="where results go")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows whose names contain it")
    parser.add_argument("--peer", choices=("vllm",), help="measure this peer")
    parser.add_argument("--peer-python", type=Path, metavar="FILE", help="the interpreter of its environment")
    parser.add_argument("--peer-absent", default=None, metavar="WHY", help="it is not there")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short loads, to try the rows themselves")
    options = parser.parse_args()
    shapes = {"small": TINY, "large": TINY, "scale": 0.01} if options.tiny else {}
    if options.peer:
        made = peer_rows(options.device, options.peer_python or Path(sys.executable), options.peer_absent, **shapes)
    else:
        made = rows(options.device, **shapes)
    if options.tiny:  # a CPU that others use, too, is in no hurry
        made = [replace(row, seconds=PATIENCE * row.seconds) for row in made]
    meter = PowerMeter(power_reader() if options.device == "cuda" else None)
    run = Run(options.out, seconds=options.seconds, facts=facts_of(options.device), meter=meter)
    run.run([row for row in made if options.only in row.name])
    meter.close()
    sys.exit(any(result.state in ("failed", "cut") for result in run.results))


if __name__ == "__main__":
    main()
