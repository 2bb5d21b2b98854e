"""Speculative blocks in the messages between routers: they arrive, are bounded, and may be damaged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from quire.v1 import load_pb2
from quire_router.engines.load_messages import (
    MAX_HASHES,
    MAX_PROMPT_HASHES,
    InvalidLoadMessageError,
    LoadMessage,
    RouterLoad,
    SpeculativeBlocks,
    SpeculativePrefix,
)
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

ENGINES = ("a:1", "b:1", "c:1")
PROMPTS = st.lists(st.tuples(st.sampled_from(ENGINES), st.integers(0, 3 * MAX_PROMPT_HASHES)), max_size=150)


class Router:
    """What one router knows of two of the three engines."""

    def __init__(self) -> None:
        self.table, self.index = EngineTable(), PrefixIndex()
        for engine_id in ENGINES[:2]:
            self.table.add(engine_id)
        self.expectations = SpeculativeBlocks(self.table, self.index, lambda: 0.0)

    def expected(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks each engine is expected to have."""
        depths = self.index.match(names, 0.0, len(self.table)).device
        return {engine_id: int(depths[row]) for engine_id, row in self.table}


def names_of(prompt: int, count: int) -> list[bytes]:
    return [prompt.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(count)]


def message(*expected: SpeculativePrefix, engines: Sequence[str] = ENGINES) -> LoadMessage:
    return LoadMessage("r", 1, RouterLoad(dict.fromkeys(engines, (1, 1, 0))), expected)


@given(PROMPTS)
@example([("a:1", MAX_PROMPT_HASHES), ("b:1", 3)] * 75)
def test_speculative_blocks_are_sent_newest_first_and_bounded(prompts: list[tuple[str, int]]) -> None:
    sender, receiver = Router(), Router()
    for number, (engine_id, count) in enumerate(prompts):
        sender.expectations.add(engine_id, names_of(number, count))
    sent = message(*sender.expectations.pop_all())
    assert LoadMessage.decode(sent.encode()) == sent
    assert len(sent.encode_speculative()) < 16 * MAX_HASHES + 1024
    assert sender.expectations.pop_all() == ()
    receiver.expectations.apply_remote(LoadMessage.decode(sent.encode()).speculative)
    left = MAX_HASHES
    for number, (engine_id, count) in reversed(list(enumerate(prompts))):
        most = min(count, MAX_PROMPT_HASHES)
        left -= most
        wanted = {name: most if name == engine_id and left >= 0 else 0 for name in ENGINES[:2]}
        assert receiver.expected(names_of(number, most)) == wanted


def test_speculative_blocks_of_an_engine_outside_of_the_share_are_not_sent() -> None:
    kept = SpeculativePrefix("b:1", (b"b" * 16,))
    sent = message(SpeculativePrefix("a:1", (b"a" * 16,)), kept, engines=["b:1"])
    assert LoadMessage.decode(sent.encode()).speculative == (kept,)


def test_a_share_is_stored_without_speculative_blocks() -> None:
    sent = message(SpeculativePrefix("a:1", (b"a" * 16,)))
    assert LoadMessage.decode(sent.encode_load()) == message()


FITTING: dict[str, Any] = {"expected_engines": [0, 2], "expected_blocks": [1, 2], "expected_names": b"n" * 48}


@pytest.mark.parametrize(
    ("change", "heard"),
    [
        ({}, [("a:1", 1), ("c:1", 2)]),
        ({"expected_engines": [3, 2]}, [("c:1", 2)]),
        ({"expected_engines": [2**32 - 1, 0]}, [("a:1", 2)]),
        ({"expected_engines": [0]}, []),
        ({"expected_names": b"n" * 47}, []),
        ({"expected_names": b"n" * 64}, []),
        ({"expected_names": b""}, []),
        ({"expected_blocks": [2**32 - 1] * 2}, []),
        ({"expected_engines": [0] * 9, "expected_blocks": [0] * 8 + [3]}, []),
        (
            {"expected_engines": [0], "expected_blocks": [MAX_HASHES], "expected_names": bytes(16 * MAX_HASHES)},
            [("a:1", MAX_HASHES)],
        ),
        (
            {
                "expected_engines": [0],
                "expected_blocks": [MAX_HASHES + 1],
                "expected_names": bytes(16 * MAX_HASHES + 16),
            },
            [],
        ),
    ],
)
def test_malformed_speculative_blocks_are_ignored_and_the_share_counts(
    change: dict[str, Any], heard: list[tuple[str, int]]
) -> None:
    payload = message().encode() + load_pb2.LoadShare(**{**FITTING, **change}).SerializeToString()
    decoded = LoadMessage.decode(payload)
    assert decoded.load == message().load
    assert [(each.engine_id, len(each.hashes)) for each in decoded.speculative] == heard


@given(st.integers(0, 200), st.binary(max_size=8))
def test_damaged_bytes_are_ignored(position: int, noise: bytes) -> None:
    payload = message(
        SpeculativePrefix("a:1", tuple(names_of(1, 3))), SpeculativePrefix("b:1", tuple(names_of(2, 4)))
    ).encode()
    damaged = payload[:position] + noise + payload[position + len(noise) :]
    router = Router()
    try:
        router.expectations.apply_remote(LoadMessage.decode(damaged).speculative)
    except InvalidLoadMessageError:
        return
    assert router.index.counts.damaged == 0
    assert np.all(router.index.match(names_of(1, 3), 0.0).device <= 3)
