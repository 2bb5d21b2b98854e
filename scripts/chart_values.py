"""Writes what the comments in the chart's values.yaml say into the table of its README and into the descriptions of its
schema, and the engine's settings into the schema as a model's ``flags``.

Without arguments both files are written; with ``--check`` nothing is, and the status is 1 where one of them is stale.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel
from quire_engine.config import EngineConfig
from quire_proto.units import unit_metavar
from quire_router.config import Settings

CHART = Path(__file__).resolve().parent.parent / "charts" / "quire"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
_ENTRY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z0-9_./-]+):(?: +(?P<value>.*))?")
_LONGEST = 60
# Settings of the engine that are no flags of a model: they have a value of their own, or the chart decides them.
NOT_FLAGS = frozenset(
    {
        *("model", "served_model_name", "dtype", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size"),
        *("data_parallel_size", "data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port"),
        *("nnodes", "node_rank", "headless", "master_addr", "master_port", "node_addr", "dist_timeout"),
        *("host", "port", "metrics_port", "tls_cert", "tls_key", "tls_client_ca", "shutdown_delay", "shutdown_timeout"),
        *("engine_token_file", "insecure", "tls_optional"),
    }
)
# What is taken over from the settings' schema; a type beside an enumeration says nothing.
_BOUNDS = ("type", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

Schema = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """One entry of values.yaml: where it is, what is written there, and what its comment says."""

    path: tuple[str, ...]
    default: str
    comment: str
    line: int

    @property
    def name(self) -> str:
        """How people write it."""
        return ".".join(self.path)


class CommentError(ValueError):
    """A value without a comment."""


def read_values(text: str) -> list[Value]:
    """The entries of ``text`` that have a comment, in order. Raises ``CommentError`` for one without, unless it is a
    section of entries that have one, or a part of such an entry.
    """
    entries = list(_entries(text.splitlines()))
    described = {entry.path for entry in entries if entry.comment}
    sections = _sections(described)
    for entry in entries:
        parts_of = described & _above(entry.path)
        if not entry.comment and entry.path not in sections and not parts_of - sections:
            raise CommentError(f"values.yaml, line {entry.line}: {entry.name} has no comment")
    return [entry for entry in entries if entry.comment]


def _entries(lines: Sequence[str]) -> Iterator[Value]:
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
            continue
        if entry := _ENTRY.fullmatch(line):
            indent = len(entry["indent"])
            path = [*((depth, key) for depth, key in path if depth < indent), (indent, entry["key"])]
            default = entry["value"] or " ".join(_block(lines[number:], indent))
            yield Value(tuple(key for _, key in path), default, " ".join(comment), number)
        comment = []


def _block(lines: Sequence[str], indent: int) -> Iterator[str]:
    """The lines that are further in than ``indent``."""
    inside = takewhile(lambda line: not line.strip() or len(line) - len(line.lstrip()) > indent, lines)
    return (line.strip() for line in inside if line.strip() and not line.lstrip().startswith("#"))


def _above(path: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {path[:length] for length in range(1, len(path))}


def _sections(paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {above for path in paths for above in _above(path)}


def table(values: Sequence[Value]) -> str:
    """The values as Markdown, a table for each of the first level's sections."""
    lines: list[str] = []
    section = None
    sections = _sections(value.path for value in values)
    leaves = (value for value in values if value.path not in sections)
    for value in sorted(leaves, key=lambda value: len(value.path) > 1):
        title = value.path[0] if len(value.path) > 1 else "general"
        if title != section:
            section = title
            lines += _heading(section, values)
        text = value.comment.replace("|", "\\|")
        lines.append(f"| `{value.name}` | {_default(value)} | {text} |")
    return "\n".join(lines)


def _heading(section: str, values: Sequence[Value]) -> list[str]:
    about = [value.comment for value in values if value.path == (section,) and value.comment]
    return [
        "",
        f"### {section}",
        "",
        *(line for text in about for line in (text, "")),
        "| value | default | |",
        "|---|---|---|",
    ]


def _default(value: Value) -> str:
    return f"`{value.default}`" if len(value.default) <= _LONGEST else "see values.yaml"


def with_table(readme: str, values: Sequence[Value]) -> str:
    """``readme`` with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(values)}\n\n{END}{after}"


def with_descriptions(schema: Schema, values: Sequence[Value]) -> Schema:
    """``schema`` with each value's comment as its description. Raises ``CommentError`` for a value that it lacks."""
    for value in values:
        found = _find(schema, value.path)
        if found is None:
            raise CommentError(f"values.schema.json has no {value.name}")
        found["description"] = value.comment
    return schema


def _find(schema: Schema, path: Sequence[str]) -> Schema | None:
    found: Any = schema
    for key in path:
        while "$ref" in found and "properties" not in found:
            found = _follow(schema, found["$ref"])
        found = found.get("properties", {}).get(key)
        if found is None:
            return None
    return found if isinstance(found, dict) else None


def _follow(schema: Schema, reference: str) -> Any:
    found: Any = schema
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return found


def with_flags(schema: Schema) -> Schema:
    """``schema`` with all settings of the engine but ``NOT_FLAGS`` as the properties of a model's ``flags``: names in
    camel case, what they take, without null, and their help.
    """
    engine = EngineConfig.model_json_schema()
    schema["definitions"]["model"]["properties"]["flags"]["properties"] = {
        to_camel(name): {
            **_taken(setting, unit=unit_metavar(EngineConfig.model_fields[name])),
            "description": setting["description"],
        }
        for name, setting in engine["properties"].items()
        if name not in NOT_FLAGS
    }
    return schema


def with_units(schema: Schema) -> Schema:
    """``schema`` with the router's limits that have a unit as numbers or texts, such as 4MiB and 30s."""
    limits = schema["properties"]["router"]["properties"]["limits"]["properties"]
    for name, field in Settings.model_fields.items():
        if unit_metavar(field) and (limit := limits.get(to_camel(name))):
            limit["type"] = [*(kind for kind in limit["type"] if kind not in ("string", "null")), "string", "null"]
    return schema


def _taken(setting: Schema, *, unit: str | None) -> Schema:
    (kind,) = (kind for kind in setting.get("anyOf", [setting]) if kind.get("type") != "null")
    if "const" in kind or "enum" in kind:
        return {"enum": kind.get("enum") or [kind["const"]]}
    taken = {name: kind[name] for name in _BOUNDS if name in kind}
    if taken.get("type") == "array":
        taken["items"] = {"type": "string"}
    # A bound of a schema holds for numbers alone, so the engine checks those that have a unit.
    return {**taken, "type": [kind["type"], "string"]} if unit else taken


def main(arguments: Sequence[str]) -> int:
    """The command's status."""
    values = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    readme, schema = CHART / "README.md", CHART / "values.schema.json"
    described = with_descriptions(with_units(with_flags(json.loads(schema.read_text(encoding="utf-8")))), values)
    wanted = {
        readme: with_table(readme.read_text(encoding="utf-8"), values),
        schema: json.dumps(described, indent=2, ensure_ascii=False) + "\n",
    }
    stale = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is stale: run .venv/bin/python scripts/chart_values.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
