"""Executors whose layers are read from disk, or copied from the host's memory, under test."""

from pathlib import Path

import pytest
from quire_engine.core.lora import LoRARequest
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.layers.streamed import StreamedLayer, WeightFile
from quire_engine.worker.model_runner import ModelRunner

from tests.model.driver import Sequence
from tests.model.models import greedy_oracle
from tests.support.adapters import read_adapter, write_adapter, write_merged_model

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
GIB = 1 << 30


def gib_of(layers: float, size: int) -> float:
    """So many layers in memory, and a little more than that."""
    return (layers + 0.1) * size / GIB


def streamed_layers(executor: TorchExecutor) -> list[StreamedLayer[WeightFile]]:
    """Those that are read from disk, on rank 0 if there are several."""
    runner = executor._worker.runner
    assert isinstance(runner, ModelRunner)
    layers = runner._model._stack.layers  # type: ignore[attr-defined]
    return [layer for layer in layers if isinstance(layer, StreamedLayer)]


def sequences_with_adapters(
    folder: Path, tmp: Path, prompts: list[list[int]], output_tokens: int
) -> tuple[list[Sequence], list[list[int]]]:
    """Sequences for the model and two adapters of it in turns, and what they make by transformers."""
    requests: list[LoRARequest | None] = [None]
    for number in (1, 2):
        adapter = write_adapter(tmp / str(number), folder, seed=number, rank=4 * number)
        digest = read_adapter(adapter, folder).digest
        requests.append(LoRARequest(str(number), number, adapter, digest))
    merged = [folder, *(write_merged_model(tmp / f"merged-{n}", folder, tmp / str(n)) for n in (1, 2))]
    sequences, wanted = [], []
    for index, prompt in enumerate(prompts):
        sequences.append(Sequence(index, prompt, output_tokens, lora=requests[index % 3]))
        wanted += greedy_oracle(merged[index % 3], [prompt], output_tokens)
    return sequences, wanted


WITH_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
"""The settings for them."""
