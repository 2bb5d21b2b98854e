"""The rows of `scripts/gpu_run.sh`, in order of value: what is run, how long it may take, and how figures are read.

The share of a copy is that of a plain copy of as many bytes; other shares are of the roofline.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.gpu_run import Figure, Model, Row

PYTHON = sys.executable
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
NAMES = {SMALL: "Qwen3-0.6B", LARGE: "Qwen3-8B"}
FORMS = {"bf16": "bf16", "fp8": "FP8", "int4": "INT4"}
TINY = json.dumps(
    {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
    }
)
# nano-vLLM's benchmark: 256 sequences of 100 to 1,024 tokens in, and as many out.
NANO_VLLM = (256, 100, 1024)


def rows(device: str, small: str = SMALL, large: str = LARGE, scale: float = 1.0) -> list[Row]:
    """All rows. ``small`` and ``large`` are shapes; ``scale`` shortens loads, to try the rows on a CPU."""
    tables = [
        table(shape, form, seconds, device=device, scale=scale)
        for form, times in (("bf16", (45, 80)), ("fp8", (35, 70)), ("int4", (35, 70)))
        for shape, seconds in zip((small, large), times, strict=True)
    ]
    return [
        Row("tests/gpu, short", tests(device), 100, read_pytest),
        *tables,
        nano_vllm(small, 60, device=device, scale=scale),
        profile(small, device=device, scale=scale),
        copies(device, scale),
        wake(small, device, scale),
    ]


def peer_rows(
    device: str, python: Path, absent: str | None, small: str = SMALL, large: str = LARGE, scale: float = 1.0
) -> list[Row]:
    """The rows that vLLM can run, with the interpreter of its environment."""
    flags = ("--system", "vllm", "--vllm-python", str(python))
    wanted = [(small, "bf16", 120), (large, "bf16", 150)]
    wanted += [(shape, form, 120) for form in ("fp8", "int4") for shape in (small, large)]
    made = [table(*each, *flags, device=device, scale=scale, absent=absent) for each in wanted]
    against = ("--against", "vllm", "--vllm-python", str(python))
    made.insert(1, nano_vllm(small, 180, *against, device=device, scale=scale, absent=absent))
    others = ("tests/gpu", "the profile", "swap and copy rates", "sleep and wake")
    return made + [Row(f"vLLM, {name}", (), 0, no_figures, absent="it is of Quire alone") for name in others]


def table(
    shape: str,
    form: str,
    seconds: float,
    *flags: str,
    device: str,
    scale: float,
    absent: str | None = None,
) -> Row:
    """Decode steps and prompts of one model."""
    command = [PYTHON, "-m", "tests.bench.step_table", "--model", "{model}", "--form", form, "--device", device]
    command += ["--json", "{json}", *flags]
    if scale < 1:
        command += ["--sequences", "1", "4", "--prompts", "64", "--steps", "8"]
    system = "vLLM, " if "vllm" in flags else ""
    name = f"{system}{NAMES.get(shape, 'a tiny model')}, {FORMS[form]}"
    return Row(name, command, seconds, read_json, Model(shape, form), absent)


def nano_vllm(shape: str, seconds: float, *flags: str, device: str, scale: float, absent: str | None = None) -> Row:
    """nano-vLLM's workload, offline."""
    count, least, most = (max(1, int(number * scale)) for number in NANO_VLLM)
    lengths = f"{least}..{most}"
    command = [PYTHON, "-m", "quire_engine.cli", "bench", "--model", "{model}", "--device", device, "--json", "{json}"]
    command += ["--measure", "throughput", "--num-prompts", str(count), "--input-len", lengths, "--output-len", lengths]
    command += ["--rounds", "1", "--warm-up-output-len", "8", "--max-model-len", "2304"]
    command += flags or ["--against", "none"]
    system = "vLLM, " if flags else ""
    return Row(f"{system}nano-vLLM's workload", command, seconds, read_bench, Model(shape, "bf16"), absent)


def profile(shape: str, *, device: str, scale: float) -> Row:
    """What a decode step of 256 sequences is made of."""
    sequences, steps = (256, 100) if scale == 1 else (4, 4)
    command = [PYTHON, "-m", "tests.bench.decode_step", "--model", "{model}", "--device", device]
    command += ["--sequences", str(sequences), "--steps", str(steps)]
    return Row(f"profile of {sequences} sequences", command, 45, read_profile, Model(shape, "bf16"))


def copies(device: str, scale: float) -> Row:
    """How fast blocks are swapped and copied."""
    command = [PYTHON, "-m", "tests.bench.gpu_copies", "--device", device, "--json", "{json}"]
    if scale < 1:
        command += ["--blocks", "8", "--layers", "2"]
    return Row("swap and copy rates", command, 25, read_json)


def wake(shape: str, device: str, scale: float) -> Row:
    """How long an engine takes to fall asleep and to be awake again."""
    command = [PYTHON, "-m", "tests.bench.wake", "--model", "{model}", "--device", device]
    command += ["--rounds", "3" if scale == 1 else "1"]
    return Row("sleep and wake", command, 60, read_wake, Model(shape, "bf16"))


def tests(device: str) -> Sequence[str]:
    """The short form of tests/gpu."""
    command = [PYTHON, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "--timeout", "60", "--short", "-vv"]
    return [*command, *(["--collect-only"] if device == "cpu" else [])]


def no_figures(_: str, __: Path) -> list[Figure]:
    """Of a row that is never run."""
    return []


def read_json(_: str, file: Path) -> list[Figure]:
    """The figures that the program wrote, none if it was cut before the first."""
    return [Figure(**each) for each in json.loads(file.read_text())] if file.is_file() else []


def read_bench(_: str, file: Path) -> list[Figure]:
    """The medians of ``quire-engine bench``, with the roofline's share of ours and of peers."""
    if not file.is_file():
        return []
    data: dict[str, Any] = json.loads(file.read_text())
    units, best, figures = data["units"], data["roofline"], []
    for system, readings in data["systems"].items():
        for name, value in readings["medians"].items():
            lower = units[name].startswith("ms")
            share = None if name not in best else best[name] / value if lower else value / best[name]
            figures.append(Figure(f"{system}, {name}", value, units[name], share))
    return figures


def read_pytest(output: str, _: Path) -> list[Figure]:
    """How many tests passed, failed and were skipped; of a run that was cut, until then."""
    ends = Counter(re.findall(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE))
    return [Figure(what.lower(), float(count), "tests") for what, count in ends.items()]


def read_profile(output: str, _: Path) -> list[Figure]:
    """The step, how long the GPU is busy in it, and the kernels that take longest."""
    patterns = {
        "step": (r"([\d.]+) ms a step,", "ms"),
        "the GPU is busy": (r"busy for ([\d.]+) ms", "ms a step"),
        "kernels": (r"with (\d+) kernels", "a step"),
    }
    figures = _find(output, patterns)
    for microseconds, name in re.findall(r"^ +([\d.]+) us in +[\d.]+  (.*)$", output, re.MULTILINE)[:8]:
        figures.append(Figure(name.replace("|", "/")[:60], float(microseconds), "us a step"))
    return figures


def read_wake(output: str, _: Path) -> list[Figure]:
    """The median until awake, and the last round's time until asleep."""
    patterns = {
        "asleep": (r"asleep after ([\d.]+) s", "s"),
        "awake": (r"^awake after ([\d.]+) s", "s"),
        "awake, at most": (r"^awake after [\d.]+ s, ([\d.]+) s at most", "s"),
    }
    return _find(output, patterns)


def _find(output: str, patterns: dict[str, tuple[str, str]]) -> list[Figure]:
    found = ((name, re.search(pattern, output, re.MULTILINE), unit) for name, (pattern, unit) in patterns.items())
    return [Figure(name, float(match[1].replace(",", "")), unit) for name, match, unit in found if match]
