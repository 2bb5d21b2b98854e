"""An engine takes as many threads as it has cores, whichever way the container limits them."""

import os
from pathlib import Path

import pytest
import torch
from quire_engine.device.accelerator import configure_threads
from quire_engine.device.host import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def root(tmp: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp


V2, V1 = "0::/pod/main\n", "5:cpu,cpuacct:/pod/main\n4:memory:/pod/main\n0::/\n"
V1_FOLDER = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": V2}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/main/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/main/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/main/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/main/cpu.max": "5000 100000\n"}, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/main/cpu.max": "9900000 100000\n"}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "nonsense\n"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_FOLDER}/cpu.cfs_quota_us": "-1\n",
                f"{V1_FOLDER}/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_FOLDER}/pod/main/cpu.cfs_quota_us": "250000\n",
                f"{V1_FOLDER}/pod/main/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": V1, f"{V1_FOLDER}/cpu.cfs_quota_us": "50000\n"}, 8),
    ],
)
def test_cores_are_those_of_the_quota_or_of_the_affinity_mask(
    tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(root(tmp_path, files)) == cores


@pytest.mark.parametrize(("decided", "threads"), [("3", 3), ("0", 5), ("many", 5), ("", 5)])
def test_a_decision_in_the_environment_counts_first(
    monkeypatch: pytest.MonkeyPatch, decided: str, threads: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", decided)
    monkeypatch.setattr("quire_engine.device.accelerator.usable_cores", lambda: 5)
    try:
        assert configure_threads() == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
