"""Work on threads comes in turns that are fair between tenants."""

import asyncio
from threading import Event

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_router.api.tokenizer_pool import THREADS, THREADS_PER_TENANT, TokenizerPool

from tests.support.waiting import until


async def test_one_tenant_never_takes_all_threads():
    pool, release, started = TokenizerPool(), Event(), []

    def block(number: int) -> int:
        started.append(number)
        release.wait(20)
        return number

    many = [asyncio.create_task(pool.run("many", 1, lambda number=number: block(number))) for number in range(8)]
    await until(lambda: len(started) == THREADS_PER_TENANT)
    many[0].cancel()  # its thread is not free before the work has ended
    assert await asyncio.wait_for(pool.run("other", 1, lambda: "done"), 10) == "done"
    assert len(started) == THREADS_PER_TENANT
    release.set()
    assert await asyncio.gather(*many[1:]) == [*range(1, 8)]
    pool.close()


async def test_an_exception_is_raised_and_frees_its_thread():
    pool = TokenizerPool()

    def fail() -> None:
        raise ValueError("no")

    failures = await asyncio.gather(*(pool.run("", 1, fail) for _ in range(10)), return_exceptions=True)
    assert {str(failure) for failure in failures} == {"no"}
    assert await pool.run("", 1, lambda: 1) == 1
    pool.close()


async def test_waiting_work_is_bounded_and_one_tenant_may_use_half():
    pool, release, started = TokenizerPool(max_queued=100), Event(), []

    def block() -> None:
        started.append(1)
        release.wait(20)

    def run(tenant: str, size: int) -> asyncio.Task[None]:
        return asyncio.create_task(pool.run(tenant, size, block))

    running = [run(tenant, 1000) for tenant in ["many"] * THREADS_PER_TENANT + ["other"] * THREADS_PER_TENANT]
    await until(lambda: len(started) == THREADS)
    waiting = [run("many", 40)]
    await asyncio.sleep(0)
    with pytest.raises(QuireError) as own:
        await pool.run("many", 20, block)
    waiting.append(run("other", 50))
    await asyncio.sleep(0)
    with pytest.raises(QuireError) as all_of_it:
        await pool.run("third", 20, block)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    waiting.append(run("third", 20))
    release.set()
    await asyncio.gather(*running, *waiting[1:])
    for refusal in (own.value, all_of_it.value):
        assert (refusal.code, refusal.reason) == (ErrorCode.OVERLOADED, "tokenizer_full")
        assert refusal.retry_after >= 1
    assert await pool.run("many", 10**9, lambda: "alone, a text may be of any size") is not None
    pool.close()


async def test_what_was_admitted_waits_for_its_turn_however_much_does():
    pool, release, started = TokenizerPool(max_queued=1), Event(), []

    def block(number: int) -> int:
        started.append(number)
        release.wait(20)
        return number

    many = [asyncio.create_task(pool.run_admitted("many", lambda number=number: block(number))) for number in range(50)]
    await until(lambda: len(started) == THREADS_PER_TENANT)
    assert await asyncio.wait_for(pool.run_admitted("other", lambda: "done"), 10) == "done"
    assert len(started) == THREADS_PER_TENANT
    release.set()
    assert await asyncio.gather(*many) == [*range(50)]
    pool.close()
