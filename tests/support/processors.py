"""Kernels compiled for each kind of processor that this one can run."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from quire_engine.kernels import bindings
from quire_engine.kernels.build import HEADERS
from quire_proto.folders import user_cache_folder

# Of the processors that there may be: what this one has, then ever less.
FORMS = ["native", "x86-64-v4", "x86-64-v3 -mavxvnni", "x86-64-v3", "x86-64 -mavx", "x86-64", "torch"]
FLAGS = {
    "x86-64-v4": "avx512bw",
    "x86-64-v3 -mavxvnni": "avx_vnni",
    "x86-64-v3": "avx2",
    "x86-64 -mavx": "avx",
    "x86-64": "sse2",
}


def compile_for(processor: str, source: str) -> ctypes.CDLL:
    """One source of the kernels compiled for one of ``FORMS``, by the first that asks: the others, in whatever process,
    find it in the user's cache. Skips the test where it cannot run.
    """
    compiler = shutil.which("c++")
    if platform.machine() != "x86_64" or FLAGS[processor] not in Path("/proc/cpuinfo").read_text() or not compiler:
        pytest.skip(f"no {processor} here")
    path = Path(bindings.__file__).parent / source
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", *f"-march={processor}".split()]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in (path, *HEADERS)) + str(flags).encode()).hexdigest()
    folder = user_cache_folder() / "tests" / f"{path.stem}{''.join(flags[5:])}"
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{digest[:16]}.so"
    with FileLock(folder / "lock"):
        if not output.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            part = folder / "part"
            subprocess.run([compiler, *flags, path, "-o", part], check=True, capture_output=True, timeout=120)
            part.rename(output)
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
