"""Which device an engine runs on, and computing there. Knows no models."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from quire_engine.models.errors import ModelError, first_line


def resolve_device(name: str) -> torch.device:
    """The device called ``cpu`` or ``cuda``, or for ``auto`` a GPU where there is one. Raises ``ModelError``."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", _current_gpu())
    if name == "cuda":
        raise ModelError("The device is set to cuda, and no GPU can be used here.")
    return torch.device("cpu")


def _current_gpu() -> int:
    """Its number. This is the first call that needs the GPU, and fails where another process has it for itself."""
    try:
        number: int = torch.cuda.current_device()
    except RuntimeError as error:
        raise ModelError(f"The GPU cannot be used: {first_line(error)}; --device cpu does without.") from None
    return number


@contextmanager
def inference_on(device: torch.device) -> Iterator[None]:
    """Inference on ``device``. Each thread has a current GPU of its own, the first one unless it says otherwise, and
    some libraries launch their kernels there wherever their tensors are.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        yield
