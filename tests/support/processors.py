"""Kernels compiled for each kind of processor that this one can run."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from quire_engine.kernels import bindings

# Of the processors that there may be: what this one has, then ever less.
FORMS = ["native", "x86-64-v4", "x86-64-v3 -mavxvnni", "x86-64-v3", "x86-64 -mavx", "x86-64", "torch"]
FLAGS = {
    "x86-64-v4": "avx512bw",
    "x86-64-v3 -mavxvnni": "avx_vnni",
    "x86-64-v3": "avx2",
    "x86-64 -mavx": "avx",
    "x86-64": "sse2",
}


def compile_for(processor: str, source: str, folder: Path) -> ctypes.CDLL:
    """One source of the kernels compiled for one of ``FORMS``. Skips the test where that cannot run."""
    compiler = shutil.which("c++")
    if platform.machine() != "x86_64" or FLAGS[processor] not in Path("/proc/cpuinfo").read_text() or not compiler:
        pytest.skip(f"no {processor} here")
    path, output = Path(bindings.__file__).parent / source, folder / "kernels.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", *f"-march={processor}".split()]
    subprocess.run([compiler, *flags, path, "-o", output], check=True, capture_output=True, timeout=120)
    loaded = ctypes.CDLL(str(output))
    bindings.declare(loaded)
    return loaded


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """So many threads of torch, until the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
