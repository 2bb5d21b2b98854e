"""What a router concludes about a server: which blocks it should have, and how fast it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_router.engines.external.estimates import ObservedPace, PredictedCache


class Seen:
    """What a listener would have, from events alone."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def __call__(self, event: engine_pb2.KvEvent) -> None:
        stored, removed = set(event.stored.block_hashes), set(event.removed.block_hashes)
        assert not stored & self.blocks, "a block is stored twice"
        assert removed <= self.blocks, "a block is removed that was not there"
        self.blocks = (self.blocks | stored) - removed


def blocks(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_the_blocks_used_last_stay_and_of_a_prompt_the_first_ones() -> None:
    seen = Seen()
    cache = PredictedCache(4, seen)
    cache.add(blocks(1, 2, 3))
    cache.add(blocks(1, 7, 8))
    assert seen.blocks == {*blocks(1, 7, 8, 2)}
    assert cache.count(blocks(1, 2, 3)) == 2
    assert cache.count(blocks(9)) == 0


def test_a_server_without_a_prefix_cache_has_nothing() -> None:
    seen = Seen()
    PredictedCache(0, seen).add(blocks(1, 2))
    assert not seen.blocks


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8), max_size=20))
def test_events_say_what_the_cache_has(capacity: int, prompts: list[list[int]]) -> None:
    seen = Seen()
    cache = PredictedCache(capacity, seen)
    for prompt in prompts:
        cache.add(blocks(*prompt))
        assert len(cache) == len(seen.blocks) <= capacity
        assert cache.count(blocks(*prompt)) == min(len(prompt), capacity)


def test_nothing_is_said_before_something_was_seen() -> None:
    pace = ObservedPace()
    assert pace.pace() is None
    pace.on_prompt(1.0, 500)
    assert pace.pace() is None, "without a step's time it is not known what of it the prompt took"


def test_steps_and_prompts_are_told_apart() -> None:
    pace = ObservedPace()
    for number in range(2000):
        sequences = 1 + number % 32
        pace.on_gap(0.010 + 0.0002 * sequences, sequences)
    for _ in range(50):
        pace.on_prompt(0.1133, 1000)
    found = pace.pace()
    assert found is not None
    assert found.step_seconds == pytest.approx(0.010, rel=0.05)
    assert found.sequence_seconds == pytest.approx(0.0002, rel=0.1)
    assert found.token_seconds == pytest.approx(1e-4, rel=0.05)


def test_a_server_that_always_runs_as_much_has_a_plausible_pace() -> None:
    pace = ObservedPace()
    for _ in range(100):
        pace.on_gap(0.02, 4)
    pace.on_prompt(0.01, 200)
    found = pace.pace()
    assert found is not None
    assert found.step_seconds + 4 * found.sequence_seconds == pytest.approx(0.02)
    assert found.token_seconds == 0


def test_short_prompts_say_nothing_of_a_tokens_time() -> None:
    pace = ObservedPace()
    pace.on_gap(0.01, 1)
    pace.on_prompt(5.0, 4)
    assert pace.pace() is None
