"""vLLM's KV events: read in all their forms, and entered by the hashes that placement looks for."""

import contextlib
from base64 import b64encode
from time import process_time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_proto.hashing import extra_key, hash_chain, pack
from quire_router.engines.external.estimates import PredictedCache
from quire_router.engines.external.kv_events import (
    AllBlocksCleared,
    BadEventError,
    BlockRemoved,
    BlockStored,
    ReportedCache,
    read_batch,
)

from tests.support import kv_publisher as vllm

REVISION = "vllm:m"
TOKENS = list(range(100, 228))


def ours(tokens: list[int] = TOKENS, size: int = 16, salt: bytes = b"") -> list[bytes]:
    return list(hash_chain(pack(tokens), size * 4, extra_key(REVISION, salt)))


class Caches:
    """A ``ReportedCache``, and what it has entered."""

    def __init__(self, size: int = 16, max_tokens: int = 10_000, capacity: int = 1_000) -> None:
        self.entered: set[bytes] = set()
        self.predicted = PredictedCache(capacity, self._on_event)
        self.reported = ReportedCache(self.predicted, REVISION, size, max_tokens)

    def _on_event(self, event: engine_pb2.KvEvent) -> None:
        if event.HasField("stored"):
            self.entered |= set(event.stored.block_hashes)
        else:
            self.entered -= set(event.removed.block_hashes)

    def apply(self, *events: Any, arrays: bool = False) -> None:
        """As published."""
        read = read_batch(vllm.batch(*events, arrays=arrays))
        assert not read.bad
        for event in read.events:
            self.reported.apply(event)


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("hashes", [[1, -2, 2**64 - 1], [b"a" * 32, b"b" * 32, b"c" * 32]])
def test_what_vllm_writes_is_read(arrays: bool, hashes: list[Any]) -> None:
    cleared = vllm.AllBlocksClearedArray() if arrays else vllm.AllBlocksCleared()
    salted = vllm.stored(hashes, TOKENS[:48], hashes[0], arrays=arrays, extra_keys=[("s",), None, None], group_idx=0)
    payload = vllm.batch(salted, vllm.removed(hashes, arrays=arrays), cleared, ts=7.5, arrays=arrays)
    read = read_batch(payload)
    assert (read.ts, read.bad) == (7.5, 0)
    first, second, third = read.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockRemoved)
    assert isinstance(third, AllBlocksCleared)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (hashes, hashes[0], TOKENS[:48])
    assert (first.block_size, first.extra_keys, first.medium) == (16, [["s"], None, None], "GPU")
    assert second.block_hashes == hashes


def test_events_of_the_oldest_version_are_read() -> None:
    read = read_batch(vllm.batch(vllm.OldBlockStored([5], None, TOKENS[:16], 16, None), arrays=True))
    assert read.bad == 0
    assert isinstance(read.events[0], BlockStored)
    assert read.events[0].extra_keys is None


def test_what_is_new_in_a_version_is_ignored() -> None:
    new_kind = {"type": "BlockMoved", "block_hashes": [1]}
    new_field = msgspec.to_builtins(vllm.removed([1])) | {"remaining_copy_counts": [0]}
    read = read_batch(vllm.batch(new_kind, new_field, ["BlockMoved", [1]], ["BlockRemoved", [2], "GPU", 0, [0], "x"]))
    assert read.bad == 0
    assert [event.block_hashes for event in read.events if isinstance(event, BlockRemoved)] == [[1], [2]]


def test_one_damaged_event_leaves_the_others() -> None:
    read = read_batch(vllm.batch(["BlockRemoved", 5], {"type": "BlockStored"}, 7, [], vllm.removed([3])))
    assert read.bad == 4
    assert len(read.events) == 1


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\x93", b"nonsense", b"\x91" * 5000, b"\xff"])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(BadEventError):
        read_batch(payload)


@pytest.mark.parametrize("size", [8, 16, 24, 32, 64])
def test_blocks_of_any_size_have_the_hashes_that_placement_looks_for(size: int) -> None:
    caches = Caches()
    hashes = [bytes([number]) * 32 for number in range(len(TOKENS) // size)]
    parent: bytes | None = None
    for number, block_hash in enumerate(hashes):  # one at a time, as answers are written
        caches.apply(vllm.stored([block_hash], TOKENS[number * size : (number + 1) * size], parent, size=size))
        parent = block_hash
        assert caches.entered == set(ours(TOKENS[: (number + 1) * size]))
    at_once = Caches()
    at_once.apply(vllm.stored([*hashes], TOKENS[: len(hashes) * size], size=size))
    assert at_once.entered == caches.entered
    for number in reversed(range(len(hashes))):
        caches.apply(vllm.removed([hashes[number]]))
        assert caches.entered == set(ours(TOKENS[: number * size]))
    assert len(caches.reported) == 0


def test_a_block_goes_with_the_servers_block_that_its_end_is_in() -> None:
    caches = Caches()
    caches.apply(vllm.stored([1, 2], TOKENS[:16], size=8), vllm.removed([1]))
    assert caches.entered == set(ours(TOKENS[:16]))
    caches.apply(vllm.removed([2]))
    assert not caches.entered


def test_salted_blocks_are_their_tenants_alone() -> None:
    caches = Caches()
    salt = b"\x00tenant"
    keys = [(b64encode(salt).decode(),), None]
    caches.apply(vllm.stored([1, 2], TOKENS[:32], extra_keys=keys), vllm.stored([3], TOKENS[32:48], 2))
    assert caches.entered == set(ours(TOKENS[:48], salt=salt))


@pytest.mark.parametrize("keys", [("not base64!",), (b"bytes",), ("a", "b"), (["picture", 0],)])
def test_blocks_of_what_no_request_of_this_router_can_use_are_left_out(keys: tuple[Any, ...]) -> None:
    caches = Caches()
    caches.apply(vllm.stored([1], TOKENS[:16], extra_keys=[keys]), vllm.stored([2], TOKENS[16:32], 1))
    assert not caches.entered
    caches.apply(vllm.stored([4, 5, 6], TOKENS[:48], extra_keys=[None, (["picture", 0],), None]))
    assert caches.entered == set(ours(TOKENS[:16]))


def test_without_extra_keys_blocks_count_until_requests_are_salted() -> None:
    caches = Caches()
    caches.reported.complete = True
    caches.apply(vllm.stored([1], TOKENS[:16], extra_keys=None))
    assert caches.entered == set(ours(TOKENS[:16]))
    assert caches.reported.complete
    caches.reported.salted = True
    caches.apply(vllm.stored([2], TOKENS[32:48], extra_keys=None))
    assert caches.entered == set(ours(TOKENS[:16]))
    assert not caches.reported.complete  # what is left out is predicted


@pytest.mark.parametrize(
    "more",
    [{"lora_name": "a"}, {"lora_id": 1}, {"medium": "CPU"}, {"kv_cache_spec_kind": "sliding_window"}],
)
def test_adapters_other_memory_and_sliding_windows_are_left_out(more: dict[str, Any]) -> None:
    caches = Caches()
    caches.apply(vllm.stored([1], TOKENS[:16], **more))
    assert not caches.entered


def test_of_several_groups_of_layers_one_counts() -> None:
    caches = Caches()
    caches.apply(
        vllm.stored([1], TOKENS[:16], group_idx=1, kv_cache_spec_kind="sliding_window"),
        vllm.stored([1], TOKENS[:16], group_idx=2, kv_cache_spec_kind="full_attention"),
        vllm.stored([2], TOKENS[:48], group_idx=1),  # vLLM leaves blocks out of a group with windows
        vllm.removed([1], group_idx=1),
        vllm.removed([1], medium="CPU", group_idx=2),
    )
    assert caches.entered == set(ours(TOKENS[:16]))
    caches.apply(vllm.removed([1], group_idx=2))
    assert not caches.entered


def test_clearing_forgets_what_was_predicted_too_and_then_all_is_known() -> None:
    caches = Caches()
    caches.predicted.add(ours(TOKENS[:32]))
    caches.apply(vllm.AllBlocksCleared())
    assert not caches.entered
    assert caches.reported.complete
    caches.apply(vllm.stored([1], TOKENS[:16], size=16))
    assert len(caches.entered) == 1


def test_evictions_take_back_what_was_predicted() -> None:
    caches = Caches()
    caches.predicted.add(ours(TOKENS[:32]))
    caches.apply(vllm.stored([1, 2], TOKENS[:32]), vllm.removed([2]))
    assert caches.entered == set(ours(TOKENS[:16]))
    assert len(caches.predicted) == 1


def test_what_follows_an_unknown_block_is_left_out() -> None:
    caches = Caches()
    caches.apply(vllm.stored([2], TOKENS[16:32], 1), vllm.removed([7]))
    assert not caches.entered


def test_memory_is_bounded() -> None:
    caches = Caches(max_tokens=64)
    caches.reported.complete = True
    for number in range(100):
        caches.apply(vllm.stored([number], [number] * 16))
    assert len(caches.reported) == len(caches.entered) == 4
    assert caches.reported.dropped == 96
    assert not caches.reported.complete
    caches.apply(vllm.removed([0, 1, 2, 3]), vllm.stored([4], [4] * 16))
    assert caches.entered == set(ours([4] * 16))


@pytest.mark.parametrize(
    "event",
    [
        vllm.stored([1], TOKENS[:15]),
        vllm.stored([1, 2], TOKENS[:16]),
        vllm.stored([1], [0] * 15 + [2**31]),
        vllm.stored([1], [0] * 15 + [-(2**31) - 1]),
        vllm.stored([1], TOKENS[:1], size=1),
        vllm.stored([], [], size=0),
        vllm.stored([1], TOKENS[:16], size=-16),
        vllm.stored([b"x" * 65], TOKENS[:16]),
    ],
)
def test_events_whose_parts_do_not_fit_are_refused(event: Any) -> None:
    caches = Caches()
    with pytest.raises(BadEventError):
        caches.apply(event)
    assert not caches.entered


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=40) | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "GPU"]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip
_HASH = st.integers(0, 5) | st.sampled_from([b"a" * 32, b"b" * 32])
_STORED = st.fixed_dictionaries(
    {
        "type": st.just("BlockStored"),
        "block_hashes": st.lists(_HASH, max_size=4),
        "parent_block_hash": st.none() | _HASH,
        "token_ids": st.integers(0, 4).map(lambda blocks: [7] * (8 * blocks)),
        "block_size": st.sampled_from([8, 16]),
    },
    optional=dict.fromkeys(("lora_id", "medium", "lora_name", "extra_keys", "group_idx"), _ANY),
)
_REMOVED = st.fixed_dictionaries(
    {"type": st.just("BlockRemoved"), "block_hashes": st.lists(_HASH, max_size=4)},
    optional=dict.fromkeys(("medium", "group_idx"), _ANY),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(_ANY | _STORED | _REMOVED | st.just({"type": "AllBlocksCleared"}), max_size=12), st.booleans())
def test_no_event_raises_anything_else_and_all_stays_in_bounds(events: list[Any], salted: bool) -> None:
    caches = Caches(max_tokens=48, capacity=3)
    caches.reported.salted = salted
    for event in read_batch(msgspec.msgpack.encode({"ts": 1.0, "events": events})).events:
        try:
            caches.reported.apply(event)
        except BadEventError:
            continue
        finally:
            assert len(caches.reported) <= 6
            assert len(caches.entered) == len(caches.predicted) <= 3


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=80) | _ANY.map(msgspec.msgpack.encode))
def test_no_payload_raises_anything_else(payload: bytes) -> None:
    with contextlib.suppress(BadEventError):
        read_batch(payload)


@pytest.mark.parametrize(
    "event", [{}, 1, ["AllBlocksCleared"], {"type": "Other"}], ids=["damaged", "number", "known", "unknown"]
)
def test_a_batch_with_more_events_than_a_step_has_is_not_read(event: object) -> None:
    payload = msgspec.msgpack.encode([1.0, [event] * 40_000])
    begun = process_time()
    with pytest.raises(BadEventError, match="40000 events"):
        read_batch(payload)
    assert process_time() - begun < 0.5
