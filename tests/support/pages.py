"""The tables of docs that say what the code says too: read, and written again by ``python -m tests.support.pages``."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings
from quire_cli import commands
from quire_engine.config import EngineConfig
from quire_engine.config.capabilities import DEVICES, EXCLUDES, NEEDS, OFFLINE, OTHER_BITS, REFERENCE_ON_CUDA, Feature
from quire_engine.config.capabilities import MODELS as MODEL_ROWS
from quire_engine.models.registry import ARCHITECTURES
from quire_router.config import Settings

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "configuration.md"
METRICS = ROOT / "docs" / "metrics.md"
COMMANDS: dict[str, type[BaseSettings]] = {"quire-router": Settings, "quire-engine": EngineConfig}
HEAD = ["| flag | default | |", "|---|---|---|"]
CLI = ROOT / "docs" / "cli.md"
CLI_HEAD = ["| command | |", "|---|---|"]
MODELS = ROOT / "docs" / "models.md"
MODELS_HEAD = ["| architecture | `model_type` | file in `quire_engine/models/` | GGUF |", "|---|---|---|---|"]
FEATURES_HEAD = [
    f"| flag | {' | '.join(row.name for row in (*MODEL_ROWS, *DEVICES.values()))} |",
    f"|---{'|---' * (len(MODEL_ROWS) + len(DEVICES))}|",
]
PAIRS_HEAD = ["| flag | | with | the engine says |", "|---|---|---|---|"]


def section(page: Path, heading: str) -> list[str]:
    """The lines under a heading of the second level."""
    lines = page.read_text().splitlines()
    begin = lines.index(f"## {heading}") + 1
    ends = (index for index, line in enumerate(lines) if index >= begin and line.startswith("## "))
    return lines[begin : next(ends, len(lines))]


def rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """The cells of each table row but the heads."""
    table = [line for line in lines if line.startswith("|")]
    for index, line in enumerate(table):
        is_head = line.startswith("|---") or (index + 1 < len(table) and table[index + 1].startswith("|---"))
        if not is_head:
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def flags_of(command: str) -> Iterator[list[str]]:
    """Each flag of a command as a row: its name, its default, and what it says."""
    for name, field in COMMANDS[command].model_fields.items():
        values = " ".join(f"`{value}`" for value in _choices(field.annotation))
        flag = f"`--{(field.alias or name).replace('_', '-')}`"
        yield [f"{flag}: {values}" if values else flag, _default(field), field.description or ""]


def _choices(annotation: Any) -> list[str]:
    """The words that a ``Literal``, or one that may be left out, allows."""
    parts = get_args(annotation)
    words = [part for part in parts if isinstance(part, str)]
    return words or [word for part in parts if str(part).startswith("typing.Literal") for word in get_args(part)]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return "–" if field.default in (None, []) else f"`{field.default}`"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def command_rows() -> Iterator[list[str]]:
    """Each command of ``quire`` as a row: what to type, with a link to what describes it, and what it does."""
    for command in commands.COMMANDS:
        yield [f"[`quire {command.usage}`]({command.more.removeprefix('cli.md')})", command.summary]


def model_rows() -> Iterator[list[str]]:
    """Each architecture with a native implementation as a row."""
    for name, own in ARCHITECTURES.items():
        yield [f"`{name}`", f"`{own.model_type}`", f"`{own.module}.py`", f"`{own.gguf}`" if own.gguf else "–"]


def feature_rows() -> Iterator[list[str]]:
    """Each feature that some models or devices refuse as a row, with which of them do."""
    columns = (*MODEL_ROWS, *DEVICES.values())
    for feature in Feature:
        if any(feature in column.refused for column in columns):
            yield [feature.value, *("refused" if feature in column.refused else "" for column in columns)]


def pair_rows() -> Iterator[list[str]]:
    """Each pair of features that exclude or need each other as a row, with the sentence that refuses it."""
    for feature in Feature:
        for other, sentence in EXCLUDES.get(feature, {}).items():
            yield [feature.value, "not", other.value, sentence]
        for other, sentence in NEEDS.get(feature, {}).items():
            yield [feature.value, "only", other.value, sentence]
    for row in (OTHER_BITS, REFERENCE_ON_CUDA, OFFLINE):
        for feature, sentence in row.refused.items():
            yield [feature.value, "not", row.name, sentence.format(bits=4, quantization="int8")]


def table_below(page: Path, head: Sequence[str]) -> list[str]:
    """The lines of the table of a page that begins with ``head``."""
    lines = page.read_text().splitlines()
    begin = lines.index(head[0])
    return lines[begin : lines.index("", begin)]


def _write_table(page: Path, head: Sequence[str], cells: Iterable[Iterable[str]]) -> None:
    lines = page.read_text().splitlines()
    begin = lines.index(head[0])
    page.write_text("\n".join([*lines[:begin], *head, *map(_line, cells), *lines[lines.index("", begin) :], ""]))


def write() -> None:
    """Writes the tables of commands, of models and of capabilities, and that under each service's heading, again."""
    _write_table(CLI, CLI_HEAD, command_rows())
    _write_table(MODELS, MODELS_HEAD, model_rows())
    _write_table(CONFIGURATION, FEATURES_HEAD, feature_rows())
    _write_table(CONFIGURATION, PAIRS_HEAD, pair_rows())
    for command in COMMANDS:
        lines = CONFIGURATION.read_text().splitlines()
        begin = lines.index(f"## `{command}`") + 2
        end = lines.index("", begin)
        table = [*HEAD, *map(_line, flags_of(command))]
        CONFIGURATION.write_text("\n".join([*lines[:begin], *table, *lines[end:], ""]))


if __name__ == "__main__":
    write()
