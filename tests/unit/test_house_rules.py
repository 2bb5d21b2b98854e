"""Rules of the house that a machine can check: who may import whom, and what nobody may use."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "proto/quire_proto", ROOT / "engine/quire_engine", ROOT / "router/quire_router"]
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def modules() -> Iterator[Path]:
    for source in SOURCES:
        yield from source.rglob("*.py")


def imported(script: str) -> set[str]:
    """Top-level names of all modules that are loaded after running ``script`` in a fresh interpreter."""
    code = f"{script}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_engines_pure_core_imports_neither_torch_nor_grpc() -> None:
    names = imported("import quire_engine.core, quire_engine.scheduling.scheduler, quire_engine.kv.memory")
    assert not names & {"torch", "grpc", "google", "transformers", "numpy", "opentelemetry"}


def test_the_engines_service_does_not_import_torch() -> None:
    assert "torch" not in imported("import quire_engine.service.server, quire_engine.config")


def test_the_router_never_imports_torch_or_transformers() -> None:
    names = imported(
        "import pkgutil, importlib, quire_router\n"
        "for m in pkgutil.walk_packages(quire_router.__path__, 'quire_router.'): importlib.import_module(m.name)"
    )
    assert not names & {"torch", "transformers", "quire_engine", "numpy"}


def test_placement_and_text_do_no_input_or_output() -> None:
    names = imported("import quire_router.placement.choose, quire_router.placement.view")
    assert not names & {"grpc", "redis", "asyncio", "fastapi", "uvicorn"}


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_evaluates_or_trusts_remote_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_IMPORTS
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN_IMPORTS
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "os.system"}
            for keyword in node.keywords:
                said = ast.unparse(keyword.value)
                assert (keyword.arg, said) not in {("trust_remote_code", "True"), ("shell", "True")}
