"""With ``--deterministic`` on a GPU, what is computed for a token depends on its sequence alone, bit for bit."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from quire_engine.attention.base import AttentionShape
from quire_engine.attention.flashinfer import FlashInferAttention
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels import ops as fused
from quire_engine.kernels.batch_invariant import batch_invariant_linear

from tests.model.engine import load, run
from tests.model.test_deterministic import NEEDLE, PARAMS, SCHEDULES, haystack
from tests.support.ragged_steps import LAYER, RaggedStep, beside, make_step

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPE = AttentionShape(16, 8, 128, 16, 128**-0.5)
LENGTH = 333


@pytest.mark.parametrize("window", [None, 50])
@torch.inference_mode()
def test_attention_of_a_token_is_the_same_in_every_batch_chunk_and_graph(gpu, window):
    backend = FlashInferAttention(SHAPE, gpu, BF16, deterministic=True)
    whole = make_step(SHAPE, [(LENGTH, 0)], BF16, 0).to(gpu)
    expected, kv = whole.run(backend, window)
    noise = random.Random(0)
    for tokens in (1, 2, 16, 17, 100, LENGTH):
        part = last_tokens(whole, kv, tokens)
        others = [
            make_step(SHAPE, [(noise.randint(1, 200), noise.randint(0, 900))], BF16, seed).to(gpu) for seed in range(5)
        ]
        place = noise.randint(0, len(others))
        before = sum(len(other.heads) for other in others[:place])
        step = beside(*others[:place], part, *others[place:])
        assert torch.equal(step.run(backend, window)[0][before : before + tokens], expected[-tokens:])
    graph = backend.for_graph(3, 200)
    step = beside(last_tokens(whole, kv, 1), make_step(SHAPE, [(1, 5), (1, 1500)], BF16, 1).to(gpu))
    assert torch.equal(step.run(graph, window)[0][:1], expected[-1:])


def last_tokens(whole: RaggedStep, kv: torch.Tensor, tokens: int) -> RaggedStep:
    """The last tokens of a sequence, when those before them are in its pages already."""
    batch = make_step(SHAPE, [(tokens, LENGTH - tokens)], BF16, 0).batch
    batch.page_ids = whole.batch.page_ids
    filled = whole.kv.clone()
    filled[:, LAYER] = kv[:, LAYER]
    return RaggedStep(SHAPE, batch, whole.heads[-tokens:], filled)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1024, 4096), (3072, 1024), (576, 49152), (100, 72)])
@torch.inference_mode()
def test_a_row_of_a_product_is_the_same_among_any_others(gpu, size, dtype):
    inputs, outputs = size
    x, weight, bias = (
        torch.randn(*each, device=gpu).to(dtype) for each in ((700, inputs), (outputs, inputs), (outputs,))
    )
    whole = batch_invariant_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, atol=0.02 * inputs**0.5, rtol=2e-2)
    for rows in (slice(0, 1), slice(5, 6), slice(699, 700), slice(0, 16), slice(3, 67), slice(1, 700)):
        assert torch.equal(batch_invariant_linear(x[rows], weight, bias), whole[rows])


@torch.inference_mode()
def test_a_row_of_a_norm_or_activation_is_the_same_among_any_others(gpu):
    x, weight = torch.randn(700, 1024, device=gpu).to(BF16), torch.randn(1024, device=gpu).to(BF16)
    heads, head_weight = torch.randn(700, 32, 128, device=gpu).to(BF16), torch.randn(128, device=gpu).to(BF16)
    angles = torch.randn(700, 64, device=gpu)
    operations = (
        lambda rows: fused.rms_norm(x[rows], weight, 1e-6),
        lambda rows: fused.add_rms_norm(x[rows].clone(), x[rows].flip(1).clone(), weight, 1e-6),
        lambda rows: fused.rms_norm(heads[rows, 16:24], head_weight, 1e-6),
        lambda rows: fused.silu_mul(x[rows]),
        lambda rows: norm_rotate(heads[rows], head_weight, angles[rows]),
    )
    for operation in operations:
        whole = operation(slice(0, 700))
        for rows in (slice(0, 1), slice(699, 700), slice(3, 67)):
            assert torch.equal(operation(rows), whole[rows])


def norm_rotate(heads: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    made = heads.clone()
    fused.norm_rotate(made, fused.HeadNorms(weight, weight, 24, 1e-6), angles.cos(), angles.sin())
    return made


@cache
def executor_of(folder: Path, blocks: int, host_blocks: int) -> TorchExecutor:
    return load(folder, blocks, host_blocks, "bfloat16", device="cuda", deterministic=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "mistral"])
def test_a_needle_is_the_same_in_every_haystack(model_folders, name, schedule):
    folder, (blocks, host_blocks, chunk, caching) = model_folders[name], SCHEDULES[schedule]
    alone = run(executor_of(folder, 400, 0), [NEEDLE], [PARAMS], prefix_caching=False).choices[0][0]
    for seed in range(3):
        prompts, params, place = haystack(seed)
        executor = executor_of(folder, blocks, host_blocks)
        made = run(executor, prompts, params, chunk=chunk, prefix_caching=caching, host_caching=host_blocks > 0)
        choice = made.choices[place][0]
        assert choice.token_ids == alone.token_ids
        assert choice.logprobs == alone.logprobs, "bit for bit"
