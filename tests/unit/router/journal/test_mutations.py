"""However a stored record is mutated, reading it gives what was written or an error that it is damaged."""

import asyncio
from array import array
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.journal.base import RecordedDelta, RequestRecord
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.support.journals import by_choice
from tests.support.redis_journals import flushed
from tests.support.redis_server import redis_server

FIELDS = ["request", "prompt", "conversation", "seal", "owner", "epoch", "lease_expires", "sum", "claim", "cancelled"]
ENDED_FIELDS = ["reason", "error", "usage"]
ROW = "the row"
STATES = ["running", "expired", "released", "ended"]
KINDS = ["missing", "cut", "flipped", "longer", "older", "another's"]  # from an older state, from another record
SETTINGS = JournalSettings(lease=9, settle=0, pause=0.001)
NUMBERS = count()
T = TypeVar("T")
LOGPROBS = [TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))]
TOLD = [
    RecordedDelta(0, [5, 6]),
    RecordedDelta(1, [7], FinishReason.STOP, LOGPROBS),
    RecordedDelta(0, [8, 9]),
    RecordedDelta(0, [10]),
]
POSITIONS = [0, 0, 2, 4]

garbage = st.binary(max_size=9) | st.sampled_from(
    [b"", b"inf", b"nan", b"-1", b"1.5", b"9" * 30, b"[]", b"{}", b"null"]
)
mutations = st.tuples(
    st.sampled_from([*FIELDS, *ENDED_FIELDS, ROW]), st.sampled_from(KINDS) | garbage, st.integers(0, 2**16)
)


@dataclass
class Routers:
    """The journals of two routers, and what is behind them."""

    runner: asyncio.Runner
    redis: Redis
    mine: RedisJournal
    yours: RedisJournal

    async def close(self) -> None:
        await self.mine.close()
        await self.yours.close()
        await self.redis.aclose()


@pytest.fixture(scope="module")
def routers() -> Iterator[Routers]:
    with redis_server() as server, asyncio.Runner() as runner:
        mine, yours = (RedisJournal(server.url, owner=owner, settings=SETTINGS) for owner in ("me", "you"))
        routers = Routers(runner, Redis.from_url(server.url), mine, yours)
        yield routers
        runner.run(routers.close())


@dataclass
class Keys:
    """A record as it lies in Redis, field by field, the row being one of them."""

    redis: Redis
    request_id: str

    async def get(self, name: str) -> bytes | None:
        record, tokens = keys(self.request_id)
        value: bytes | None = await (self.redis.get(tokens) if name == ROW else self.redis.hget(record, name))
        return value

    async def put(self, name: str, value: bytes | None) -> None:
        record, tokens = keys(self.request_id)
        if name == ROW:
            await (self.redis.delete(tokens) if value is None else self.redis.set(tokens, value))
        else:
            await (self.redis.hdel(record, name) if value is None else self.redis.hset(record, name, value))


def mutated(kind: str | bytes, place: int, value: bytes) -> bytes | None:
    """What becomes of a value."""
    at = place % max(1, len(value))
    match kind:
        case "missing":
            return None
        case "cut":
            return value[:at]
        case "flipped":
            return value[:at] + bytes([value[at] ^ (1 << place % 8)]) + value[at + 1 :] if value else b"\x00"
        case "longer":
            return value + b"\x01\x00\x00\x00"
    return bytes(kind)


class Scene:
    """One record that a router wrote, and another router that wants it."""

    def __init__(self, routers: "Routers") -> None:
        self.id = f"r-{next(NUMBERS)}"
        self.redis, self.mine, self.yours = routers.redis, routers.mine, routers.yours
        self.old_follower = self.yours.follow(self.id)
        self.sent: list[RecordedDelta] = []

    async def write(self, state: str) -> tuple[dict[str, bytes | None], dict[str, bytes | None]]:
        """Writes the record; returns an older state of it, and another record."""
        self.other_lease = self.mine.open(self.generation(self.id + "-other", 9))
        self.lease = self.mine.open(self.generation(self.id, 3))
        for delta, position in zip(TOLD[:2], POSITIONS[:2], strict=True):
            self.mine.append(self.lease, position, delta)
        self.mine.append(self.other_lease, 0, RecordedDelta(0, [50, 51, 52]))
        await flushed(self.mine)
        older = await self.whole(self.id)
        tail = await self.old_follower.poll()
        self.sent = [] if tail is None else list(tail.deltas)
        for delta, position in zip(TOLD[2:], POSITIONS[2:], strict=True):
            self.mine.append(self.lease, position, delta)
        if state == "ended":
            self.mine.finish(self.lease, FinishReason.STOP, "why", Usage(3, 6, 0))
        elif state == "released":
            self.mine.release(self.lease)
        await flushed(self.mine)
        if state == "expired":
            await self.redis.hset(keys(self.id)[0], "lease_expires", 1)
        return older, await self.whole(self.id + "-other")

    def generation(self, request_id: str, seed: int) -> GenerationRequest:
        return GenerationRequest(
            request_id,
            "m",
            array("i", [seed, 2, 3]),
            SamplingParams(seed=seed, n=2),
            background=True,
            conversation=f"said {seed}",
        )

    async def whole(self, request_id: str) -> dict[str, bytes | None]:
        return {name: await Keys(self.redis, request_id).get(name) for name in (*FIELDS, *ENDED_FIELDS, ROW)}

    async def read_in_every_way(self) -> None:
        record = await outcome(self.yours.read(self.id))
        assert isinstance(record, QuireError) or (record is not None and self.is_right(record))
        for follower in (self.yours.follow(self.id), self.old_follower):
            tail = await outcome(follower.poll())
            before = self.sent if follower is self.old_follower else []
            assert isinstance(tail, QuireError) or tail is not None
            if not isinstance(tail, QuireError) and tail.deltas:
                assert by_choice(before + tail.deltas) == by_choice(TOLD)
        claimed = await outcome(self.yours.claim(self.id))
        assert claimed is None or isinstance(claimed, QuireError) or self.is_right(claimed[0])
        assert isinstance(await outcome(self.yours.orphans()), list)

    async def go_on(self) -> None:
        """The first writer goes on, and may put it right; then somebody asks that it end."""
        self.mine.append(self.lease, 5, RecordedDelta(0, [11]))
        await flushed(self.mine)
        record = await outcome(self.yours.read(self.id))
        assert record is not None
        if not isinstance(record, QuireError):
            assert by_choice(record.deltas) in (by_choice(TOLD), by_choice([*TOLD, RecordedDelta(0, [11])]))
        await outcome(self.yours.cancel(self.id))
        other = await self.yours.read(self.id + "-other")
        assert other is not None
        assert other.deltas == [RecordedDelta(0, [50, 51, 52])]

    def is_right(self, record: RequestRecord) -> bool:
        expected = self.generation(self.id, 3)
        same = (record.generation.params, record.generation.prompt_token_ids) == (
            expected.params,
            expected.prompt_token_ids,
        )
        return same and by_choice(record.deltas) == by_choice(TOLD)


async def outcome(call: Awaitable[T]) -> T | QuireError:
    """The answer, or that the record is damaged. Nothing else may come of it."""
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(answer, BaseException):
        assert isinstance(answer, QuireError), repr(answer)
        assert answer.code is ErrorCode.INTERNAL
    return answer


@given(st.sampled_from(STATES), mutations)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_mutated_record_reads_as_it_was_written_or_as_damaged(
    routers: Routers, state: str, mutation: tuple[str, str | bytes, int]
) -> None:
    async def run() -> None:
        name, kind, place = mutation
        scene = Scene(routers)
        older, other = await scene.write(state)
        record = Keys(routers.redis, scene.id)
        if kind in ("older", "another's"):
            await record.put(name, (older if kind == "older" else other)[name])
        else:
            await record.put(name, mutated(kind, place, await record.get(name) or b""))
        await scene.read_in_every_way()
        await scene.go_on()

    routers.runner.run(asyncio.wait_for(run(), 60))
