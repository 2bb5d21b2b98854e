"""Executors whose layers are read from disk, under test."""

import pytest
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.layers.streamed import StreamedLayer
from quire_engine.worker.model_runner import ModelRunner

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
GIB = 1 << 30


def gib_of(layers: float, size: int) -> float:
    """So many layers in memory, and a little more than that."""
    return (layers + 0.1) * size / GIB


def streamed_layers(executor: TorchExecutor) -> list[StreamedLayer]:
    """Those that are read from disk, on rank 0 if there are several."""
    runner = getattr(executor._runner, "_own_runner", executor._runner)
    assert isinstance(runner, ModelRunner)
    layers = runner._model._layers  # type: ignore[attr-defined]
    return [layer for layer in layers if isinstance(layer, StreamedLayer)]
