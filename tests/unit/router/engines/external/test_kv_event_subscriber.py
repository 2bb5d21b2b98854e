"""KV events over ZeroMQ: what is lost on the way, a publisher that starts again, and one that means harm."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from quire_router.engines.external import kv_event_subscriber
from quire_router.engines.external.kv_event_subscriber import KvEventSubscriber

from tests.support.kv_publisher import AllBlocksCleared, KvPublisher, batch, removed, stored
from tests.support.waiting import until
from tests.unit.router.engines.external.test_kv_events import TOKENS, Caches, ours

ADDRESS = "vllm+http://127.0.0.1:1"


def block(number: int, parent: int | None = None, **more: Any) -> Any:
    """The event of one block of ``TOKENS``."""
    return stored([number], TOKENS[16 * number : 16 * number + 16], parent, **more)


def prefix(blocks: int) -> set[bytes]:
    return set(ours(TOKENS[: 16 * blocks]))


def dropped(reason: str) -> float:
    return REGISTRY.get_sample_value("quire_index_dropped_blocks_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def reading(publisher: KvPublisher, *, replay: bool = True, subscribed: bool = True) -> AsyncIterator[Caches]:
    """What a subscriber reads."""
    caches = Caches()
    port = publisher.replay_port if replay else None
    task = asyncio.create_task(KvEventSubscriber(ADDRESS, "127.0.0.1", publisher.port, port, caches.reported).run())
    try:
        if subscribed:
            await publisher.subscribed()
        yield caches
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_published_is_read() -> None:
    async with KvPublisher(replays=False) as publisher, reading(publisher, replay=False) as caches:
        await publisher.publish(block(0), block(1, 0))
        await until(lambda: caches.entered == prefix(2))
        assert caches.reported.complete
        await publisher.publish(removed([1]))
        await until(lambda: caches.entered == prefix(1))
        await publisher.publish(AllBlocksCleared())
        await until(lambda: not caches.entered)


def test_it_is_read_on_the_routers_event_loop_too() -> None:
    uvloop.run(test_what_is_published_is_read())
    uvloop.run(test_a_gap_is_filled_where_the_server_repeats())


@pytest.mark.parametrize("topic", [b"kv@10.0.0.7@m", b"", None])
async def test_what_was_published_before_is_repeated(topic: bytes | None) -> None:
    async with KvPublisher(topic=topic) as publisher:
        await publisher.publish(block(0))
        await publisher.publish(block(1, 0))
        async with reading(publisher) as caches:
            await until(lambda: caches.entered == prefix(2))
            assert caches.reported.complete
            await publisher.publish(block(2, 1))
            await until(lambda: caches.entered == prefix(3))
            assert publisher.replays == 1


async def test_a_gap_is_filled_where_the_server_repeats() -> None:
    async with KvPublisher() as publisher, reading(publisher) as caches:
        await publisher.publish(block(0))
        await publisher.publish(block(1, 0), lost=True)
        await publisher.publish(block(2, 1))
        await until(lambda: caches.entered == prefix(3))
        assert caches.reported.complete
        await publisher.publish(removed([2]))
        await until(lambda: caches.entered == prefix(2))


@pytest.mark.parametrize("replays", [False, True])
async def test_after_a_gap_that_nobody_fills_all_begins_anew(replays: bool) -> None:
    async with KvPublisher(replays=replays, steps=1) as publisher, reading(publisher, replay=replays) as caches:
        await publisher.publish(block(0))
        await until(lambda: caches.entered == prefix(1))
        await publisher.publish(block(1, 0), lost=True)
        await publisher.publish(block(2, 1), stored([9], TOKENS[:16]))
        await until(lambda: len(caches.reported) == 1 and not caches.reported.complete)
        assert caches.entered == prefix(1)
        await publisher.publish(stored([10], TOKENS[16:32], 9))
        await until(lambda: caches.entered == prefix(2))
        await publisher.publish(AllBlocksCleared())
        await until(lambda: caches.reported.complete)  # nothing is unknown any more


async def test_where_the_beginning_is_not_repeated_what_is_cached_is_not_known_to_be_all() -> None:
    async with KvPublisher(steps=2) as publisher:
        for number in range(4):
            await publisher.publish(block(number, number - 1 if number else None))
        async with reading(publisher) as caches:
            await publisher.publish(stored([9], TOKENS[:16]))
            await until(lambda: caches.entered == prefix(1))
            assert not caches.reported.complete


@pytest.mark.parametrize("replays", [False, True])
async def test_a_server_that_starts_again_has_nothing_cached(replays: bool) -> None:
    async with KvPublisher(replays=replays) as publisher, reading(publisher, replay=replays) as caches:
        for number in range(3):
            await publisher.publish(block(number, number - 1 if number else None))
        await until(lambda: caches.entered == prefix(3))
        await publisher.__aexit__()
        async with KvPublisher(port=publisher.port, replay_port=publisher.replay_port, replays=replays) as again:
            await again.subscribed()
            await again.publish(stored([77], TOKENS[:16]), ts=2.0)
            await until(lambda: caches.entered == prefix(1))
            assert caches.reported.complete
            await again.publish(stored([78], TOKENS[16:32], 77), ts=3.0)
            await until(lambda: caches.entered == prefix(2))


async def test_what_is_repeated_and_comes_by_itself_too_is_applied_once() -> None:
    async with KvPublisher() as publisher:
        await publisher.publish(block(0))
        await publisher.publish(removed([0]))
        async with reading(publisher) as caches:
            await publisher.publish(block(0), ts=2.0)
            await until(lambda: caches.entered == prefix(1))
            for sequence in (0, 1):  # as if the queue of the socket still had them
                again = batch(block(0)) if sequence == 0 else batch(removed([0]))
                await publisher._pub.send_multipart([b"", sequence.to_bytes(8, "big"), again])
            await publisher.publish(block(1, 0), ts=3.0)
            await until(lambda: caches.entered == prefix(2))


async def test_a_replay_endpoint_that_does_not_answer_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_event_subscriber, "REPLAY_TIMEOUT", 0.05)
    async with KvPublisher() as publisher:
        assert publisher._task is not None
        publisher._task.cancel()
        async with reading(publisher) as caches:
            await publisher.publish(block(0))
            await until(lambda: caches.entered == prefix(1))
    assert "does not repeat KV events" in caplog.text


async def test_damaged_messages_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    before = dropped("damaged")
    async with KvPublisher(replays=False) as publisher, reading(publisher, replay=False) as caches:
        with caplog.at_level(logging.INFO):
            await publisher.publish(block(0))
            await publisher.publish_raw(b"nonsense")
            await publisher._pub.send_multipart([b"topic alone"])
            await publisher._pub.send_multipart([b"", b"\xff" * 8, batch()])
            await publisher.publish(["BlockRemoved", "x"], stored([5], TOKENS[:3]))
            await publisher.publish(block(0))
            await until(lambda: dropped("damaged") - before == 5)
            await until(lambda: caches.entered == prefix(1))
            assert not caches.reported.complete
    assert caplog.text.count("cannot be read") == 1


async def test_messages_that_are_too_large_never_arrive() -> None:
    async with KvPublisher(replays=False) as publisher, reading(publisher, replay=False) as caches:
        await publisher.publish_raw(bytes(kv_event_subscriber.MAX_MESSAGE_BYTES + 1))
        await publisher.subscribed()  # the connection was closed, and made again
        await publisher.publish(block(0))
        await until(lambda: caches.entered == prefix(1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.binary(max_size=20)
            | st.integers(0, 5).map(lambda number: number.to_bytes(8, "big"))
            | st.sampled_from([2**64 - 1, 2**64 - 2, 2**63]).map(lambda number: number.to_bytes(8, "big"))
            | st.sampled_from([batch(), batch(block(0)), batch(removed([0]), ts=9.0), batch(AllBlocksCleared())])
            | st.sampled_from([float("nan"), float("inf"), -1.0]).map(lambda ts: batch(block(1, 0), ts=ts)),
            max_size=4,
        ),
        max_size=10,
    )
)
def test_no_message_raises(messages: list[list[bytes]]) -> None:
    async def receive() -> None:
        subscriber = KvEventSubscriber(ADDRESS, "127.0.0.1", 1, None, Caches().reported)
        for frames in messages:
            await subscriber._on_message(frames)

    asyncio.run(receive())
