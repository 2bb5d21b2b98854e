"""FlashInfer on a GPU against the reference on the same GPU, and its small kernels against their twins on the CPU."""

from functools import partial

import pytest
import torch
from quire_engine.attention.base import AttentionShape
from quire_engine.attention.flashinfer import FlashInferAttention
from quire_engine.attention.kv_rows import FP8
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.kernels import cuda_ops as cuda
from quire_engine.kernels import ops as fused

from tests.support.ragged_steps import RaggedStep, make_step

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TOLERANCES = {torch.float16: 4e-3, BF16: 3e-2}
# Qwen3-0.6B, Qwen2.5-0.5B, SmolLM2-135M, one KV head, and as many as heads.
SHAPES = [
    AttentionShape(heads, kv_heads, head_dim, 16, head_dim**-0.5)
    for heads, kv_heads, head_dim in ((16, 8, 128), (14, 2, 64), (9, 3, 64), (8, 1, 128), (4, 4, 256))
]
DECODE = [(1, past) for past in (0, 3, 15, 16, 500, 3000)]
PREFILL = [(tokens, 0) for tokens in (300, 1, 16, 17)]
MIXED = [(1, 77), (200, 100), (1, 0), (5, 1500), (33, 15)]
# FA3 computes what is long, on a Hopper GPU.
LONG = [(700, 0), (130, 3000), (1, 5)]
BEHIND_DECODES = [(1, 500), (1, 77), (900, 40), (200, 3000)]


def assert_agrees(step: RaggedStep, results: list[torch.Tensor], *windows: int | None) -> None:
    expected = step.run(ReferenceAttention(step.shape), *windows)
    for mine, reference in zip(results[::2], expected[::2], strict=True):
        tolerance = TOLERANCES[mine.dtype]
        torch.testing.assert_close(mine, reference, atol=tolerance, rtol=tolerance)
    for mine, reference in zip(results[1::2], expected[1::2], strict=True):
        assert torch.equal(mine.nan_to_num(7), reference.nan_to_num(7)), "keys and values are stored as they are"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_steps_are_as_the_reference_computes_them(gpu, shape, dtype, deterministic):
    backend = FlashInferAttention(shape, gpu, dtype, deterministic=deterministic)
    windows = (None, 100)
    for seed, lengths in enumerate((DECODE, PREFILL, MIXED, LONG, BEHIND_DECODES, DECODE)):
        step = make_step(shape, lengths, dtype, seed).to(gpu)
        assert_agrees(step, step.run(backend, *windows), *windows)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_steps_over_kv_memory_in_fp8_are_as_the_reference_computes_them(gpu, shape, dtype):
    backend = FlashInferAttention(shape, gpu, dtype, FP8)
    for seed, lengths in enumerate((DECODE, PREFILL, MIXED, DECODE)):
        step = make_step(shape, lengths, dtype, seed, kv_dtype=FP8).to(gpu)
        made, expected = step.run(backend, None, 100), step.run(ReferenceAttention(shape), None, 100)
        for mine, reference in zip(made[::2], expected[::2], strict=True):
            torch.testing.assert_close(mine, reference, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        for mine, reference in zip(made[1::2], expected[1::2], strict=True):
            assert torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@torch.inference_mode()
def test_steps_with_a_soft_cap_are_as_the_reference_computes_them(gpu, dtype):
    shape = AttentionShape(8, 4, 256, 16, 0.125, soft_cap=5.0)  # Gemma 2's heads, and a cap that is felt
    backend = FlashInferAttention(shape, gpu, dtype)
    for seed, lengths in enumerate((DECODE, PREFILL, MIXED)):
        step = make_step(shape, lengths, dtype, seed).to(gpu)
        assert_agrees(step, step.run(backend, None, 100), None, 100)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@torch.inference_mode()
def test_steps_with_sinks_are_as_the_reference_computes_them(gpu, dtype):
    shape = AttentionShape(64, 8, 64, 16, 0.125)  # gpt-oss
    sinks = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3).to(gpu, dtype)
    backend, reference = FlashInferAttention(shape, gpu, dtype), ReferenceAttention(shape)
    for seed, lengths in enumerate((DECODE, PREFILL, MIXED, DECODE)):
        step = make_step(shape, lengths, dtype, seed).to(gpu)
        for each in (backend, reference):
            each.prepare(step.batch)
        for window in (None, 100):
            made, expected = (step.forward(each, window, sinks)[0] for each in (backend, reference))
            torch.testing.assert_close(made, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("block_size", [1, 8, 32])
@torch.inference_mode()
def test_blocks_may_have_other_sizes(gpu, block_size):
    shape = AttentionShape(16, 8, 128, block_size, 0.1)
    step = make_step(shape, MIXED, BF16, 0).to(gpu)
    assert_agrees(step, step.run(FlashInferAttention(shape, gpu, BF16), None), None)


@torch.inference_mode()
def test_steps_may_follow_each_other_without_a_wait(gpu):
    shape = SHAPES[0]
    backend = FlashInferAttention(shape, gpu, BF16)
    steps = [make_step(shape, [(1, 7 * each), (1, 900 - 7 * each)], BF16, each).to(gpu) for each in range(40)]
    steps[0].run(backend, None)
    torch.cuda.synchronize()
    # The device falls behind, so that every plan but the first is made while those before it have not begun.
    torch.cuda._sleep(200_000_000)
    results = [step.run(backend, None) for step in steps]
    for step, result in zip(steps, results, strict=True):
        assert_agrees(step, result, None)


@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_a_graph_computes_whatever_was_prepared_last(gpu, deterministic):
    shape, windows, size = SHAPES[0], (None, 100), 8
    backend = FlashInferAttention(shape, gpu, BF16, deterministic=deterministic).for_graph(size, 512)
    room = make_step(shape, [(1, 0)] * size, BF16, 0).to(gpu)
    room.kv = torch.zeros((400, *room.kv.shape[1:]), dtype=BF16, device=gpu)
    room.run(backend, *windows)
    room.run(backend, *windows)
    parts, layer = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), room.kv[:, 1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [backend.forward(*room.heads.split(parts, dim=1), layer, window) for window in windows]
    for seed, lengths in enumerate((DECODE, DECODE[:2], [(1, 2000)] * 2)):
        step = make_step(shape, lengths, BF16, seed, pads=size - len(lengths)).to(gpu)
        backend.prepare(step.batch)
        room.heads.copy_(step.heads)
        room.kv[: len(step.kv)] = step.kv
        graph.replay()
        for window, mine in zip(windows, results, strict=True):
            expected = step.run(ReferenceAttention(shape), window)[0][: len(lengths)]
            torch.testing.assert_close(mine[: len(lengths)], expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 300])
@torch.inference_mode()
def test_small_kernels_are_their_twins(gpu, tokens, dtype):
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(tokens))
    assert_near = partial(torch.testing.assert_close, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    x, residual, weight = (noise(*size).to(dtype) for size in ((tokens, 1024), (tokens, 1024), (1024,)))
    on_gpu = [each.to(gpu) for each in (x, residual, weight)]
    assert_near(cuda.flashinfer_rms_norm(on_gpu[0], on_gpu[2], 1e-6).cpu(), fused.rms_norm(x, weight, 1e-6))
    normed = cuda.flashinfer_add_rms_norm(*on_gpu, 1e-6)
    assert_near(normed.cpu(), fused.add_rms_norm(x, residual, weight, 1e-6))
    assert_near(on_gpu[1].cpu(), residual)
    gate_up = noise(tokens, 6144).to(dtype)
    assert_near(cuda.flashinfer_silu_mul(gate_up.to(gpu)).cpu(), fused.silu_mul(gate_up))
    heads, weight = noise(tokens, 32, 128).to(dtype), noise(128).to(dtype)
    part = heads.to(gpu)[:, 16:24]
    assert_near(
        cuda.flashinfer_rms_norm(part, weight.to(gpu), 1e-6).cpu(), fused.rms_norm(heads[:, 16:24], weight, 1e-6)
    )
    angles = torch.outer(torch.arange(tokens).float() * 9, torch.rand(64))
    assert cuda.flashinfer_rotate(part, angles.cos().to(gpu), angles.sin().to(gpu))
    fused.rotate(heads[:, 16:24], angles.cos(), angles.sin())
    assert_near(part.cpu(), heads[:, 16:24])
    norms = fused.HeadNorms(weight, noise(128).to(dtype), 16, 1e-6)
    made = noise(tokens, 32, 128).to(dtype)
    expected, on_gpu = made.clone(), made.to(gpu)
    fused.norm_rotate(expected[:, :24], norms, angles.cos(), angles.sin())
    norms = fused.HeadNorms(norms.query.to(gpu), norms.key.to(gpu), 16, 1e-6)
    fused.norm_rotate(on_gpu[:, :24], norms, angles.cos().to(gpu), angles.sin().to(gpu))
    assert_near(on_gpu.cpu(), expected)
