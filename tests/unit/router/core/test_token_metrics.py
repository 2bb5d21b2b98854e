"""Tokens counted in plain numbers say the same in the metrics as each of them by itself would."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample
from quire_router.core.metrics import TOKEN_SECONDS, BulkHistogram, TokenMetrics

ON_A_BOUND = st.sampled_from(TOKEN_SECONDS)
SECONDS = st.one_of(ON_A_BOUND, st.floats(0.0, 10.0))


def samples(registry: CollectorRegistry) -> list[Sample]:
    (family,) = registry.collect()
    return [sample for sample in family.samples if not sample.name.endswith("_created")]


@given(st.lists(st.lists(SECONDS, max_size=20), max_size=4))
def test_metrics_observed_in_batches_equal_those_observed_one_by_one(flushes: list[list[float]]) -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    single = Histogram("seconds", "Each by itself.", ["model"], buckets=TOKEN_SECONDS, registry=one).labels("m")
    tally = TokenMetrics("m")
    at_once = BulkHistogram("seconds", "All at once.", ["model"], buckets=TOKEN_SECONDS, registry=other).labels("m")
    tally._inter_token_latency = at_once
    for gaps in flushes:
        for number, gap in enumerate(gaps):
            single.observe(gap)
            if number % 2:
                tally.add(1, gap)
            else:
                tally.gaps.append(gap)
        tally.flush()
    assert alike(samples(one), samples(other))


def alike(ones: Iterable[Sample], others: Iterable[Sample]) -> bool:
    """Sums differ in their last digit by the order in which they are made."""
    return all(
        one.name == other.name and one.labels == other.labels and abs(one.value - other.value) <= 1e-9
        for one, other in zip(ones, others, strict=True)
    )
