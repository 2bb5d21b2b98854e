"""Says as JSON what torch finds here. Run as a program of its own, so that the command itself imports no torch:
``python torch_probe.py``.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def roots(*packages: str) -> Iterator[Path]:
    """The folders of the packages that are installed."""
    for package in packages:
        if (spec := find_spec(package)) is not None:
            yield from map(Path, spec.submodule_search_locations or ())


def main() -> None:
    """Prints the version, the CUDA that it was built for, the GPUs that it can use, and what FlashInfer has."""
    torch = import_module("torch")
    usable = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if usable else 0)]
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in gpus],
        "flashinfer": find_spec("flashinfer") is not None,
        "kernels": any(True for root in roots("flashinfer_jit_cache", "flashinfer") for _ in root.rglob("*.so")),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
