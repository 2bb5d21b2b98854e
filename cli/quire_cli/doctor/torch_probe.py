"""Says as JSON what torch finds here. Run as a program of its own, so that the command itself imports no torch:
``python torch_probe.py``.
"""

import json
import sys
from importlib import import_module
from importlib.util import find_spec


def main() -> None:
    """Prints the version, the CUDA that it was built for, and the GPUs that it can use."""
    torch = import_module("torch")
    usable = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if usable else 0)]
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in gpus],
        "flashinfer": find_spec("flashinfer") is not None,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
