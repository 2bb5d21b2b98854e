"""Decode steps from CPU graphs are the steps themselves, bit for bit: tokens and log-probabilities, in every batch."""

from pathlib import Path

import pytest
import torch
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_linear import is_fast
from quire_engine.layers.mlp import GatedMLP
from quire_engine.worker import cpu_graph
from quire_engine.worker.cpu_graph import GraphKind
from quire_proto.sampling import SamplingParams

from tests.model.engine import Run, load, run
from tests.model.models import OWN, SmallModels
from tests.support.kernels import cpu_path
from tests.support.variants import one_in

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
# Outputs of all lengths, so that batches of all sizes come, and come again.
PARAMS = [SamplingParams(temperature=0, max_tokens=4 + 5 * place, logprobs=3, ignore_eos=True) for place in range(10)]


def outputs(executor: TorchExecutor, prompts: list[list[int]]) -> Run:
    return run(executor, prompts[: len(PARAMS)], PARAMS[: len(prompts)], chunk=32)


def captured(executor: TorchExecutor) -> set[GraphKind]:
    held = executor._worker.runner._cpu_graphs  # type: ignore[union-attr]
    return set() if held is None else {kind for kind, graph in held._graphs.items() if graph is not None}


POOLS = {"room": (200, 0), "swap": (18, 100)}


@pytest.mark.parametrize(("model_name", "dtype", "pools"), list(one_in(2, OWN, ("float32", "bfloat16"), list(POOLS))))
def test_graphs_change_nothing(small_models: SmallModels, model_name: str, dtype: str, pools: str) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts
    with_graphs, eager = (load(folder, *POOLS[pools], dtype, enforce_eager=each) for each in (False, True))
    expected = outputs(eager, prompts)
    for _ in range(2):  # captured, then replayed from the first step on
        made = outputs(with_graphs, prompts)
        assert made.choices == expected.choices
    # Where oneDNN multiplies, or torch, no graph can repeat that.
    kinds = {GraphKind.LAYERS, GraphKind.HEAD} if is_fast(getattr(torch, dtype)) else set()
    if model_name == "gemma3":
        kinds.discard(GraphKind.HEAD)  # its logits have a soft cap
    assert captured(with_graphs) == kinds
    assert not captured(eager)


def test_a_graph_grows_with_its_steps_and_larger_steps_do_without(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_graph, "ROOM", 8)
    monkeypatch.setattr(cpu_graph, "LARGEST_STEP", 24)
    folder, prompts = small_models.folder("llama3"), small_models.prompts
    with_graphs, eager = (load(folder, 200, 0, deterministic=True, enforce_eager=each) for each in (False, True))
    assert outputs(with_graphs, prompts).choices == outputs(eager, prompts).choices
    graphs = with_graphs._worker.runner._cpu_graphs._graphs  # type: ignore[union-attr]
    assert {kind: graph.capacity for kind, graph in graphs.items()} == {GraphKind.LAYERS: 24, GraphKind.HEAD: 8}


@pytest.mark.parametrize(("model_name", "settings"), [("gpt2", {}), ("llama3", {"attention": "reference"})])
def test_a_model_that_computes_with_more_than_kernels_runs_without_graphs(
    small_models: SmallModels, model_name: str, settings: dict[str, str]
) -> None:
    executor = load(small_models.folder(model_name), 200, 0, **settings)
    assert executor._worker.runner._cpu_graphs is None  # type: ignore[union-attr]


def test_without_kernels_there_are_no_graphs(small_models: SmallModels) -> None:
    with cpu_path("torch"):
        executor = load(small_models.folder("llama3"), 200, 0)
        assert executor._worker.runner._cpu_graphs is None  # type: ignore[union-attr]


def test_a_model_that_turns_out_not_to_be_capturable_runs_eagerly(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = small_models.folder("qwen3")
    prompts = small_models.prompts
    expected = outputs(load(folder, 200, 0, enforce_eager=True), prompts).choices
    monkeypatch.setattr(GatedMLP, "__call__", lambda mlp, x: mlp.down_proj(mlp._activated(x)) + 0)
    with_graphs = load(folder, 200, 0)
    assert outputs(with_graphs, prompts).choices == expected
    assert GraphKind.LAYERS not in captured(with_graphs)
