"""No module of the engine imports, by whatever way, one that imports it: every reader finds the bottom. Imports for
type checkers count too.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import quire_engine

PACKAGES = {"quire_engine": Path(quire_engine.__file__).parent}


def modules(package: str, root: Path) -> dict[str, Path]:
    names = {path: ".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_others(package: str) -> None:
    known = modules(package, PACKAGES[package])
    graph = {name: {each for each in imported(path, known) if each in known} - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
