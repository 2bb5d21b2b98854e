"""``quire doctor`` says what there is, what is missing, and what to do."""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_cli.doctor import checks
from quire_cli.doctor.checks import CHECKS, Finding
from quire_cli.doctor.doctor_command import doctor
from quire_engine.kernels.build import BuildError

from tests.support.ports import free_port

TORCH = {"version": "2.13", "cuda": None, "gpus": [], "flashinfer": False, "kernels": False}
GPU = {"name": "H100", "bytes": 80 << 30}


def test_everything_is_checked_and_serving_works_here() -> None:
    command = [sys.executable, "-m", "quire_cli.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["can_serve"]) == (0, True)
    assert len(report["checks"]) == len({found["name"] for found in report["checks"]}) == len(CHECKS)
    [torch] = [found for found in report["checks"] if found["name"] == "torch"]
    assert torch["facts"]["version"]


@pytest.mark.parametrize(("status", "exit_status"), [("ok", 0), ("note", 0), ("missing", 1)])
def test_only_what_prevents_serving_is_a_failure(
    status: Any, exit_status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = (lambda: Finding("first", "ok", "fine"), lambda: Finding("second", status, "so so"))
    monkeypatch.setattr("quire_cli.doctor.doctor_command.CHECKS", found)
    with pytest.raises(SystemExit) as ended:
        doctor([])
    assert int(ended.value.code or 0) == exit_status
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("gpus", "torch", "status", "told"),
    [
        (0, {}, "ok", "models run on the CPU"),
        (2, {}, "note", "2 GPUs are here that it cannot use: install a build of torch for CUDA"),
        (2, {"cuda": "13.0"}, "note", "its driver may be too old"),
        (1, {"cuda": "13.0", "gpus": [GPU]}, "note", "H100 (80 GiB); without FlashInfer"),
        (
            1,
            {"cuda": "13.0", "gpus": [GPU], "flashinfer": True},
            "note",
            "no nvcc: flashinfer install-jit-cache",
        ),
        (1, {"cuda": "13.0", "gpus": [GPU], "flashinfer": True, "kernels": True}, "ok", "FlashInfer is installed"),
    ],
)
def test_a_gpu_needs_a_torch_that_can_use_it(
    gpus: int, torch: dict[str, Any], status: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(f"print({json.dumps(TORCH | torch)!r})")
    monkeypatch.setattr(checks.torch_probe, "__file__", str(probe))
    monkeypatch.setattr(checks, "visible_gpus", lambda: ["0"] * gpus)
    monkeypatch.setattr(checks, "find_nvcc", lambda: None)
    found = checks.check_torch()
    assert found.status == status
    assert told in found.text


def test_nvcc_is_found_where_flashinfer_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    assert checks.find_nvcc() == str(compiler)


def test_without_torch_nothing_can_be_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("import no_such_torch")
    monkeypatch.setattr(checks.torch_probe, "__file__", str(probe))
    found = checks.check_torch()
    assert found.status == "missing"
    assert "No module named 'no_such_torch'): pip install torch" in found.text


def test_packages_of_different_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version", lambda name: "0.2.0" if name == "quire-router" else "0.1.0")
    found = checks.check_packages()
    assert found.status == "missing"
    assert "quire-router 0.2.0, quire-engine 0.1.0" in found.text


def no_compiler() -> list[str]:
    raise BuildError("no C++ compiler was found")


@pytest.mark.parametrize(
    ("build", "compiler", "status", "told"),
    [
        (Path("kernels.so"), no_compiler, "ok", "kernels are ready"),
        (None, lambda: ["g++"], "ok", "the first engine compiles its kernels"),
        (None, no_compiler, "note", "the engine runs on torch alone, which is slower; install g++"),
    ],
)
def test_kernels_are_there_or_compiled_or_done_without(
    build: Path | None, compiler: Callable[[], list[str]], status: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_build", lambda: build)
    monkeypatch.setattr(checks, "find_compiler", compiler)
    found = checks.check_kernels()
    assert found.status == status
    assert told in found.text


@pytest.mark.parametrize(("gib", "status"), [(0.5, "missing"), (2, "note"), (16, "ok")])
def test_little_memory_is_said(gib: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: int(gib * (1 << 30)))
    assert checks.check_memory().status == status


def test_models_need_disk_where_the_hub_keeps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(checks, "GOOD_DISK", 0)
    found = checks.check_disk()
    assert (found.status, found.facts["folder"]) == ("ok", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(checks, "GOOD_DISK", 1 << 62)
    assert checks.check_disk().status == "note"


@pytest.mark.parametrize(
    ("hard", "status"), [(100, "missing"), (1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_said(hard: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (hard, hard))
    assert checks.check_files().status == status


def test_ports_in_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free, used = free_port(), free_port()
    monkeypatch.setattr(checks, "PORTS", {free: "REST", used: "gRPC"})
    assert checks.check_ports().status == "ok"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", used))
        taken.listen()
        found = checks.check_ports()
    assert (found.status, found.facts["in_use"]) == ("note", [used])
    assert f"{used} (gRPC)" in found.text
