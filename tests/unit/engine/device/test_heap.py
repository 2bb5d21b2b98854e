"""The pages of a large block that is freed serve the next one, on every thread, and profiles still see them."""

import ctypes
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from quire_engine.device.host import MAX_KEPT_BLOCK, tune_malloc

# Page faults of a large block and of one after it, once the heap keeps memory or does not; on a thread or on the first.
FAULTS = """
import resource, sys, threading
import torch
from quire_engine.device.host import tune_malloc
from quire_engine.worker.memory import CpuMemory

tries, more = map(int, sys.argv[3:5])
sizes = [int(size) for size in sys.argv[5:]]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(size << 20, dtype=torch.uint8) for size in sizes]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    start = memory.used()
    peak = memory.peak_during(faults)
    again = [faults() for _ in range(tries)]
    settled = memory.peak_during(faults)
    for _ in range(more):
        faults()
    print(min(again), *(size - start for size in (peak, settled, memory.peak_during(faults))))

torch.set_num_threads(1)
memory = CpuMemory()
if sys.argv[1] == "keep":
    assert tune_malloc()
if sys.argv[2] == "first":
    measure()
else:
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
"""
MIB, PAGE = 1 << 20, 4096
SMALL, LARGE = (30, 12, 2, 30, 26), (100,)


def measured(keep: bool, thread: str, sizes: tuple[int, ...], tries: int = 20, more: int = 50) -> list[int]:
    """Faults of the blocks another time; their peak the first time, some times later, and ``more`` times later."""
    command = [sys.executable, "-c", FAULTS, "keep" if keep else "leave", thread, *map(str, (tries, more, *sizes))]
    # A size that is given stops glibc from learning others, which would depend on all that the process did before.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "131072"}
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return [int(number) for number in made.stdout.split()]


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the C library whose heap this is about")


@on_glibc
@pytest.mark.parametrize("thread", [pytest.param("first", marks=pytest.mark.soak), "another"])
def test_freed_blocks_serve_the_next_and_are_still_part_of_the_peak(thread: str) -> None:
    again, peak, settled, later = measured(True, thread, SMALL)
    assert again * PAGE < MIB
    assert 95 * MIB <= peak <= 130 * MIB
    assert settled <= 8 * peak, "holes, whose number depends on where small blocks lie among the large ones"
    assert later <= settled + MAX_KEPT_BLOCK, "what is kept is used again, fifty times"


@on_glibc
def test_very_large_blocks_are_given_back() -> None:
    again, peak, _, later = measured(True, "first", LARGE, 5, 10)
    assert again * PAGE > 5 * MIB, "huge pages are few"
    assert later <= peak + MIB


@on_glibc
def test_without_it_every_block_is_fresh() -> None:
    assert measured(False, "first", SMALL, 3, 0)[0] * PAGE > 5 * MIB


@pytest.mark.parametrize("answers", [{}, {-3: 0}, {-3: 1, -1: 0}])
def test_a_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch, answers: dict[int, int]) -> None:
    def load(name: str | None) -> SimpleNamespace:
        def mallopt(parameter: int, value: int) -> int:
            return answers.get(parameter, 1)

        return SimpleNamespace(mallopt=mallopt) if answers else SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not tune_malloc()
