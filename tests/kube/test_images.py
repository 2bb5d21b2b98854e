"""The Dockerfiles and compose.yaml: their contents, and their build steps as far as these run without Docker."""

import ctypes
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from quire_engine.config import EngineConfig
from quire_engine.kernels import build
from quire_proto.cli import read_settings, reject_unknown_env
from quire_proto.telemetry import Attribute
from quire_router.config import Settings

from tests.support.pages import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
# Stages that images are made of, the others being on the way there.
TARGETS = {"router.Dockerfile": ["router"], "engine.Dockerfile": ["cpu", "cuda"]}
EXACT = re.compile(r"[a-z0-9./-]+:\d+\.\d+\.\d+[a-z0-9.-]*")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:[+?-])((?:[^{}]|\$\{\w+\})*))?\}")


@dataclass
class Stage:
    """A stage of a Dockerfile: what it is built on, and its instructions in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def arguments_of(self, instruction: str) -> list[str]:
        return [text for kind, text in self.steps if kind == instruction]


def expand(text: str, values: dict[str, str]) -> str:
    """Fills in variables as Docker does."""

    def value(match: re.Match[str]) -> str:
        set_to = values.get(match[1], "")
        other = expand(match[3] or "", values)
        return {":+": other if set_to else "", ":-": set_to or other, ":?": set_to, None: set_to}[match[2]]

    return VARIABLE.sub(value, text)


def stages(path: Path) -> dict[str, Stage]:
    """By name, in their order."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        kind, _, text = line.strip().partition(" ")
        if kind == "FROM":
            base, _, name = text.partition(" AS ")
            found[name] = Stage(name, expand(base, arguments))
        elif kind == "ARG" and not found:
            name, _, default = text.partition("=")
            arguments[name] = default
        elif kind:
            list(found.values())[-1].steps.append((kind, text.strip()))
    return found


def line_of(path: Path, target: str) -> Iterator[Stage]:
    """A stage and those that it is built on, itself first."""
    by_name = stages(path)
    while target in by_name:
        yield by_name[target]
        target = by_name[target].base


def is_ignored(name: str) -> bool:
    """Whether .dockerignore keeps a path out: the last line that fits it, or a folder above it, counts."""
    ignored = False
    paths = [name, *(str(parent) for parent in Path(name).parents if str(parent) != ".")]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(fits(path, pattern) for path in paths):
            ignored = not line.startswith("!")
    return ignored


def fits(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in path.split("/"))
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


every = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
images = pytest.mark.parametrize(
    ("path", "target"), [(DOCKER / name, target) for name, targets in TARGETS.items() for target in targets]
)


@every
def test_stages_are_built_on_exact_tags_and_take_a_digest(path):
    own = stages(path)
    for stage in own.values():
        assert stage.base in own or EXACT.fullmatch(stage.base), stage.base
    text = path.read_text()
    assert "ARG BASE_DIGEST=\n" in text
    digest = "sha256:" + "0" * 64
    for base in re.findall(r"^FROM (\S*BASE\S*) ", text, re.MULTILINE):
        assert expand(base, {"BASE": "b:1", "BASE_DIGEST": digest}) == f"b:1@{digest}"


@every
def test_the_python_of_the_images_is_the_tested_one(path):
    (base,) = {stage.base for stage in stages(path).values()} - set(stages(path))
    version = base.partition(":")[2].split("-")[0]
    requirement = tomllib.loads((ROOT / "router/pyproject.toml").read_text())["project"]["requires-python"]
    assert version.split(".")[:2] == requirement.removeprefix(">=").split(".")


@every
def test_what_is_copied_exists_and_nothing_comes_from_elsewhere(path):
    for stage in stages(path).values():
        assert not stage.arguments_of("ADD")
        for text in stage.arguments_of("COPY"):
            *sources, _ = text.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages(path)
                continue
            for source in sources:
                assert (ROOT / source).exists()
                assert not is_ignored(source), source
        for text in stage.arguments_of("RUN"):
            assert not re.search(r"\b(curl|wget|git clone)\b|https?://", text)


def test_the_context_holds_the_packages_and_nothing_else():
    for name in ("proto/quire_proto/py.typed", "engine/quire_engine/kernels/attention.cpp", "engine/LICENSE"):
        assert not is_ignored(name)
    for name in (
        ".git/config",
        ".venv/bin/python",
        "demo/model/model.safetensors",
        "router/quire_router/__pycache__/x.pyc",
    ):
        assert is_ignored(name)
    assert is_ignored("engine/quire_engine/kernels/ahead/kernels-1-avx2.so")


@images
def test_an_image_runs_as_a_user_that_is_a_number_and_not_root(path, target):
    users = [user for stage in line_of(path, target) for user in stage.arguments_of("USER")]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[0])
    kinds = [kind for kind, _ in stages(path)[target].steps]
    assert "RUN" not in kinds[kinds.index("USER") :]


@images
def test_an_image_runs_as_any_user(path, target):
    """One that no file names has neither a home nor a name, and libraries ask for both; /tmp is everybody's."""
    line = list(line_of(path, target))
    variables = " ".join(text for stage in line for text in stage.arguments_of("ENV"))
    assert {"HOME=/tmp", "USER=quire"} <= set(variables.split())
    assert [folder for stage in line for folder in stage.arguments_of("WORKDIR")][-1] == "/tmp"
    copied = [text for stage in line for kind, text in stage.steps if kind in ("COPY", "ADD")]
    assert not any("--chown" in text or "--chmod" in text for text in copied)


@images
def test_an_image_has_labels_ports_a_command_and_no_health_check(path, target):
    line = list(line_of(path, target))
    labels = " ".join(text for stage in line for text in stage.arguments_of("LABEL"))
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels
    (command,) = [json.loads(text) for stage in line for text in stage.arguments_of("ENTRYPOINT")]
    assert command == [path.name.replace(".Dockerfile", "").join(("quire-", ""))]
    ports = {port for stage in line for text in stage.arguments_of("EXPOSE") for port in text.split()}
    assert ports >= ({"8000", "8001", "8002"} if "router" in path.name else {"9000", "9002"})
    assert not any(stage.arguments_of("HEALTHCHECK") for stage in line)


@images
def test_an_image_has_no_compiler_but_the_one_that_triton_needs(path, target):
    installed = " ".join(
        text for stage in line_of(path, target) for text in stage.arguments_of("RUN") if "apt-get" in text
    )
    assert bool(re.search(r"\b(gcc|g\+\+|clang|build-essential)(?!\w)", installed)) is (target == "cuda")
    removed = " ".join(text for stage in line_of(path, target) for text in stage.arguments_of("RUN"))
    assert "pip uninstall" in removed
    assert "-perm /6000 -exec chmod a-s" in removed


@pytest.mark.parametrize("distribution", ["proto", "engine", "router"])
def test_every_package_is_shipped(distribution):
    """An editable install, as the tests have it, would not show a missing package."""
    folder = ROOT / distribution
    tool = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("__init__.py")}
    if isinstance(tool["packages"], list):
        assert set(tool["packages"]) == {name for name in there if not name.startswith("build.")}
    else:
        (pattern,) = tool["packages"]["find"]["include"]
        assert all(fnmatch.fnmatchcase(name, pattern) for name in there)
        assert not [path for path in folder.rglob("*.py") if not (path.parent / "__init__.py").is_file()]


def test_nothing_that_the_router_needs_needs_torch():
    """Whatever pip would install for it, in the versions that are here."""
    wanted, met = ["quire-router", "kubernetes"], set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in met:
            met.add(name)
            for text in metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    wanted.append(requirement.name)
    assert {"quire-proto", "grpcio", "tokenizers"} <= met
    assert not met & {"torch", "transformers", "quire-engine", "triton"}
    assert not [name for name in met if name.startswith("nvidia")]


@pytest.mark.soak
def test_the_routers_install_steps_bring_the_router_and_no_torch(tmp_path):
    """Those of the Dockerfile's first stage, in a folder instead of an image."""
    source, wheels, environment = tmp_path / "src", tmp_path / "wheels", tmp_path / "quire"
    source.mkdir()
    build_stage = stages(DOCKER / "router.Dockerfile")["build"]
    for text in build_stage.arguments_of("COPY"):
        name, target = text.split()
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / target)
    for text in build_stage.arguments_of("RUN"):
        command = text.replace("/wheels", str(wheels)).replace("/opt/quire", str(environment))
        command = re.sub(r"\bpython -m", f"{shlex.quote(sys.executable)} -m", command)
        subprocess.run(["bash", "-euc", command], cwd=source, check=True, capture_output=True, text=True, timeout=280)
    python = environment / "bin" / "python"
    installed = {path.name.split("-")[0].lower() for path in environment.glob("lib/*/site-packages/*.dist-info")}
    assert {"quire_router", "quire_proto", "grpcio", "redis", "kubernetes"} <= installed
    assert not installed & {"torch", "transformers", "quire_engine", "triton", "pip", "setuptools"}
    assert not [name for name in installed if name.startswith("nvidia")]
    shown = subprocess.run(
        [environment / "bin" / "quire-router", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--engine" in shown.stdout
    everything = (
        "import importlib, pkgutil, quire_proto, quire_router\n"
        "for package in (quire_proto, quire_router):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if '.simulation.' not in module.name: importlib.import_module(module.name)"
    )
    subprocess.run([python, "-Ic", everything], cwd=tmp_path, capture_output=True, timeout=120, check=True)


# Kernels, compiled ahead.

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def ahead(tmp_path, monkeypatch) -> Path:
    """A folder of kernels for the two least kinds of processors: how they are found does not depend on what they do."""
    folder, source = tmp_path / "ahead", tmp_path / "small.cpp"
    source.write_text('extern "C" int quire_attention() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", [source])
    few = [level for level in build.levels_of("x86_64") if level.name in ("avx2", "x86-64")]
    monkeypatch.setattr(build, "AHEAD_FOLDER", folder)
    monkeypatch.setattr(build, "levels_of", lambda machine: few)
    build.compile_ahead()
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    return folder


@needs_compiler
@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_kernels_that_were_compiled_ahead_are_found_without_a_compiler(ahead, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_cpu_features", frozenset)
    least = build.shared_object()
    assert least.parent == ahead
    assert least.stem.endswith("-x86-64")
    assert ctypes.CDLL(str(least)).quire_attention
    monkeypatch.setattr(build, "_cpu_features", lambda: build.X86[-2].required_features | {"other"})
    assert build.shared_object().stem.endswith("-avx2")
    monkeypatch.setattr(build, "_source_text", lambda: b"other sources")
    with pytest.raises(build.BuildError):
        build.shared_object()
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache" / "quire").iterdir())


def test_the_best_level_comes_first_and_the_last_runs_everywhere():
    for machine in ("x86_64", "AMD64", "aarch64"):
        found = build.levels_of(machine)
        assert found[-1].runs_on(frozenset())
        for better, worse in itertools.pairwise(found):
            assert not better.required_features <= worse.required_features
        assert len({level.name for level in found}) == len(found)


@needs_compiler
@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize("level", build.X86, ids=lambda level: level.name)
def test_a_level_requires_every_instruction_set_that_its_code_may_use(level):
    """What the compiler turns on beyond plain x86-64, as Linux calls it."""

    def defined(flags: tuple[str, ...]) -> set[str]:
        command = ["c++", "-dM", "-E", "-x", "c++", "/dev/null", *flags]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        return {match.lower() for match in re.findall(r"__(AVX\w*|AMX_\w+|BMI2?|F16C|FMA|LZCNT|MOVBE)__ 1", lines)}

    named = {"lzcnt": "abm", "bmi": "bmi1", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    used = {named.get(name, name) for name in defined(level.flags) - defined(("-march=x86-64",))}
    assert used - {"avx"} <= level.required_features  # whatever has avx2 has avx


# One machine.


def environment_of(service: str, **given: str) -> dict[str, str]:
    """The variables of a service, where ``given`` are those of the user's environment."""
    return {name: expand(str(value), given) for name, value in COMPOSE["services"][service]["environment"].items()}


@pytest.mark.parametrize("given", [{}, {"QUIRE_API_KEY": "k" * 16}])
def test_the_settings_of_the_services_are_read_by_the_commands(given, monkeypatch, tmp_path):
    given = {"QUIRE_REDIS_PASSWORD": "secret", "QUIRE_ENGINE_TOKEN": "t" * 48, **given}
    for name, secret in COMPOSE["secrets"].items():
        (tmp_path / name).write_text(given[secret["environment"]])
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    for service in ("router", "engine"):
        for name, value in environment_of(service, **given).items():
            monkeypatch.setenv(name, value.replace("/run/secrets", str(tmp_path)))
    # In a container the engine listens on all addresses.
    monkeypatch.setenv("QUIRE_ENGINE_HOST", "0.0.0.0")
    reject_unknown_env(Settings)
    reject_unknown_env(EngineConfig)
    router, engine = read_settings(Settings, []), read_settings(EngineConfig, [])
    assert set(router.models) == set(engine.names)
    assert router.engine_token_file == engine.engine_token_file is not None
    assert router.redis_url is not None
    assert "secret" in router.redis_url.get_secret_value()
    assert len(router.api_key) == ("QUIRE_API_KEY" in given)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_pinned_hardened_and_reached_from_this_machine_only(name):
    service = COMPOSE["services"][name]
    assert EXACT.fullmatch(expand(service["image"], {}))
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for volume in service.get("volumes", ()):
        source = expand(volume, {}).partition(":")[0]
        assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), volume
    assert expand(service["mem_limit"], {})
    if "build" in service:
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize(("name", "settings"), [("router", Settings), ("engine", EngineConfig)])
def test_a_service_may_take_its_whole_drain_and_some_seconds_to_end(name, settings):
    drain = settings.model_fields["shutdown_delay"].default + settings.model_fields["shutdown_timeout"].default
    assert int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s")) >= drain + 10


def test_redis_has_a_password_persistence_no_eviction_and_memory_for_a_rewrite():
    service = COMPOSE["services"]["redis"]
    (command,) = service["command"]
    flags = dict(re.findall(r"--(\S+) (\S+)", command))
    assert "requirepass" in command
    assert (flags["appendonly"], flags["maxmemory-policy"]) == ("yes", "noeviction")
    assert f"redis:{flags['dir']}" in service["volumes"]
    bytes_of = {"mb": 2**20, "g": 2**30}
    limits = [re.fullmatch(r"(\d+)(\w+)", text) for text in (flags["maxmemory"], service["mem_limit"])]
    most, limit = (int(match[1]) * bytes_of[match[2]] for match in limits if match)
    assert limit >= 2 * most


def test_the_versions_of_images_are_the_packages():
    version = tomllib.loads((ROOT / "router/pyproject.toml").read_text())["project"]["version"]
    for path in DOCKERFILES:
        assert f"ARG VERSION={version}\n" in path.read_text()
    for name in ("router", "engine"):
        assert f"${{QUIRE_VERSION:-{version}}}" in COMPOSE["services"][name]["image"]


def test_the_collectors_pipelines_name_parts_that_there_are_and_attributes_that_spans_have():
    config = yaml.safe_load((ROOT / "k8s" / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
    policies = config["processors"]["tail_sampling"]["policies"]
    keys = {policy["numeric_attribute"]["key"] for policy in policies if policy["type"] == "numeric_attribute"}
    assert keys
    assert keys <= {value for name, value in vars(Attribute).items() if not name.startswith("_")}
