"""Greedy output through the executor equals transformers' own, however the tokens are cut up and placed."""

import pytest
import torch
from quire_engine.executor.torch_executor import TorchExecutor

from tests.model.driver import Driver, Sequence
from tests.model.models import NAMES, OUTPUT_TOKENS, OWN, SmallModels, oracle_model
from tests.support.executors import load_executor

POOL = 4 << 20


def load(models: SmallModels, name: str, **settings: object) -> TorchExecutor:
    options = {"kv_cache_memory": POOL, "swap_bytes": POOL, "attention": "reference", **settings}
    return load_executor(models.folder(name), **options)


def sequences(models: SmallModels, count: int) -> list[Sequence]:
    return [Sequence(index, prompt, OUTPUT_TOKENS) for index, prompt in enumerate(models.prompts[:count])]


BACKENDS = [
    pytest.param(name, attention, marks=() if name in OWN[::3] or attention == "auto" else pytest.mark.soak)
    for name in NAMES
    for attention in ("reference", "auto")
]


@pytest.mark.parametrize(("model_name", "attention"), BACKENDS)
def test_output_is_transformers_own_under_random_chunks_blocks_and_swaps(
    small_models: SmallModels, model_name: str, attention: str
) -> None:
    executor = load(small_models, model_name, attention=attention)
    outputs = Driver(executor, seed=1, max_chunk=13).run(sequences(small_models, 8))
    assert outputs == small_models.outputs(model_name, range(8))


@pytest.mark.parametrize(("block_size", "max_chunk"), [(1, 5), (8, 1), (16, 1000), (32, 40)])
def test_output_does_not_depend_on_block_size_or_chunk_size(
    small_models: SmallModels, block_size: int, max_chunk: int
) -> None:
    executor = load(small_models, "mistral", block_size=block_size)
    outputs = Driver(executor, seed=block_size, max_chunk=max_chunk).run(sequences(small_models, 6))
    assert outputs == small_models.outputs("mistral", range(6))


def test_logits_are_close_to_transformers_own_for_every_token(small_models: SmallModels, model_name: str) -> None:
    executor = load(small_models, model_name)
    tokens = [token for prompt in small_models.prompts for token in prompt][:90]
    ours = _logits(executor, tokens)
    with torch.inference_mode():
        theirs = oracle_model(small_models.folder(model_name))(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def _logits(executor: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    """Logits of every prefix of ``tokens``, through the executor's own model and memory."""
    from tests.support.steps import KnownChunk, prepare

    capacity = executor.kv_cache_config
    count = (capacity.device_blocks - 1) // len(capacity.groups)
    first, *others = [
        list(range(1 + number * count, 1 + (number + 1) * count)) for number in range(len(capacity.groups))
    ]
    chunk = KnownChunk(0, tokens, 0, first, other_block_ids=others)
    batch = prepare([chunk], capacity.block_size, capacity.groups).model_input
    with torch.inference_mode():
        hidden = executor._worker.runner.forward(batch)
        return executor._worker.runner.logits(hidden, torch.arange(len(tokens)))


def test_bfloat16_runs_and_stays_near_float32(small_models: SmallModels) -> None:
    tokens = small_models.prompts[9]
    exact = _logits(load(small_models, "llama3"), tokens)
    rounded = _logits(load(small_models, "llama3", dtype="bfloat16"), tokens)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.1 * exact.norm()
