"""The kernel of experts makes what a loop over them makes, however they are held and divided; and a token goes to the
experts that softmax and topk of torch name.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint.config import MoEConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.kernels.bindings import library
from quire_engine.kernels.experts_kernel import ExpertsKernel, route
from quire_engine.kernels.ops import ClampedSwiGLU, silu_mul
from quire_engine.layers.mlp import ExpertLoop, Experts, GatedMLP, make_experts
from quire_engine.quantization.schemes import make_quantization
from quire_engine.worker.cpu_graph import capture

from tests.support.kernels import cpu_path

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
HIDDEN = 40
HELD = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")]


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def both_ways(
    held: tuple[str, str | None], count: int, inner: int, own: slice, rounds: bool = True, clamped: bool = False
) -> tuple[Experts, Experts]:
    """The same experts in the kernel and in a loop; with ``clamped`` as gpt-oss has them."""
    dtype, options = getattr(torch, held[0]), LoadOptions(ExecutorConfig(quantization=held[1], deterministic=True))  # type: ignore[arg-type]
    method, noise = make_quantization(options, dtype).linear, torch.Generator().manual_seed(count)
    shapes = (2 * inner, HIDDEN), (HIDDEN, inner)
    weights = [[torch.randn(shape, generator=noise).to(dtype) / 4 for _ in range(count)][own] for shape in shapes]
    config = MoEConfig(count, 1, inner, True, rounds, (True,), *((1.7, 0.5) if clamped else ()))
    biases = [[torch.randn(shape[0], generator=noise).to(dtype) for _ in range(count)][own] for shape in shapes]
    some = biases.__getitem__ if clamped else None
    kernel = make_experts(config, method, weights.__getitem__, own, dtype, biases=some)
    assert isinstance(kernel, ExpertsKernel)
    activation = ClampedSwiGLU(1.7, 0.5) if clamped else silu_mul
    layers = [
        [method.pack(each, bias if clamped else None) for each, bias in zip(*part, strict=True)]
        for part in zip(weights, biases, strict=True)
    ]
    parts = [GatedMLP(up, down, activation) for up, down in zip(*layers, strict=True)]
    return kernel, ExpertLoop(parts, own, count, round_weights=rounds)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_kernel_makes_what_a_loop_makes(data: st.DataObject) -> None:
    held, inner = data.draw(st.sampled_from(HELD)), data.draw(st.sampled_from([8, 20, 32, 64]))
    count, rounds = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    top, tokens = data.draw(st.integers(1, count)), data.draw(st.sampled_from([1, 2, 7, 50, 300]))
    first = data.draw(st.integers(0, count - 1))
    own = slice(first, data.draw(st.integers(first + 1, count)))
    kernel, loop = both_ways(held, count, inner, own, rounds, data.draw(st.booleans()))
    noise = torch.Generator().manual_seed(tokens)
    dtype = getattr(torch, held[0])
    states = torch.randn(tokens, HIDDEN + 3, generator=noise).to(dtype)[:, :HIDDEN]
    logits = torch.randn(tokens, count, generator=noise).to(dtype)
    weights, chosen = route(logits, top, normalise=False, round_weights=rounds)
    made, expected = kernel(states, weights, chosen), loop(states, weights, chosen)
    error = (made - expected).float().abs().max()
    assert error <= (1e-5 if dtype is torch.float32 else 2e-2) * max(1.0, float(expected.float().abs().max()))
    alone = [kernel(*(each[place : place + 1] for each in (states, weights, chosen))) for place in range(tokens)]
    assert torch.equal(torch.cat(alone), made), "neighbours change nothing"


@settings(deadline=None)
@given(st.integers(1, 130), st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_experts_are_those_of_softmax_and_topk(count: int, top: int, normalise: bool, dtype: torch.dtype) -> None:
    top = min(top, count)
    noise = torch.Generator().manual_seed(count)
    # All different in bf16 too, as torch does not say which of two equals it takes.
    logits = torch.stack([torch.randperm(count, generator=noise) for _ in range(20)]).to(dtype) / 8
    weights, chosen = route(logits, top, normalise=normalise, round_weights=True)
    with cpu_path("torch"):
        expected, wanted = route(logits, top, normalise=normalise, round_weights=True)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, expected, atol=0, rtol=1e-5 if dtype is torch.float32 else 1e-2)


def test_what_is_no_number_harms_its_own_token_alone() -> None:
    kernel, _ = both_ways(HELD[0], 6, 32, slice(0, 6))
    states, logits = torch.randn(3, HIDDEN), torch.randn(3, 6)
    good = kernel(states, *route(logits, 3, normalise=True, round_weights=True))
    logits[1], states[1] = torch.nan, torch.inf
    weights, chosen = route(logits, 3, normalise=True, round_weights=True)
    assert sorted(chosen[1].tolist()) == [0, 1, 2]
    made = kernel(states, weights, chosen)
    assert not made[1].isfinite().any()
    assert torch.equal(made[[0, 2]], good[[0, 2]])


def test_a_graph_routes_its_tokens_anew() -> None:
    kernel, _ = both_ways(HELD[0], 6, 20, slice(1, 5))
    states, logits = torch.randn(5, HIDDEN), torch.randn(5, 6)

    def work(states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return kernel(states, *route(logits, 2, normalise=True, round_weights=True))

    with torch.inference_mode():
        graph = capture(work, states, logits, tokens=2)
        for _ in range(3):
            states, logits = torch.randn(5, HIDDEN), torch.randn(5, 6)
            assert torch.equal(graph.replay(states, logits), work(states, logits))


def test_tensors_that_the_kernel_may_not_read_are_refused() -> None:
    kernel, _ = both_ways(HELD[0], 2, 32, slice(0, 2))
    states, weights, chosen = torch.randn(3, HIDDEN), torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    for wrong in ((states[:, 1:], weights, chosen), (states, weights[1:], chosen), (states, weights, chosen.int())):
        with pytest.raises(ValueError, match="is not"):
            kernel(*wrong)
