"""The memory limit of an engine, however it is set, and the memory that it uses."""

import gc
from pathlib import Path

import pytest
import torch
from quire_engine.errors import ModelError
from quire_engine.worker.memory import CpuMemory, CudaMemory, MemoryProfiler

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
V2, V1 = "0::/pod/main\n", "5:cpu,cpuacct:/pod/main\n4:memory:/pod/main\n0::/\n"
UNLIMITED_V1 = "9223372036854771712\n"
V2_FOLDER, V1_FOLDER = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def root(tmp: Path, files: dict[str, str], total: int = 16 * GIB, available: int = 12 * GIB) -> Path:
    meminfo = f"MemTotal: {total // KIB} kB\nMemFree: 5 kB\nMemAvailable: {available // KIB} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2}, None),
        ({"proc/self/cgroup": V2, f"{V2_FOLDER}/pod/main/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": V2, f"{V2_FOLDER}/pod/main/memory.max": "nonsense\n"}, None),
        ({"proc/self/cgroup": V2, f"{V2_FOLDER}/pod/main/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"proc/self/cgroup": V2, f"{V2_FOLDER}/pod/main/memory.max": f"{99 * GIB}\n"}, None),
        (
            {
                "proc/self/cgroup": V2,
                f"{V2_FOLDER}/pod/memory.max": f"{3 * GIB}\n",
                f"{V2_FOLDER}/pod/main/memory.max": "max\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": V2,
                f"{V2_FOLDER}/pod/memory.max": f"{3 * GIB}\n",
                f"{V2_FOLDER}/pod/main/memory.max": f"{5 * GIB}\n",
            },
            3 * GIB,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{V2_FOLDER}/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        ({"proc/self/cgroup": V1, f"{V1_FOLDER}/pod/main/memory.limit_in_bytes": UNLIMITED_V1}, None),
        ({"proc/self/cgroup": V1, f"{V1_FOLDER}/pod/main/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"proc/self/cgroup": V1, f"{V1_FOLDER}/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
    ],
)
def test_the_limit_is_that_of_the_container_where_it_has_one(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    memory = CpuMemory(root(tmp_path, files))
    assert memory.limit == (limit or 16 * GIB)
    assert memory.dedicated == (limit is not None)
    assert memory.source == ("the container's limit" if limit else "the machine's memory")


def test_available_is_the_rest_of_the_limit_or_of_the_machine(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": V2, f"{V2_FOLDER}/memory.max": f"{8 * GIB}\n"}
    roomy, tight = CpuMemory(root(tmp_path / "a", files)), CpuMemory(root(tmp_path / "b", files, available=GIB))
    assert roomy.available() == pytest.approx(8 * GIB - roomy.used(), abs=4 * MIB)
    assert tight.available() == GIB


# Large beside what else changes in a process meanwhile: garbage of other tests, threads of theirs, and pages of
# libraries, which the system maps with their first use and takes back when memory is short.
TOUCHED = 256 * MIB


def touch() -> torch.Tensor:
    return torch.ones(TOUCHED, dtype=torch.uint8)


def test_used_follows_what_the_process_touches() -> None:
    gc.collect()
    memory = CpuMemory()
    before = memory.used()
    touched = touch()
    assert memory.used() - before == pytest.approx(TOUCHED, rel=0.25)
    del touched
    assert memory.used() - before < TOUCHED / 4


def test_the_peak_includes_memory_that_was_freed() -> None:
    gc.collect()
    memory = CpuMemory()
    before = memory.used()
    assert memory.peak_during(touch) - before == pytest.approx(TOUCHED, rel=0.25)
    assert memory.used() - before < TOUCHED / 4


class FakeCuda:
    """A GPU of which others hold a part, and a cache that torch keeps."""

    def __init__(self, total: int, others: int) -> None:
        self.total, self.others, self.allocated, self.cached, self.most = total, others, 0, 0, 0
        self.driver = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.others - self.allocated - self.cached - self.driver, self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.allocated + self.cached

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.memory_reserved(device)

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self, device: torch.device) -> None: ...

    def compute(self, size: int, driver: int = 0) -> None:
        """Needs ``size`` bytes for a while; torch keeps them afterwards. The driver takes some that torch knows nothing
        of.
        """
        self.cached += size
        self.driver += driver
        self.most = max(self.most, self.allocated + self.cached)


def test_a_gpu_is_measured_from_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gpu = torch.device("cuda"), FakeCuda(total=80 * GIB, others=10 * GIB)
    for name in ("mem_get_info", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    memory = CudaMemory(device)
    assert (memory.limit, memory.dedicated, memory.used()) == (80 * GIB, True, 10 * GIB)
    gpu.allocated, gpu.cached = 20 * GIB, 3 * GIB
    assert memory.used() == 30 * GIB, "what torch only keeps can be had again"
    gpu.cached = 7 * GIB
    assert memory.peak_during(lambda: gpu.compute(5 * GIB)) == 35 * GIB
    assert memory.available() == 50 * GIB
    assert memory.peak_during(lambda: gpu.compute(5 * GIB, driver=GIB)) == 36 * GIB, "kernels and graphs are counted"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("no room"), "no room; lower --max-num-batched-tokens or --max-num-seqs."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "allocate memory; lower --max-num-batched-tokens"),
        (RuntimeError("Could not find nvcc"), "Could not find nvcc."),
    ],
)
def test_smaller_steps_are_advised_only_if_memory_is_short(error: Exception, said: str) -> None:
    def largest_step() -> None:
        raise error

    with pytest.raises(ModelError) as raised:
        MemoryProfiler(torch.device("cpu")).profile(largest_step)
    assert said in str(raised.value)
    assert ("--max-num-seqs" in str(raised.value)) == ("memory" in str(error) or isinstance(error, MemoryError))
