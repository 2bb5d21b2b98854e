"""Work on threads comes in turns that are fair between tenants."""

import asyncio
from threading import Event

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_router.api.tokenizer_pool import THREADS, THREADS_PER_TENANT, TokenizerPool

from tests.support.waiting import until


async def test_one_tenant_never_takes_all_threads():
    aside, release, begun = TokenizerPool(), Event(), []

    def block(number: int) -> int:
        begun.append(number)
        release.wait(20)
        return number

    many = [asyncio.create_task(aside.run("many", 1, lambda number=number: block(number))) for number in range(8)]
    await until(lambda: len(begun) == THREADS_PER_TENANT)
    many[0].cancel()  # its thread is not free before the work has ended
    assert await asyncio.wait_for(aside.run("other", 1, lambda: "done"), 10) == "done"
    assert len(begun) == THREADS_PER_TENANT
    release.set()
    assert await asyncio.gather(*many[1:]) == [*range(1, 8)]
    aside.close()


async def test_an_exception_is_raised_and_frees_its_thread():
    aside = TokenizerPool()

    def fail() -> None:
        raise ValueError("no")

    failures = await asyncio.gather(*(aside.run("", 1, fail) for _ in range(10)), return_exceptions=True)
    assert {str(failure) for failure in failures} == {"no"}
    assert await aside.run("", 1, lambda: 1) == 1
    aside.close()


async def test_waiting_work_is_bounded_and_one_tenant_may_use_half():
    aside, release, begun = TokenizerPool(max_queued=100), Event(), []

    def block() -> None:
        begun.append(1)
        release.wait(20)

    def run(tenant: str, size: int) -> asyncio.Task[None]:
        return asyncio.create_task(aside.run(tenant, size, block))

    running = [run(tenant, 1000) for tenant in ["many"] * THREADS_PER_TENANT + ["other"] * THREADS_PER_TENANT]
    await until(lambda: len(begun) == THREADS)
    waiting = [run("many", 40)]
    await asyncio.sleep(0)
    with pytest.raises(QuireError) as own:
        await aside.run("many", 20, block)
    waiting.append(run("other", 50))
    await asyncio.sleep(0)
    with pytest.raises(QuireError) as all_of_it:
        await aside.run("third", 20, block)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    waiting.append(run("third", 20))
    release.set()
    await asyncio.gather(*running, *waiting[1:])
    for refusal in (own.value, all_of_it.value):
        assert (refusal.code, refusal.reason) == (ErrorCode.OVERLOADED, "tokenizer_full")
        assert refusal.retry_after >= 1
    assert await aside.run("many", 10**9, lambda: "alone, a text may be of any size") is not None
    aside.close()
