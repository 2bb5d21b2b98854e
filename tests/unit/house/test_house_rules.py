"""Rules of the repository that a machine can check: allowed imports and forbidden functions."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = ("proto", "engine", "router", "cli")
SOURCES = [ROOT / name / f"quire_{name}" for name in DISTRIBUTIONS]
# The fleet simulator is engines and routers together, and needs the engine in all of its modules. They are imported by
# its door only, which says so where the engine is not installed.
SIMULATOR = ROOT / "router/quire_router/simulation"
SIMULATOR_DOOR = {SIMULATOR / "__init__.py", SIMULATOR / "main.py"}
# Triton's functions call each other as globals, so they are a module that cannot be imported without it.
TRITON_FUNCTIONS = ROOT / "engine/quire_engine/kernels/gumbel_argmax.py"
# Imported once the library for Kubernetes is known to be there.
KUBERNETES = ROOT / "router/quire_router/discovery/kubernetes.py"
# Imported where servers of vLLM publish KV events: ``--engine-kv-events-port`` looks for the libraries.
KV_EVENTS = tuple(
    ROOT / f"router/quire_router/engines/external/{name}.py" for name in ("kv_events", "kv_event_subscriber")
)
# Scripts that run in the environment of what they run, never in ours.
FOREIGN = ROOT / "engine/quire_engine/bench/peers"
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system"}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def modules() -> Iterator[Path]:
    for source in (*SOURCES, ROOT / "examples"):
        yield from source.rglob("*.py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> Sequence[ast.AST]:
    return tuple(ast.walk(tree_of(path)))


def imported(script: str) -> set[str]:
    """Top-level names of all modules that are loaded after running ``script`` in a fresh interpreter."""
    code = f"{script}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return set(run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).stdout.split())


def test_the_engines_pure_core_imports_neither_torch_nor_grpc() -> None:
    names = imported(
        "import quire_engine.core.engine_core, quire_engine.core.scheduler, quire_engine.core.kv_cache_manager"
    )
    assert not names & {"torch", "grpc", "google", "transformers", "numpy", "opentelemetry"}


def test_the_engines_service_does_not_import_torch() -> None:
    assert "torch" not in imported("import quire_engine.server.server, quire_engine.config")


def test_the_router_never_imports_torch_or_transformers() -> None:
    names = imported(
        "import pkgutil, importlib, quire_router\n"
        "for m in pkgutil.walk_packages(quire_router.__path__, 'quire_router.'):\n"
        "    if not m.name.startswith('quire_router.simulation.'): importlib.import_module(m.name)\n"
        "import quire_router.simulation.cli"
    )
    assert not names & {"torch", "transformers", "quire_engine"}


def test_the_command_imports_no_torch_and_measures_without_the_services() -> None:
    names = imported("import quire_cli.main, quire_cli.bench.serve, quire_cli.chat.chat_command")
    assert not names & {"torch", "transformers", "quire_engine", "quire_router", "grpc", "matplotlib"}
    assert not imported("import quire_cli.serve.serve_command") & {"torch", "transformers", "matplotlib"}


def test_the_simulator_needs_neither_torch_nor_what_only_its_plots_need() -> None:
    assert not imported("import quire_engine.simulation.command") & {"torch", "transformers", "matplotlib", "grpc"}
    assert not imported("import quire_router.simulation.command") & {"torch", "transformers", "matplotlib"}


def test_placement_and_text_do_no_input_or_output() -> None:
    names = imported("import quire_router.placement.placer")
    assert not names & {"grpc", "redis", "asyncio", "fastapi", "uvicorn"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_import_is_declared_and_every_dependency_used(distribution: str) -> None:
    declared, extras = requirements(distribution)
    used: set[str] = set()
    for path in own_modules(distribution):
        used |= imported_distributions(nodes_of(path), distribution)
    own = {"quire-proto"} if distribution == "proto" else set()
    assert used - own - extras == declared


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_what_only_an_extra_installs_is_imported_where_it_is_used(distribution: str) -> None:
    _, extras = requirements(distribution)
    for path in own_modules(distribution):
        if is_behind_a_door(path):
            continue
        needed = imported_distributions(tree_of(path).body, distribution)
        assert not needed & extras, f"{path.name} cannot be imported without an extra"


def own_modules(distribution: str) -> Iterator[Path]:
    for path in (ROOT / distribution).rglob("*.py"):
        if FOREIGN not in path.parents:
            yield path


def is_behind_a_door(path: Path) -> bool:
    return path in (TRITON_FUNCTIONS, KUBERNETES, *KV_EVENTS) or (
        SIMULATOR in path.parents and path not in SIMULATOR_DOOR
    )


def test_triton_functions_are_imported_by_name_where_they_are_used() -> None:
    for path in own_modules("engine"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if "gumbel_argmax" in line and line.lstrip().startswith(("import", "from"))]


def test_nothing_but_the_simulator_imports_the_simulator_or_the_engine() -> None:
    for path in own_modules("router"):
        names = set(imported_modules(nodes_of(path)))
        engine = any(name.partition(".")[0] == "quire_engine" for name in names)
        simulator = {name for name in names if name.startswith("quire_router.simulation")}
        if is_behind_a_door(path):
            assert not any(name.startswith("quire_engine.device.host") for name in names)
        else:
            assert not engine, f"{path.name} needs the engine"
            assert simulator <= {"quire_router.simulation.cli", "quire_router.simulation.command"}
            assert not simulator or path.name == "main.py"


def requirements(distribution: str) -> tuple[set[str], set[str]]:
    """What a distribution always needs, and what its extras add."""
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    optional = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
    declared, extras = (
        {re.split(r"[^A-Za-z0-9-]", entry)[0] for entry in entries} for entries in (project["dependencies"], optional)
    )
    return declared, extras


def imported_distributions(nodes: Iterable[ast.AST], distribution: str) -> set[str]:
    """Other distributions whose modules these nodes import."""
    packages = installed_packages()
    own = sys.stdlib_module_names | {f"quire_{distribution}"}
    names = (name for name in imported_modules(nodes) if name.partition(".")[0] not in own)
    return {distribution_of(name, packages) for name in names}


@cache
def installed_packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def distribution_of(module: str, packages: Mapping[str, list[str]]) -> str:
    """Which distribution a module is from; namespaces that several share are told apart by what follows, and what only
    a GPU needs is not installed.
    """
    shared = {
        "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-grpc",
        "opentelemetry.sdk": "opentelemetry-sdk",
        "opentelemetry": "opentelemetry-api",
        "google.protobuf": "protobuf",
        "quire_proto": "quire-proto",
        "quire": "quire-proto",
        "flashinfer": "flashinfer-python",
        "triton": "triton",
    }
    for prefix, name in shared.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return name
    (name,) = set(packages[module.partition(".")[0]])
    return name.lower().replace("_", "-")


def test_documents_hold_no_placeholders() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "demo/README.md"):
        assert not re.search(r"@[A-Z]+@", path.read_text()), f"{path.name} is not finished"


def test_nothing_unpickles_evaluates_or_trusts_remote_code() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in modules() for line in dangers(nodes_of(path))]
    assert not found


def dangers(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines of what unpickles, evaluates or trusts remote code."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if {name.partition(".")[0] for name in imported_modules([node])} & FORBIDDEN_IMPORTS:
                yield node.lineno
        elif isinstance(node, ast.Call):
            trusted = {keyword.arg for keyword in node.keywords if getattr(keyword.value, "value", None) is True}
            if trusted & {"trust_remote_code", "shell"} or ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "import json, pickle",
        "from joblib.memory import Memory",
        "eval('1')",
        "model = torch.load('weights.pt')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_what_unpickles_evaluates_or_trusts_remote_code_would_be_found(source: str) -> None:
    assert [*dangers(ast.walk(ast.parse(source)))] == [1]


SHORT_TASKS = {
    "proto/quire_proto/supervise.py": {"SupervisedTask.__init__"},  # where all others begin
    "router/quire_router/admission/redis_rate_limit.py": {"_with_timeout"},  # one question, within its time
    "router/quire_router/api/rest/http.py": {"HttpExchange.cancel_on_disconnect"},  # a request's
    "router/quire_router/api/fleet_feed.py": {"FleetFeed._start", "_Inspection.ask"},  # end with the last viewer
    "router/quire_router/api/rest/sse.py": {"SseStream._check_idle"},
    "router/quire_router/api/rpc/servicer.py": {"MessageStream.__aenter__"},  # a call's, which it ends with
    "router/quire_router/api/multi_prompt.py": {"_merged"},
    "router/quire_router/api/pooled_requests.py": {"pool_all"},  # a request's, which ends them
    "router/quire_router/autoscale/keda.py": {"Relay._relay"},  # a connection's
    "router/quire_router/autoscale/scaling_server.py": {"TlsServer._accept"},  # a handshake, within its time
    "router/quire_router/picker/server.py": {"_Stream.read_ahead"},  # a gateway's next message
    "router/quire_router/batches/worker.py": {  # a batch's, which the worker ends
        "BatchWorker.look",
        "BatchRun._while_leased",
        "BatchRun._run_missing_lines",
    },
    "router/quire_router/requests/resume.py": {"BackgroundRequests.run"},
    "router/quire_router/requests/shadow.py": {"ShadowRunner._begin"},
    "router/quire_router/engines/connection.py": {"EngineConnection._ask"},  # a question, which ends with its channel
    "router/quire_router/engines/engine_registry.py": {
        "EngineRegistry.remove_if_idle",  # closes a link
        "EngineRegistry._begin_probes",  # one question to each engine, within its time
    },
    "router/quire_router/engines/external/client.py": {"ExternalEngine.submit"},  # a request's, which it ends with
    "router/quire_router/engines/lora_updates.py": {"LoRAUpdater._watch"},  # an engine's, each call within its time
    "router/quire_router/engines/sleep_controller.py": {"SleepController._begin"},  # what an engine is asked for
    "router/quire_router/journal/buffered_journal.py": {"BufferedJournal.open_if_absent"},
    "router/quire_router/journal/redis/owner_channel.py": {"OwnerChannel._on_message"},  # an answer, within its time
    "router/quire_router/requests/dispatch.py": {"Dispatcher._wait"},
    "engine/quire_engine/llm/async_llm.py": {"AsyncLLM._stream"},  # a request's, which it ends with
    "engine/quire_engine/server/server_events.py": {"_first_completed"},
    "engine/quire_engine/server/servicer.py": {"EngineServicer.Session"},  # a stream's, which it ends where it fails
}
"""Where tasks begin that end by themselves, with a request or a connection, and tell what they raise."""


def test_every_task_that_lives_as_long_as_its_process_is_supervised() -> None:
    """Those of a ``TaskGroup`` are awaited by whoever opened it, who hears of what they raise."""
    for path in chain.from_iterable(map(own_modules, DISTRIBUTIONS)):
        found, name = set(beginners_of_tasks(tree_of(path).body)), str(path.relative_to(ROOT))
        assert found <= SHORT_TASKS.get(name, set()), f"{name}: begin it with supervise()"


def beginners_of_tasks(nodes: Iterable[ast.AST], within: str = "") -> Iterator[str]:
    """The functions that begin tasks outside of a ``TaskGroup``."""
    for node in nodes:
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{node.name}".lstrip(".")
        elif isinstance(node, ast.Call):
            owner, _, called = ast.unparse(node.func).rpartition(".")
            if called in {"create_task", "ensure_future"} and owner not in {"tasks", "serving", "sending"}:
                yield within
        yield from beginners_of_tasks(ast.iter_child_nodes(node), name)


ERROR_FILES = {
    "QuireError": {
        "router/quire_router/core/errors.py",
        "router/quire_router/journal/base.py",
    },  # which decodes
    "HttpError": {"router/quire_router/api/rest/http.py"},
}
"""Where the errors that the router's clients see are constructed. ``invalid`` and ``internal`` are called anywhere."""


@pytest.mark.parametrize("name", ERROR_FILES)
def test_the_errors_that_clients_of_the_router_see_are_constructed_in_one_file(name: str) -> None:
    found = {str(path.relative_to(ROOT)) for path in own_modules("router") if name in called_names(path)}
    assert found == ERROR_FILES[name]


def called_names(path: Path) -> set[str]:
    calls = (node.func for node in nodes_of(path) if isinstance(node, ast.Call))
    return {each.id for each in calls if isinstance(each, ast.Name)}


NAMES_THAT_REPEAT = {"__init__", "base", "config"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_module_has_the_name_of_another(distribution: str) -> None:
    names = Counter(path.stem for path in sources(distribution))
    assert not {name for name, count in names.items() if count > 1} - NAMES_THAT_REPEAT


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_class_has_the_name_of_another(distribution: str) -> None:
    names = Counter(
        node.name for path in sources(distribution) for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_nothing_is_loose_at_the_root_of_a_package(distribution: str) -> None:
    """But entry, configuration, wiring and errors; what both services must compute alike is proto's business."""
    allowed = {"__init__", "app", "background_jobs", "cli", "commands", "components", "config", "errors"}
    allowed |= {"factory", "main"}
    if distribution != "proto":
        assert {path.stem for path in (ROOT / distribution / f"quire_{distribution}").glob("*.py")} <= allowed


def sources(distribution: str) -> list[Path]:
    package = ROOT / distribution / f"quire_{distribution}"
    return [path for path in package.rglob("*.py") if FOREIGN not in path.parents]
