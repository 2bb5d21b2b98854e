"""Reads traces of requests in two public formats, Azure's and Mooncake's.

Traces have lengths instead of texts, so prompts are generated: from the row's number, or from the trace's hash ids of
prefix blocks. Prompts then share exactly the prefixes that the traced ones shared.
"""

import csv
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from quire_engine.simulation.simulated_executor import uniform

MOONCAKE_BLOCK = 512  # tokens per hash id
MOONCAKE_BUCKET = 3.0  # seconds to which timestamps are rounded
MAX_TOKENS = 1 << 24


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(Exception):
    """The file cannot be read as a trace. The text names the file, the line, and the expected contents."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its time in seconds since the first, and its lengths in tokens.

    Tokens ``[i * block, (i + 1) * block)`` of two prompts are equal if their ``prefix_ids[i]`` are. ``lora_name`` is
    the adapter's name; empty for none.
    """

    time: float
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...]
    block: int
    lora_name: str = ""

    def prompt(self, vocab_size: int) -> Sequence[int]:
        """Returns the prompt's token ids. A block repeats the digits of its id, so that blocks with different ids
        differ in their first two tokens.
        """
        tokens = array("i")
        for prefix_id in self.prefix_ids:
            length = min(self.block, self.num_prompt - len(tokens))
            digits = array("i", (prefix_id % vocab_size, prefix_id // vocab_size % vocab_size))
            tokens.extend((digits * (length // 2 + 1))[:length])
        return tokens


def read_trace(
    path: Path, *, start: int = 0, limit: int | None = None, rate: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """Returns the ``limit`` requests from row ``start`` on, in the order of their times. The first is at 0, and all
    arrive ``rate`` times as fast as in the trace. Raises ``TraceError``.

    A ``.jsonl`` file is read as Mooncake's, any other as Azure's. ``seed`` spreads the arrivals of a Mooncake trace
    within its buckets of 3 seconds. A row's time does not depend on which other rows are read.
    """
    stop = None if limit is None else start + limit
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = _mooncake(file, seed) if path.suffix == ".jsonl" else _azure(file)
            arrivals = sorted(islice(rows, start, stop), key=lambda arrival: arrival.time)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"{path} cannot be read: {reason}.") from error
    if not arrivals:
        raise TraceError(f"{path} holds no request from row {start} on.")
    first = arrivals[0].time
    return [replace(arrival, time=(arrival.time - first) / rate) for arrival in arrivals]


def _azure(file: TextIO) -> Iterator[Arrival]:
    """Yields rows of ``AZURE_COLUMNS``. Prefixes are unknown, so none is shared."""
    rows = csv.DictReader(file)
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(
            f"{file.name}, line 1: an Azure trace has the columns {','.join(AZURE_COLUMNS)}, and {', '.join(missing)} "
            f"is missing; a Mooncake trace is a file that ends in .jsonl."
        )
    for row, fields in enumerate(rows):
        try:
            time = datetime.fromisoformat(fields["TIMESTAMP"]).timestamp()
            num_prompt, num_output = int(fields["ContextTokens"]), int(fields["GeneratedTokens"])
            yield _arrival(time, num_prompt, num_output, (row,), max(1, num_prompt))
        except (TypeError, ValueError) as error:
            expected = "a row is a time (2023-11-16 18:17:03.979960), the prompt's tokens and the output's"
            raise TraceError(f"{file.name}, line {rows.line_num}: {expected}: {_reason(error)}.") from error


def _mooncake(file: TextIO, seed: int) -> Iterator[Arrival]:
    """Yields lines of JSON with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids``,
    and optionally ``lora_name`` for an adapter, which Mooncake's own traces do not have.
    """
    for row, line in enumerate(file):
        try:
            fields: dict[str, Any] = json.loads(line)
            missing = [name for name in MOONCAKE_KEYS if name not in fields]
            if missing or not isinstance(fields, dict):
                raise ValueError(f"it has no {', '.join(missing)}")
            time = fields["timestamp"] / 1000 + MOONCAKE_BUCKET * uniform(seed, row)
            num_prompt, num_output = int(fields["input_length"]), int(fields["output_length"])
            ids, lora_name = tuple(map(int, fields["hash_ids"])), str(fields.get("lora_name", ""))
            yield replace(_arrival(time, num_prompt, num_output, ids, MOONCAKE_BLOCK), lora_name=lora_name)
        except (TypeError, ValueError) as error:
            expected = f"a line is a JSON object with {', '.join(MOONCAKE_KEYS)}"
            raise TraceError(f"{file.name}, line {row + 1}: {expected}: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    """Returns what is wrong with a row, in the words of the error."""
    return "it is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)


def _arrival(time: float, num_prompt: int, num_output: int, prefix_ids: tuple[int, ...], block: int) -> Arrival:
    """Checks the values. Gives prompt and output at least one token each, as an engine needs."""
    if not (isfinite(time) and max(num_prompt, num_output) <= MAX_TOKENS):
        raise ValueError(f"a time must be finite and a length at most {MAX_TOKENS}")
    if len(prefix_ids) * block < num_prompt:
        raise ValueError(f"{len(prefix_ids)} blocks of {block} cannot hold {num_prompt} tokens")
    return Arrival(time, max(1, num_prompt), max(1, num_output), prefix_ids, block)
