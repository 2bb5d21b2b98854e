"""Writes the schema of ``spec`` of a kind from its project's CustomResourceDefinition:
``python tests/kube/schemas/from_definition.py DEFINITION.yaml``. Descriptions, defaults, formats and rules in CEL are
left out, as nothing here reads them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_LEFT_OUT = ("description", "default", "format", "x-kubernetes-validations", "x-kubernetes-list", "x-kubernetes-map")


def reduced(schema: Any, *, is_schema: bool = True) -> Any:
    """``schema`` without what is left out. Names of fields stay, whatever they are."""
    if isinstance(schema, list):
        return [reduced(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: reduced(part, is_schema=not (is_schema and word == "properties"))
        for word, part in schema.items()
        if not (is_schema and word.startswith(_LEFT_OUT))
    }


def main(file: Path) -> None:
    definition = yaml.safe_load(file.read_text())["spec"]
    for version in definition["versions"]:
        if version["storage"]:
            folder = Path(__file__).parent / f"{definition['group']}_{version['name']}"
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
            text = json.dumps(reduced(spec), indent=1) + "\n"
            (folder / f"{definition['names']['kind']}.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
