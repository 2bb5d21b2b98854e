"""Memory is what the machine or the container's limit leaves, and weights take what they are loaded as."""

from pathlib import Path

import pytest
import torch
from quire_cli.machine.gpus import visible_gpus
from quire_cli.machine.memory import available_memory, total_memory, weight_bytes
from safetensors.torch import save_file

MEMINFO = "MemTotal:  16777216 kB\nMemFree:  1048576 kB\nMemAvailable:  8388608 kB\n"
GIB = 1 << 30


def machine(root: Path, **cgroup: str) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pod\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    folder = root / "sys/fs/cgroup/pod"
    folder.mkdir(parents=True)
    for name, text in cgroup.items():
        (folder / f"memory.{name}").write_text(text)
    return root


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    root = machine(tmp_path, max="max\n")
    assert (available_memory(root), total_memory(root)) == (8 * GIB, 16 * GIB)


def test_a_limit_counts_without_what_caches_files(tmp_path: Path) -> None:
    stat = f"anon {GIB}\ninactive_file {GIB}\nactive_file 7\n"
    root = machine(tmp_path, max=str(4 * GIB), current=str(3 * GIB), stat=stat)
    assert (available_memory(root), total_memory(root)) == (2 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("dtype", "quantization", "per_weight"),
    [("auto", None, 2), ("float32", None, 4), ("auto", "int8", 1), ("auto", "int4", 0.5), ("float32", "int8", 1)],
)
def test_weights_take_what_they_are_loaded_as(
    tmp_path: Path, dtype: str, quantization: str | None, per_weight: float
) -> None:
    save_file({"w": torch.zeros(1000, 100, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"v": torch.zeros(1000, 100, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    estimate = weight_bytes(tmp_path, dtype, quantization)
    assert 200_000 * per_weight <= estimate <= 200_000 * per_weight * 1.2


def test_a_file_that_cannot_be_read_counts_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 999)
    assert weight_bytes(tmp_path) == 999


def test_gpus_are_those_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert visible_gpus(tmp_path) == ["0", "1"]
    for visible, names in (("1", ["1"]), ("", []), ("-1", []), ("1, 0", ["1", "0"]), ("GPU-8f", ["GPU-8f"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus(tmp_path) == names
