"""Lengths of requests from published distributions and from traces."""

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.bench.config import BenchConfig
from quire_engine.bench.lengths import DISTRIBUTIONS, exponential, lognormal, make_workload
from quire_engine.bench.workload import Lengths
from quire_engine.errors import ModelError

from tests.support.traces import write_azure

DRAWS = 20_000


@given(median=st.floats(50, 2000), more=st.floats(1.05, 2.0), seed=st.integers(0, 2**32))
def test_a_lognormal_distribution_has_the_median_and_the_mean_that_are_given(
    median: float, more: float, seed: int
) -> None:
    source = random.Random(seed)
    draw = lognormal(median, more * median)
    values = [draw(source) for _ in range(4000)]
    assert statistics.median(values) == pytest.approx(median, rel=0.15)
    assert statistics.mean(values) == pytest.approx(more * median, rel=0.25)


@pytest.mark.parametrize(
    ("name", "prompt", "output"), [("sharegpt", (161.31, None), (337.99, None)), ("azure", (1155, 1020), (211, 129))]
)
def test_distributions_have_the_means_and_medians_that_were_published(
    name: str, prompt: tuple[float, float | None], output: tuple[float, float | None]
) -> None:
    source = random.Random(0)
    for draw, (mean, median) in zip(DISTRIBUTIONS[name], (prompt, output), strict=True):
        values = [draw(source) for _ in range(DRAWS)]
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
        assert median is None or statistics.median(values) == pytest.approx(median, rel=0.05)


def test_an_exponential_distribution_has_its_mean() -> None:
    source = random.Random(0)
    assert statistics.mean(exponential(100)(source) for _ in range(DRAWS)) == pytest.approx(100, rel=0.05)


@given(
    name=st.sampled_from(sorted(DISTRIBUTIONS)),
    count=st.integers(1, 20),
    longest=st.integers(400, 2048),
    n=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_a_drawn_workload_fits_and_is_the_same_for_the_same_seed(
    name: str, count: int, longest: int, n: int, seed: int
) -> None:
    workload = make_workload(name, count, longest, 100, n=n, seed=seed)
    assert workload == make_workload(name, count, longest, 100, n=n, seed=seed)
    assert len(workload.prompts) == len(workload.outputs) == count
    assert workload.output_tokens == n * sum(workload.outputs)
    for prompt, output in zip(workload.prompts, workload.outputs, strict=True):
        assert 1 <= len(prompt) <= longest - output
        assert output >= 1
        assert all(3 <= token < 100 for token in prompt)


def test_a_distribution_that_hardly_ever_fits_is_refused() -> None:
    with pytest.raises(ModelError, match="azure has 0 requests of at most 16 tokens among 2000, and 2 are needed"):
        make_workload("azure", 2, 16, 100, n=1, seed=0)


def test_a_traces_requests_are_taken_in_their_order_if_they_fit(tmp_path: Path) -> None:
    rows = [(0.0, 30, 5), (1.0, 900, 5), (2.0, 7, 90), (3.0, 8, 8)]
    trace = str(write_azure(tmp_path / "trace.csv", rows))
    workload = make_workload(trace, 3, 100, 50, n=1, seed=0)
    assert [(len(prompt), size) for prompt, size in zip(workload.prompts, workload.outputs, strict=True)] == [
        (30, 5),
        (7, 90),
        (8, 8),
    ]
    with pytest.raises(ModelError, match="has 3 requests of at most 100 tokens, and 4 are needed"):
        make_workload(trace, 4, 100, 50, n=1, seed=0)
    (tmp_path / "empty.csv").write_text("TIMESTAMP\n")
    with pytest.raises(ModelError):
        make_workload(str(tmp_path / "empty.csv"), 1, 100, 50, n=1, seed=0)


def test_a_range_is_that_of_prompts_and_outputs(tmp_path: Path) -> None:
    given_range = BenchConfig(shape="135m", lengths="100..1024", input_len="5", output_len="6")
    assert given_range.ranges == (Lengths(100, 1024), Lengths(100, 1024))
    assert given_range.longest == 2049, "of the prefill"
    assert BenchConfig(shape="135m", input_len="5", output_len="6").ranges == (Lengths(5, 5), Lengths(6, 6))
    assert BenchConfig(shape="135m", lengths="azure").ranges is None
