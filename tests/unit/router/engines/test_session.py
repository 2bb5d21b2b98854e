"""The session's own promise, without a network: whatever is replayed, and whenever the reader comes, each token is
delivered once and in order.
"""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import engine_pb2, types_pb2
from quire_router.engines.attempt import EngineFull
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.session import CommandQueue, Session
from quire_router.engines.settings import ConnectionSettings

from tests.support.batches import take_all
from tests.support.scripted_engine import LENGTH, output

NAMES = "abc"


def batches(lengths: list[dict[str, int]]) -> Iterator[engine_pb2.StepBatch]:
    """Batches in which request ``name`` gets so many tokens, its k-th token being k; the last ends all of them."""
    made = dict.fromkeys(NAMES, 0)
    for sequence, step in enumerate([*lengths, {}], start=1):
        reason = LENGTH if sequence > len(lengths) else types_pb2.FINISH_REASON_UNSPECIFIED
        outputs = [
            output(name, range(made[name], made[name] + step.get(name, 0)), made[name], reason)
            for name in NAMES
            if name in step or reason
        ]
        for name, length in step.items():
            made[name] += length
        yield engine_pb2.StepBatch(sequence=sequence, outputs=outputs)


steps = st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)), min_size=1, max_size=12)


@given(steps, st.data())
@settings(deadline=None)
def test_each_token_is_delivered_once_and_in_order(lengths: list[dict[str, int]], data: st.DataObject) -> None:
    async def run() -> None:
        session = Session(ConnectionSettings())
        session.begin(engine_pb2.Snapshot(generation=1))
        streams = {name: session.submit(submit(name)) for name in NAMES}
        while session.commands.has_submit("c"):
            await session.commands.next()
        read: dict[str, list[int]] = {name: [] for name in NAMES}
        script = list(batches(lengths))
        for batch in script:
            take_all(session, batch)
            back = data.draw(st.integers(0, batch.sequence), label="batches replayed")
            if back and session.in_flight:
                session.begin(engine_pb2.Snapshot(generation=1, resumed=True, sequence=session.sequence - back))
                for again in script[batch.sequence - back : batch.sequence]:
                    take_all(session, again)
            for name in data.draw(st.sets(st.sampled_from(NAMES)), label="readers"):
                if streams[name]._ready and session.in_flight:
                    read[name] += (await anext(streams[name])).token_ids
        for name in NAMES:
            expected = list(range(sum(step.get(name, 0) for step in lengths)))
            await finish(streams[name], read[name])
            assert read[name] == expected

    asyncio.run(run())


async def finish(stream: OutputStream, read: list[int]) -> None:
    async for last in stream:
        read += last.token_ids


def submit(name: str) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        request_id=name, prompt_token_ids=[1], sampling=types_pb2.SamplingParams(max_tokens=10_000)
    )


async def test_cancels_overtake_submits_and_only_the_newest_ack_is_sent() -> None:
    outbox = CommandQueue(10)
    outbox.submit(submit("a"))
    outbox.ack(1)
    outbox.ack(2)
    outbox.cancel("b")
    commands = [await outbox.next() for _ in range(3)]
    assert [command.WhichOneof("command") for command in commands] == ["cancel", "submit", "ack"]
    assert commands[2].ack.sequence == 2


async def test_the_commands_queued_for_an_engine_are_bounded() -> None:
    outbox = CommandQueue(2)
    outbox.submit(submit("a"))
    outbox.submit(submit("b"))
    with pytest.raises(EngineFull):
        outbox.submit(submit("c"))
    assert outbox.withdraw("a")
    outbox.submit(submit("c"))
