"""The server's end of the link sends without waiting, in order and from any thread, and notices the other end's end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from threading import Thread

import pytest
from quire_engine.core.engine_core import RemoveLoRA, Shutdown
from quire_engine.core_client import loop_link
from quire_engine.core_client.codec import Codec
from quire_engine.core_client.core_messages import FreeGrammar, Link, ToCore, make_codecs, not_sent
from quire_engine.core_client.loop_link import LoopLink

from tests.support.waiting import until


def no_replies(arguments: Sequence[Codec]) -> Codec:
    return Codec(not_sent, not_sent)


class Ends:
    """A server's end on this loop, and the other one, which a test reads and writes."""

    def __init__(self) -> None:
        codecs = make_codecs(Codec(not_sent, not_sent), no_replies)
        here, there = socket.socketpair()
        self.other = Link(there, codecs, ToCore, ToCore)
        there.settimeout(20)
        self.received: list[object] = []
        self.num_ends = 0
        self.link = LoopLink(Link(here, codecs, ToCore, ToCore), self.received.append, self._on_end)

    def _on_end(self) -> None:
        self.num_ends += 1

    def read(self, count: int) -> list[object]:
        messages: list[object] = []
        while len(messages) < count:
            messages += self.other.receive() or []
        return messages


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    ends.other.socket.close()


async def test_messages_from_before_and_after_the_loop_and_of_other_threads_arrive(ends: Ends) -> None:
    ends.link.send(RemoveLoRA(1))
    ends.link.attach()
    ends.link.send(RemoveLoRA(2))
    ends.link.send_later(FreeGrammar(3))
    thread = Thread(target=ends.link.send, args=(RemoveLoRA(4),))
    thread.start()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert await asyncio.to_thread(ends.read, 4) == [RemoveLoRA(1), RemoveLoRA(2), FreeGrammar(3), RemoveLoRA(4)]


async def test_what_the_other_end_does_not_read_waits_and_keeps_its_order(ends: Ends) -> None:
    ends.link.attach()
    for number in range(20_000):
        ends.link.send(RemoveLoRA(number))
    read = await asyncio.to_thread(ends.read, 20_000)
    assert read == [RemoveLoRA(number) for number in range(20_000)]
    ends.link.send(Shutdown())
    assert await asyncio.to_thread(ends.read, 1) == [Shutdown()]


async def test_messages_arrive_on_the_loop(ends: Ends) -> None:
    ends.link.attach()
    ends.other.socket.sendall(ends.other.to_bytes(RemoveLoRA(5)) + ends.other.to_bytes(Shutdown()))
    await until(lambda: len(ends.received) == 2)
    assert ends.received == [RemoveLoRA(5), Shutdown()]


async def test_the_end_of_the_other_process_is_noticed_once_and_nothing_is_raised_afterwards(ends: Ends) -> None:
    ends.link.attach()
    ends.other.socket.close()
    await until(lambda: ends.num_ends == 1)
    ends.link.send(Shutdown())
    await asyncio.sleep(0.01)
    assert ends.num_ends == 1


async def test_what_is_no_message_ends_the_link(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ends.link.attach()
    ends.other.socket.sendall(b"\x02\x00\x00\x00{]")
    await until(lambda: ends.num_ends == 1)
    assert "what cannot be read" in caplog.text


async def test_a_core_that_reads_nothing_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_link, "MAX_UNSENT_BYTES", 1000)
    ends.link.attach()
    while not ends.num_ends:
        ends.link.send(RemoveLoRA(1))
    ends.link.send(RemoveLoRA(1))
    assert ends.num_ends == 1
