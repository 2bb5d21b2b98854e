"""The checks of ``quire doctor``. Each is a function that looks at one thing and returns a ``Finding``."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants
from quire_engine.device.host import usable_cores
from quire_engine.kernels.build import BuildError, best_level, find_build, find_compiler
from quire_proto.extras import install_command

from quire_cli.doctor import torch_probe
from quire_cli.machine.gpus import visible_gpus
from quire_cli.machine.memory import GIB, available_memory, total_memory
from quire_cli.machine.sockets import is_free

PACKAGES = ("quire-llm", "quire-router", "quire-engine", "quire-proto")
LEAST_PYTHON = (3, 11)
LEAST_MEMORY = 1 << 30  # bytes, for an engine without a model
GOOD_MEMORY = 4 << 30
LEAST_FILES = 512
GOOD_FILES = 4096
GOOD_DISK = 5 << 30  # bytes, for a model
PORTS = {8000: "REST", 8001: "gRPC", 8002: "metrics", 9000: "engine", 9002: "engine's metrics"}
_TORCH_TIMEOUT = 120.0  # seconds
Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """What a check found. ``note`` is something that could be better, with ``missing`` nothing can be served; ``text``
    says then what to do. ``facts`` are for programs.
    """

    name: str
    status: Status
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def check_python() -> Finding:
    """The interpreter and the system."""
    facts = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    text = f"{facts['python']} on {facts['system']} {facts['machine']}"
    if sys.version_info < LEAST_PYTHON or facts["system"] != "Linux":
        return Finding("python", "missing", f"{text}; Python 3.11 or newer on Linux is needed", facts)
    return Finding("python", "ok", text, facts)


def check_packages() -> Finding:
    """The distributions, which have to be of one version."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    # A checkout on PYTHONPATH has no metadata, so only what is there can disagree.
    versions = {text for text in found.values() if text}
    text = ", ".join(f"{name} {found[name] or 'not installed'}" for name in PACKAGES)
    if len(versions) > 1:
        return Finding("packages", "missing", f"{text}: install one version of all of them", found)
    return Finding("packages", "ok" if None not in found.values() else "note", text, found)


def check_torch() -> Finding:
    """Torch, and the GPUs that it can use."""
    command = [sys.executable, torch_probe.__file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("torch", "missing", f"it cannot be started: {error}")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("torch", "missing", f"it cannot be imported ({reason}): pip install torch")
    facts = json.loads(done.stdout)
    build = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built for CPUs"
    text = f"{facts['version']}, {build}"
    gpus = len(visible_gpus())
    facts["gpus_of_the_driver"] = gpus
    if not gpus:
        return Finding("torch", "ok", f"{text}; this machine has no NVIDIA GPU, so models run on the CPU", facts)
    if not facts["gpus"]:
        advice = "its driver may be too old" if facts["cuda"] else "install a build of torch for CUDA"
        return Finding("torch", "note", f"{text}; {gpus} GPUs are here that it cannot use: {advice}", facts)
    names = ", ".join(f"{gpu['name']} ({gpu['bytes'] / GIB:.0f} GiB)" for gpu in facts["gpus"])
    facts["nvcc"] = find_nvcc()
    if not facts["flashinfer"]:
        lacking = f"without FlashInfer attention is slow: {install_command('quire-engine', 'cuda')}"
    elif not (facts["kernels"] or facts["nvcc"]):
        lacking = "FlashInfer has no compiled kernels, and no nvcc: flashinfer install-jit-cache-wheel --mode minimal"
    else:
        return Finding("torch", "ok", f"{text}; {names}; FlashInfer is installed", facts)
    return Finding("torch", "note", f"{text}; {names}; {lacking}", facts)


def find_nvcc() -> str | None:
    """CUDA's compiler, where FlashInfer looks for it."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    named = [Path(home, "bin") for home in homes if home]
    folders = os.pathsep.join(map(str, (*named, os.environ.get("PATH", ""), "/usr/local/cuda/bin")))
    return shutil.which("nvcc", path=folders)


def check_kernels() -> Finding:
    """The processor, and the engine's kernels for it."""
    level = best_level().name
    facts: dict[str, Any] = {"level": level, "cores": usable_cores(), "architecture": platform.machine()}
    text = f"{facts['cores']} cores of {facts['architecture']}, level {level}"
    if build := find_build():
        return Finding("processor", "ok", f"{text}; kernels are ready", {**facts, "kernels": str(build)})
    try:
        compiler = find_compiler()[0]
    except BuildError:
        text = f"{text}; no kernels and no C++ compiler: the engine runs on torch alone, which is slower; install g++"
        return Finding("processor", "note", text, {**facts, "kernels": None, "compiler": None})
    text = f"{text}; the first engine compiles its kernels, in 15 seconds to a minute"
    return Finding("processor", "ok", text, {**facts, "kernels": None, "compiler": compiler})


def check_memory() -> Finding:
    """Memory, within the limits of the container."""
    total, available = total_memory(), available_memory()
    facts = {"total": total, "available": available}
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < LEAST_MEMORY:
        return Finding(
            "memory", "missing", f"{text}; an engine needs {LEAST_MEMORY / GIB:.0f} GiB without a model", facts
        )
    if available < GOOD_MEMORY:
        return Finding("memory", "note", f"{text}, which is enough for small models only", facts)
    return Finding("memory", "ok", text, facts)


def check_disk() -> Finding:
    """Room where models from the Hugging Face Hub are kept."""
    folder = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    facts = {"folder": str(folder), "free": free, "writable": os.access(existing, os.W_OK)}
    text = f"{free / GIB:.1f} GiB free for models in {folder}"
    if not facts["writable"]:
        return Finding("disk", "note", f"{text}, which cannot be written: HF_HOME names another folder", facts)
    if free < GOOD_DISK:
        return Finding("disk", "note", f"{text}, which few models fit into: HF_HOME names another folder", facts)
    return Finding("disk", "ok", text, facts)


def check_files() -> Finding:
    """How many files and connections a process may have open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    facts = {"limit": None if unlimited else hard}
    text = "no limit" if unlimited else f"{hard} for each process"
    if not unlimited and hard < LEAST_FILES:
        return Finding(
            "open files", "missing", f"{text}; the router needs {LEAST_FILES}: raise it with ulimit -Hn", facts
        )
    if not unlimited and hard < GOOD_FILES:
        text = f"{text}, which limits the connections of clients: raise it with ulimit -Hn"
        return Finding("open files", "note", text, facts)
    return Finding("open files", "ok", text, facts)


def check_ports() -> Finding:
    """The usual ports; others are found where they are in use."""
    used = [port for port in PORTS if not is_free(port)]
    facts = {"in_use": used}
    if not used:
        return Finding("ports", "ok", f"{', '.join(map(str, PORTS))} are free", facts)
    names = ", ".join(f"{port} ({PORTS[port]})" for port in used)
    return Finding("ports", "note", f"in use: {names}; quire serve takes others, or --port chooses", facts)


def check_redis() -> Finding:
    """Redis, which one machine does not need."""
    found = shutil.which("redis-server")
    text = found or "not installed, and not needed on one machine; several routers share their state in it"
    return Finding("redis", "ok", text, {"server": found})


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_kernels,
    check_torch,
    check_memory,
    check_disk,
    check_files,
    check_ports,
    check_redis,
)
