"""Which device an engine runs on. Knows no models."""

import torch

from quire_engine.models.errors import ModelError


def resolve_device(name: str) -> torch.device:
    """The device called ``cpu`` or ``cuda``, or for ``auto`` a GPU where there is one. Raises ``ModelError``."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelError("The device is set to cuda, and no GPU can be used here.")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu and name != "cpu" else torch.device("cpu")
