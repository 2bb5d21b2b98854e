"""Traces for tests: small ones that are made up in the public formats, and the public ones where somebody has them."""

import json
import os
import random
from datetime import datetime, timedelta
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("QUIRE_TRACES", Path(__file__).parents[3] / "shared/traces"))
START = datetime(2023, 11, 16, 18, 15, 46, 680590)


def public_trace(name: str) -> Path:
    """The file of a public trace; skips the test where it is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not here; QUIRE_TRACES names the folder that holds it")
    return path


def write_azure(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    """A CSV of (seconds, prompt tokens, output tokens)."""
    lines = [f"{_stamp(seconds)},{num_prompt},{num_output}" for seconds, num_prompt, num_output in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return path


def write_mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    """JSON lines of (milliseconds, prompt tokens, output tokens, prefix ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def random_rows(count: int, seed: int, seconds: float) -> list[tuple[float, int, int]]:
    """Arrivals at random times, with a few long prompts among many short ones."""
    generator = random.Random(seed)
    times = sorted(generator.uniform(0, seconds) for _ in range(count))
    lengths = [min(4000, int(generator.lognormvariate(5.5, 1.2)) + 1) for _ in times]
    return [(time, length, generator.randint(1, 120)) for time, length in zip(times, lengths, strict=True)]


def _stamp(seconds: float) -> str:
    """As Azure writes it, with seven digits after the point."""
    return f"{START + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S.%f}0"
