"""What a request's tenant pays for, and what metrics say of it: what engines computed, and nothing that none took."""

import asyncio
from dataclasses import replace
from time import time

import pytest
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams
from quire_router.admission.limits import RateLimiter
from quire_router.admission.tenants import OTHER_TENANTS, Tenant, Tenants
from quire_router.core import metrics
from quire_router.core.generation import GenerationRequest, StreamCursor

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import RunnerHarness, collect, open_runner, started
from tests.support.scripted_engine import LENGTH, output

LIMITS = RateLimiter(Tenants([Tenant("named")]))


def request(tenant: str = "named", *, digest: str = "", retention: float | None = None) -> GenerationRequest:
    params = SamplingParams(max_tokens=3)
    return GenerationRequest(
        "r", "m", tokens("hello"), params, stream=True, tenant=tenant, digest=digest, retention=retention
    )


async def counted(place: RunnerHarness) -> list[tuple[int, int, int, int]]:
    return [row.counts for row in await place.journal.usage(time() - 7200, time() + 1)]


def metric(tenant: str) -> list[float]:
    counters = (
        metrics.TENANT_REQUESTS,
        metrics.TENANT_PROMPT_TOKENS,
        metrics.TENANT_CACHED_TOKENS,
        metrics.TENANT_COMPLETION_TOKENS,
    )
    return [counter.labels(tenant, "m")._value.get() for counter in counters]


@pytest.mark.parametrize("retention", [None, 0])
@pytest.mark.parametrize(("tenant", "label"), [("named", "named"), ("unnamed", OTHER_TENANTS)])
async def test_a_request_is_counted_with_its_cached_tokens(tenant: str, label: str, retention: float | None):
    before = metric(label)
    async with open_runner(limits=LIMITS) as place:
        task, submit = await started(place, place.lifecycle.run(request(tenant, retention=retention)))
        place.engine.send(output(submit.request_id, tokens("abc"), 0, LENGTH, cached_tokens=4))
        await task
        assert await counted(place) == [(1, 5, 4, 3)]
    assert [now - then for now, then in zip(metric(label), before, strict=True)] == [1, 5, 4, 3]


async def test_a_client_that_leaves_pays_for_what_it_had_and_for_the_rest_once_it_comes_back():
    before = metric("named")
    async with open_runner(limits=LIMITS) as place:
        answer = place.lifecycle.run(request(digest="d"))
        reading = asyncio.ensure_future(anext(answer))
        submit = await place.engine.submit()
        place.engine.send(output(submit.request_id, tokens("ab"), 0))
        await reading
        await answer.aclose()
        assert await counted(place) == [(1, 5, 0, 2)]
        record = await place.lifecycle.record("r")
        assert record is not None
        task, submit = await started(place, place.lifecycle.resume(record, StreamCursor(1)))
        place.engine.send(output(submit.request_id, tokens("c"), 2, LENGTH))
        await task
        assert await counted(place) == [(1, 5, 0, 3)]
    assert [now - then for now, then in zip(metric("named"), before, strict=True)] == [1, 5, 0, 3]


async def test_what_no_engine_took_is_not_counted():
    before = metric("named")
    async with open_runner(ready=0, hold_timeout=0.01, limits=LIMITS) as place:
        with pytest.raises(QuireError):
            await collect(place.lifecycle.run(request()))
        assert await counted(place) == []
        answer = await place.lifecycle.run_once(replace(request(digest="d"), request_id="another"))
        assert answer is not None
        await answer.aclose()
        assert await counted(place) == []
    assert metric("named") == before
