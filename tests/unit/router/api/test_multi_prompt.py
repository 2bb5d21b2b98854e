"""A list of prompts of which one is refused or fails: what becomes of the others, their charges and their records."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from quire.v1 import types_pb2
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.admission.limits import RateLimiter
from quire_router.admission.redis_rate_limit import RedisRateLimiter
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.core.generation import GenerationRequest, prompt_request_id
from quire_router.journal.redis.redis_connection import keys

from tests.support.byte_tokenizer import tokens
from tests.support.redis_journals import journal_at
from tests.support.redis_server import redis_server
from tests.support.runner_harness import RunnerHarness, collect, delta_text, open_runner
from tests.support.scripted_engine import ERROR, LENGTH, output
from tests.support.waiting import until

TENANTS = Tenants([Tenant("t", requests_per_minute=3, tokens_per_minute=10_000)])
IDS = ("r", prompt_request_id("r", 1), prompt_request_id("r", 2))


def prompts(digest: str = "", *, stream: bool = True) -> list[GenerationRequest]:
    """A list of three."""
    first = GenerationRequest(
        "r", "m", tokens("hello"), SamplingParams(max_tokens=2), stream=stream, tenant="t", parts=IDS, digest=digest
    )
    return [first, *(replace(first, request_id=name, parts=()) for name in IDS[1:])]


def together(place: RunnerHarness) -> MultiPromptRunner:
    return MultiPromptRunner(place.lifecycle, ConcurrencyLimit(10))


async def reasons(place: RunnerHarness) -> list[FinishReason | None]:
    """How the record of each prompt has ended; there is none of prompts that were never written down."""
    records = [await place.journal.read(name) for name in IDS]
    assert not any(record.leased for record in records if record is not None)
    return [record.finish_reason for record in records if record is not None]


@asynccontextmanager
async def real_house() -> AsyncIterator[tuple[RunnerHarness, RateLimiter]]:
    """One whose records and limits are in Redis, where a first request takes a third of the minute."""
    with redis_server() as server:
        async with journal_at(server) as journal:
            meter = RedisRateLimiter(server.url, timeout=5)
            limits = RateLimiter(TENANTS, meter)
            async with open_runner(journal=journal, limits=limits) as place:
                (await limits.reserve("t", "before", 1)).settle()
                yield place, limits
            await meter.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_when_a_prompt_is_refused_the_others_are_withdrawn_without_charge(stream: bool) -> None:
    async with real_house() as (place, limits):
        for _ in range(3):
            with pytest.raises(QuireError) as refused:
                await together(place).run(prompts(stream=stream))
            assert refused.value.reason == "requests_per_minute"
            assert place.lifecycle.in_flight == 0
            await place.journal.flush()
            assert await reasons(place) == [FinishReason.ABORT] * 2
            await limits._shared._client.delete(*(key for name in IDS for key in keys(name)))  # their ids come again
            await until(lambda: not limits._shared._releases)
            await limits._shared._send_releases()
            bills = [await limits.reserve("t", f"probe{number}", 4990) for number in range(2)]
            for bill in bills:
                bill.cancel()
        assert place.engine.commands.empty()


async def test_with_a_key_prompts_that_were_not_refused_are_kept_and_not_charged_again() -> None:
    async with real_house() as (place, limits):
        with pytest.raises(QuireError):
            await together(place).run_once(prompts("d"))
        await place.journal.flush()
        assert await reasons(place) == [None] * 2
        assert place.lifecycle.in_flight == 0
        assert limits.status("t").requests.remaining == 0

        await limits._shared._client.delete("quire:limits:{t:t}:requests")  # a minute goes by
        records = [record for name in IDS if (record := await place.journal.read(name)) is not None]
        reading = asyncio.create_task(collect(await together(place).replay(prompts("d"), records, None)))
        for _ in IDS:
            place.engine.send(output((await place.engine.submit()).request_id, tokens("ab"), 0, LENGTH))
        deltas = await reading
        assert [delta_text(deltas, index) for index in range(3)] == ["ab"] * 3
        assert limits.status("t").requests.remaining == 2


FULL, BROKEN = types_pb2.ERROR_CODE_OVERLOADED, types_pb2.ERROR_CODE_INTERNAL


@pytest.mark.parametrize(
    ("error", "heard", "digest", "others"),
    [
        (FULL, False, "", FinishReason.ABORT),
        (FULL, True, "", None),
        (FULL, False, "d", None),
        (BROKEN, True, "", FinishReason.ABORT),
        (BROKEN, False, "d", FinishReason.ABORT),
    ],
)
async def test_when_a_prompt_fails_the_others_are_kept_if_the_request_is_resumable(
    error: types_pb2.ErrorCode.ValueType, heard: bool, digest: str, others: FinishReason | None
) -> None:
    limits = RateLimiter(TENANTS, clock=lambda: 0)
    async with open_runner(limits=limits) as place:
        answer = await together(place).run_once(prompts(digest))
        assert answer is not None
        reading = asyncio.ensure_future(anext(answer))
        ids = {(await place.engine.submit()).request_id for _ in IDS}
        assert ids == {*IDS}
        if heard:
            place.engine.send(output("r", tokens("a"), 0))
            await reading
            reading = asyncio.ensure_future(anext(answer))
        place.engine.send(output(IDS[2], [], 0, ERROR, types_pb2.Error(code=error)))
        with pytest.raises(QuireError):
            await reading
        assert {(await place.engine.cancel()).request_id for _ in IDS[:2]} == {*IDS[:2]}
        assert place.lifecycle.in_flight == 0
        mended = None if error == FULL and others is None else FinishReason.ERROR
        assert await reasons(place) == [others, others, mended]
        used = 3 * 7 if others is None else 5 * 3 + heard if error == BROKEN else 5 * 2
        assert limits.status("t").tokens.remaining == 10_000 - used
