"""The compiled sampler draws, to the bit, what torch draws: on every kind of processor, by any number of threads."""

import ctypes
import math
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.kernels import build
from quire_engine.kernels.bindings import SampleCall, library
from quire_engine.sampling import sample_kernel
from quire_engine.sampling.metadata import SamplingMetadata, gumbel_noise
from quire_engine.sampling.sample_kernel import run_sample_kernel, sample_rows
from quire_engine.sampling.sample_ops import MIN_TEMPERATURE, TopCandidates, sample, sampling_threshold
from quire_proto.sampling import MAX_SEED, SamplingParams

from tests.support.sampling_inputs import KeepingSampler, make_output, run_step, some_logits

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
LEVELS = [level for level in build.levels_of(platform.machine()) if level.runs_on(build._cpu_features())]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 1.0, 1.7, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 500, 1024, 5000, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 0.95, 0.999999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 1e-9, 0.05, 0.7, 1.0]),
)


# Levels between the best one here and the two lowest add instructions that products use, and drawing does not.
BETWEEN = {level.name for level in LEVELS[1:-2]}


@pytest.fixture(
    scope="module",
    params=[pytest.param(level, id=level.name, marks=[pytest.mark.soak] * (level.name in BETWEEN)) for level in LEVELS],
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The sampler alone, compiled as an image has it for one level of processors."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    output = tmp_path_factory.mktemp("level") / "sample.so"
    source = next(path for path in build.SOURCES if path.name == "sample.cpp")
    build._run(["c++", *build._FLAGS, *request.param.flags, str(source), "-o", str(output)])
    loaded = ctypes.CDLL(str(output))
    loaded.quire_sample.argtypes, loaded.quire_sample.restype = (ctypes.POINTER(SampleCall),), None
    return loaded


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Draws:
    """What the kernel and torch must agree on, as bits."""

    token_ids: list[int]
    noisy: list[int]
    kept: list[list[bool]]


def bits(values: torch.Tensor) -> list[int]:
    return (values.float() + 0.0).view(torch.int32).tolist()


def scores_of(logits: torch.Tensor, rows: np.ndarray, metadata: SamplingMetadata) -> torch.Tensor:
    """As in ``sample_ops``, of all rows."""
    temperature = torch.from_numpy(metadata.temperature).clamp(min=MIN_TEMPERATURE)
    selected = logits[torch.from_numpy(rows)].float()
    return (selected - selected.amax(-1, keepdim=True)) / temperature[:, None]


def drawn_by_definition(logits: torch.Tensor, rows: np.ndarray, metadata: SamplingMetadata) -> Draws:
    """Every score sorted, noise for every token, and the first of the highest."""
    scores, (_, vocab_size) = scores_of(logits, rows, metadata), logits.shape
    on_cpu = metadata.to(torch.device("cpu"))
    top = TopCandidates.from_scores(scores, vocab_size)
    lowest, _ = sampling_threshold(scores, top, on_cpu.top_k, on_cpu.top_p, on_cpu.log_min_p)
    greedy = torch.from_numpy(metadata.is_greedy())[:, None]
    noise = gumbel_noise(on_cpu.keys, torch.arange(vocab_size, dtype=torch.int32)).masked_fill_(greedy, 0)
    noisy = (scores + noise).masked_fill_(~greedy & (scores < lowest), -math.inf)
    highest = noisy.amax(-1, keepdim=True)
    token_ids = [row.nonzero()[0].item() for row in noisy == highest]
    kept = (greedy & (scores == 0)) | (~greedy & (scores >= lowest) & (scores > -math.inf))
    return Draws(token_ids, bits(highest.squeeze(1)), kept.tolist())


def drawn_by_kernel(
    logits: torch.Tensor, rows: np.ndarray, metadata: SamplingMetadata, kernels: ctypes.CDLL | None = None
) -> Draws:
    count = len(rows)
    token_ids, noisy, lowest = torch.zeros(count, dtype=torch.int64), torch.empty(count), torch.empty(count)
    outputs = {"token_ids": token_ids, "noisy": noisy, "lowest_kept": lowest}
    assert run_sample_kernel(logits, rows, metadata, kernels=kernels, **outputs)
    scores, greedy = scores_of(logits, rows, metadata), torch.from_numpy(metadata.is_greedy())[:, None]
    kept = (greedy & (scores == 0)) | (~greedy & (scores >= lowest[:, None]) & (scores > -math.inf))
    return Draws(token_ids.tolist(), bits(noisy), kept.tolist())


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, np.ndarray, SamplingMetadata]:
    """Rows of logits, some with ties, masks, gaps between them and outliers, and draws from some of them."""
    width = draw(st.sampled_from([1, 2, 3, 15, 16, 17, 50, 1000, 1024, 1025, 3001, 9000, 20_011]))
    count, seed = draw(st.integers(1, 5)), draw(st.integers(0, 99))
    logits = some_logits(count, width + draw(st.integers(0, 3)), seed) * draw(st.sampled_from([1e-3, 0.1, 1.0, 9.0]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed))
        logits = logits.masked_fill(allowed < draw(st.sampled_from([0.3, 0.9, 0.999])), -math.inf)
        logits[:, draw(st.integers(0, width - 1))] = draw(st.sampled_from([-1.0, 0.0, 3e38, -3e38]))
    if draw(st.booleans()):
        logits[:, draw(st.integers(0, width - 1))] += draw(st.sampled_from([8.0, 40.0]))
    params = draw(st.lists(PARAMS, min_size=1, max_size=9))
    rows = np.array(draw(st.lists(st.integers(0, count - 1), min_size=len(params), max_size=len(params))))
    seeds = draw(st.lists(st.integers(0, MAX_SEED), min_size=len(params), max_size=len(params)))
    positions = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(params), max_size=len(params)))
    return logits.to(draw(DTYPES))[:, :width], rows, SamplingMetadata.from_params(params, seeds, positions)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(), st.sampled_from([1, 2, 3, 7]))
def test_every_level_of_processor_draws_the_same_bits_as_torch(
    kernels: ctypes.CDLL, batch: tuple[torch.Tensor, np.ndarray, SamplingMetadata], count: int
) -> None:
    logits, rows, metadata = batch
    expected = drawn_by_definition(logits, rows, metadata)
    with threads(count):
        assert drawn_by_kernel(logits, rows, metadata, kernels) == expected
    # What torch draws with its narrow look at the highest scores first, waiting for results or not.
    for allow_sync in (True, False):
        selected = logits[torch.from_numpy(rows)].float()
        assert sample(selected.clone(), metadata, allow_sync=allow_sync).tolist() == expected.token_ids


def test_the_noise_of_many_thousands_of_tokens_is_the_same_to_the_bit(kernels: ctypes.CDLL) -> None:
    """Rows of one likely token each, whose noise is therefore read: the last bit of a logarithm shows."""
    count, width = 20_000, 40
    logits = torch.full((1, width), -math.inf)
    logits[0, 17] = 1.0
    metadata = SamplingMetadata.from_params([SamplingParams()] * count, range(count), range(count))
    made = drawn_by_kernel(logits, np.zeros(count, np.int64), metadata, kernels)
    noise = gumbel_noise(torch.from_numpy(metadata.keys), torch.tensor([17], dtype=torch.int32))
    assert made.noisy == bits(noise.squeeze(1))
    assert set(made.token_ids) == {17}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DTYPES, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 2), st.integers(0, 8999), PARAMS)
def test_what_is_not_finite_is_found_and_spoils_its_row_alone(
    kernels: ctypes.CDLL, dtype: torch.dtype, bad: float, row: int, place: int, params: SamplingParams
) -> None:
    logits = some_logits(3, 9000).to(dtype)
    rows, metadata = np.arange(3), SamplingMetadata.from_params([params] * 3, range(3), range(3))
    before = drawn_by_kernel(logits, rows, metadata, kernels)
    logits[row, place] = bad
    token_ids, finite = torch.zeros(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)
    highest = torch.empty(3)
    run_sample_kernel(logits, rows, metadata, kernels=kernels, token_ids=token_ids, finite=finite, highest=highest)
    assert finite.tolist() == logits.isfinite().all(-1).tolist()
    assert bits(highest.nan_to_num(7e37)) == bits(logits.float().amax(-1).nan_to_num(7e37))
    assert 0 <= token_ids[row] < 9000
    others = [other for other in range(3) if other != row]
    assert [token_ids[other].item() for other in others] == [before.token_ids[other] for other in others]
    if bad == -math.inf:
        assert token_ids[row] == sample(logits[row : row + 1].float(), metadata.select(rows[row : row + 1])).item()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
def test_any_number_of_threads_draws_the_same(rows: int) -> None:
    logits = some_logits(rows, 30_000).bfloat16()
    styles = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0}, {"top_k": 3000}]
    params = [SamplingParams(**styles[i % len(styles)]) for i in range(rows + 6)]
    metadata = SamplingMetadata.from_params(params, range(rows + 6), range(rows + 6))
    names = np.array([i % rows for i in range(rows + 6)])
    with threads(1):
        alone = drawn_by_kernel(logits, names, metadata)
    for count in (2, 5, 16):
        with threads(count):
            assert drawn_by_kernel(logits, names, metadata) == alone


# Through the sampler


def test_a_step_of_greedy_and_random_rows_in_any_order_is_the_one_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab_size = 3000
    styles = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "logit_bias": ((3, 9.0),)},
    ]
    batch = [make_output(id, [1, 2], seed=id, **styles[id * 7 % 4]) for id in range(12)]
    logits = some_logits(12, vocab_size).bfloat16()
    logits[5, 7] = math.nan
    made = run_step(KeepingSampler(vocab_size), batch, logits)
    monkeypatch.setattr(sample_kernel, "library", lambda: None)
    expected = run_step(KeepingSampler(vocab_size), batch, logits)
    assert made.token_ids == expected.token_ids
    assert set(made.errors) == set(expected.errors) == {5}


def test_rows_without_a_kernel_are_left_to_torch() -> None:
    for logits in (torch.zeros(2, 3, dtype=torch.float16), torch.zeros(0, 3), torch.zeros(4, 6)[:, ::2]):
        assert sample_rows(logits, np.arange(len(logits)), None) is None
