"""Which device an engine runs on, and computing there. Knows no models."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from quire_engine.models.errors import ModelError


def resolve_device(name: str) -> torch.device:
    """The device called ``cpu`` or ``cuda``, or for ``auto`` a GPU where there is one. Raises ``ModelError``."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelError("The device is set to cuda, and no GPU can be used here.")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu and name != "cpu" else torch.device("cpu")


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Inference on ``device``. Each thread has a current GPU of its own, the first one unless it says otherwise, and
    some libraries launch their kernels there wherever their tensors are.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        yield
