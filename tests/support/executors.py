"""A ``TorchExecutor`` for a model folder, with settings by their names and pools in bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_engine.config import EngineArgs
from quire_engine.executor.torch_executor import TorchExecutor


def load_executor(
    folder: Path, *, swap_bytes: int, on_lost: Callable[[str], None] | None = None, **settings: Any
) -> TorchExecutor:
    """``settings`` are further ones of ``EngineArgs``, unchecked: a test may load with what a command line refuses."""
    changes = {"swap_space": swap_bytes / (1 << 30), **settings}
    return TorchExecutor.load(EngineArgs(model=folder).model_copy(update=changes), on_lost)
