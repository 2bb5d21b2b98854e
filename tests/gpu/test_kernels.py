"""Triton's kernels on a GPU: draws as the CPU makes them, to the bit, and experts as their formula has it."""

import math

import numpy as np
import pytest
import torch
from quire_engine.kernels.fused_moe import FusedExperts
from quire_engine.sampling.metadata import SamplingMetadata
from quire_engine.sampling.sample_kernel import sample_rows
from quire_engine.sampling.sample_ops import finite_rows, sample
from quire_proto.sampling import SamplingParams

pytestmark = pytest.mark.gpu
NEEDS_FLASHINFER = False
STYLES = [
    *({"temperature": 0}, {}, {"temperature": 1e-40}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 300}),
    *({"min_p": 0.1}, {"top_p": 0.9}, {"top_p": 1e-9}),
    {"temperature": 1.7, "top_k": 40, "top_p": 0.5, "min_p": 0.01},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 50, 5000, 151_936])
@torch.inference_mode()
def test_draws_are_those_of_the_cpu_to_the_bit(gpu: torch.device, width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, width + 3, generator=torch.Generator().manual_seed(width)).mul_(3)[:, :width].to(dtype)
    logits[1] = logits[1].round()
    logits[2, :-1], logits[3, 0] = -math.inf, math.nan
    count = 3 * len(STYLES)
    rows = np.arange(count) % 3
    params = [SamplingParams(**STYLES[index // 3]) for index in range(count)]
    metadata = SamplingMetadata.from_params(params, range(count), range(count))
    made = sample_rows(logits.to(gpu), rows, metadata)
    assert made is not None, "there is no kernel"
    expected = sample(logits[rows].float(), metadata).tolist()
    assert made.token_ids.tolist() == expected
    assert sample(logits.to(gpu)[torch.from_numpy(rows).to(gpu)].float(), metadata).tolist() == expected
    assert made.finite.tolist() == finite_rows(logits).tolist()
    broken = sample_rows(logits.to(gpu), np.full(count, 3), metadata)
    assert broken is not None
    assert ((broken.token_ids >= 0) & (broken.token_ids < width)).all()


# Tokens, experts, experts of a token, the first one held, and how many are.
MIXTURES = [(1, 8, 2, 0, 8), (9, 7, 3, 2, 4), (40, 3, 3, 0, 3), (7, 6, 2, 4, 0), (700, 60, 4, 0, 60), (3, 8, 1, 6, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("size", [(256, 96), (100, 72)], ids=str)
@torch.inference_mode()
def test_experts_are_their_formula(
    gpu: torch.device, size: tuple[int, int], mixture: tuple[int, ...], dtype: torch.dtype
) -> None:
    (hidden, inner), (tokens, count, top, first, held) = size, mixture
    noise = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, hidden, generator=noise).to(gpu, dtype)
    gate_up = (torch.randn(count, 2 * inner, hidden, generator=noise) / hidden**0.5).to(gpu, dtype)
    down = (torch.randn(count, hidden, inner, generator=noise) / inner**0.5).to(gpu, dtype)
    weights, chosen = (each.to(gpu) for each in torch.randn(tokens, count, generator=noise).softmax(-1).topk(top))
    own = slice(first, first + held)
    few = FusedExperts(gate_up[own], down[own], first, count, round_weights=True, deterministic=True)
    many = FusedExperts(gate_up[own], down[own], first, count, round_weights=False, deterministic=False)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=gpu)
    for expert in range(count)[own]:
        gate, up = (states.double() @ gate_up[expert].double().T).split(inner, dim=1)
        output = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        expected += ((chosen == expert) * weights).sum(1, keepdim=True) * output
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for experts in (few, many):
        made = experts(states, weights, chosen).double()
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)
    whole = few(states, weights, chosen)
    for part in (slice(0, 1), slice(tokens // 2, tokens)):
        assert torch.equal(few(states[part], weights[part], chosen[part]), whole[part])
