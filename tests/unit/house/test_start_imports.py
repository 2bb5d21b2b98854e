"""What engine and router import until they serve with default settings: nothing that only other settings need. Most of
a start is imports, in processor time that a busy node does not have.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "demo" / "model"
# Both commands up to where their ports are opened.
ENGINE = """
from quire_engine import cli

def tell(*arguments, **options):
    print(*sys.modules)
    raise SystemExit

cli.EngineServer = tell
cli.main()
"""
ROUTER = """
import signal
from quire_router import app, main

async def tell(router):
    print(*sys.modules)
    raise SystemExit

app.Router.run = tell
main.main()
"""
FLAGS = {
    ENGINE: ("--model", str(MODEL), "--kv-cache-memory", str(8 << 20), "--swap-space", "0"),
    ROUTER: ("--model", f"demo={MODEL}", "--engine", "127.0.0.1:9"),
}
HEAVY_OF_BOTH = {
    "opentelemetry.exporter",  # with OTEL_EXPORTER_OTLP_ENDPOINT
    "opentelemetry.sdk",
    "kubernetes",
    "cryptography",
    "matplotlib",
    "huggingface_hub",
    "transformers",  # for models that run through it
    "pandas",
    "scipy",
}
HEAVY = {
    ENGINE: HEAVY_OF_BOTH
    | {
        "torch._dynamo",  # for compiling models, which nothing here does
        "torch._inductor",
        "sympy",
        "triton",  # on a GPU
        "flashinfer",
        "llguidance",  # with the first grammar
        "jinja2",  # the router's
        "quire_engine.llm",
        "quire_engine.simulation",
        "quire_engine.bench",
    },
    ROUTER: HEAVY_OF_BOTH
    | {
        "torch",
        "redis",  # with --redis-url
        "sqlite3",  # with --journal-file
        "aiohttp",  # for Kubernetes, servers of others and OIDC
        "jwt",
        "zmq",
        "quire.envoy",  # with --picker-port
        "quire_router.picker",
        "quire.keda",  # with --keda-port and --scaling-port
        "quire_router.autoscale.external_metrics",
        "quire_router.simulation",
        "quire_router.workers",
    },
}


@pytest.mark.parametrize("script", [ENGINE, ROUTER], ids=["engine", "router"])
def test_a_start_with_default_settings_imports_nothing_heavy_that_it_does_not_use(script: str) -> None:
    names = modules_of(script)
    assert len(names) > 400  # it came as far as its ports
    assert not {name for name in names if is_heavy(name, HEAVY[script])}


def test_the_server_of_a_core_in_a_process_of_its_own_does_not_import_torch() -> None:
    names = modules_of(ENGINE, "--engine-core-process")
    assert "grpc" in names
    assert not {name for name in names if is_heavy(name, HEAVY[ENGINE] | {"torch"})}


def is_heavy(name: str, heavy: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in heavy)


def modules_of(script: str, *flags: str) -> set[str]:
    """The modules that a fresh interpreter has when the command of ``script`` opens its ports."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "OTEL_"))}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ports = ("--port", str(free_port()), "--metrics-port", str(free_port())) if script is ENGINE else ()
    command = [sys.executable, "-c", f"import sys\n{script}", *FLAGS[script], *ports, *flags]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**settings, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())
