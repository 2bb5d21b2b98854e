"""Decode steps as CUDA graphs make what they make without."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire_engine.config import EngineArgs
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.loader import read_model_config
from quire_engine.worker.cuda_graph import capture_sizes
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.model_runner import LoadedModel, ModelRunner, load_model_and_attention
from quire_proto.sampling import SamplingParams

from tests.model.engine import load, run
from tests.model.models import SmallModels
from tests.support.steps import PENDING, KnownChunk, prepare

pytestmark = pytest.mark.gpu
BLOCK_SIZE = 16
POOLS = CacheSizes(32 << 20, 0)
NAMES = ("llama3", "qwen2", "qwen3", "mistral", "qwen3-moe")


def parts_of(folder: Path, device: torch.device, *, deterministic: bool = False) -> LoadedModel:
    config = EngineArgs(
        model=folder,
        dtype="bfloat16",
        deterministic=deterministic,
        block_size=BLOCK_SIZE,
        attention="flashinfer",
        max_num_seqs=20,
    )
    return load_model_and_attention(config, read_model_config(folder), device)


def prefilled(runner: ModelRunner, lengths: list[int]) -> list[KnownChunk]:
    """The chunks of one token of sequences whose tokens before it are computed."""
    chunks, block = [], 1
    for id, length in enumerate(lengths):
        blocks = list(range(block, block + -(-length // BLOCK_SIZE)))
        block += len(blocks)
        tokens = [(7 * place + id) % 250 + 3 for place in range(length)]
        if length > 1:
            runner.forward(prepare([KnownChunk(id, tokens[:-1], 0, blocks)], BLOCK_SIZE).model_input)
        chunks.append(KnownChunk(id, tokens[-1:], length - 1, blocks))
    return chunks


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_graph_computes_what_the_step_computes_without(
    gpu: torch.device, model_folders: dict[str, Path], name: str, deterministic: bool
) -> None:
    parts = parts_of(model_folders[name], gpu, deterministic=deterministic)
    runner = ModelRunner(parts, POOLS)
    graphs, runner._cuda_graphs = runner._cuda_graphs, None
    assert graphs is not None, "nothing was recorded"
    chunks = prefilled(runner, [1, 2, 16, 17, 200, 33, 5, 90, 150, 60, 12, 100, 7, 31, 32, 48, 64, 65, 111, 128])
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20):
        batch = prepare(chunks[:count], BLOCK_SIZE).model_input
        runner._cuda_graphs = None
        expected = runner.forward(batch).clone()
        runner._cuda_graphs = graphs
        made = runner.forward(batch).clone()
        pending = batch.token_ids.to(gpu)
        hidden = [replace(chunk, token_ids=[PENDING]) for chunk in chunks[:count]]
        with_pending = runner.forward(prepare(hidden, BLOCK_SIZE).model_input, pending).clone()
        assert torch.equal(with_pending, made)
        if deterministic:
            assert torch.equal(made, expected)
        else:
            torch.testing.assert_close(made, expected, atol=6e-2, rtol=6e-2)
    runner.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_makes_the_same_tokens_with_graphs_and_without(
    model_folders: dict[str, Path], small_models: SmallModels, name: str
) -> None:
    params, made = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True), []
    for enforce_eager in (False, True):
        executor: TorchExecutor = load(
            *(model_folders[name], 200, 0, "bfloat16"), device="cuda", deterministic=True, enforce_eager=enforce_eager
        )
        assert (executor._worker.runner._cuda_graphs is None) == enforce_eager
        prompts = small_models.prompts
        made.append(run(executor, prompts, [params] * len(prompts), chunk=64, max_num_seqs=13).choices)
        executor.close()
    assert made[0] == made[1]


def test_graphs_take_little_more_memory_than_the_largest_of_them(
    gpu: torch.device, model_folders: dict[str, Path]
) -> None:
    parts = parts_of(model_folders["llama3"], gpu)
    taken = []
    for sizes in ((256,), capture_sizes(256)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        runner = ModelRunner(replace(parts, graph_sizes=sizes), POOLS)
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)
        runner.close()
        del runner
    assert taken[1] <= 2 * taken[0]
