"""Work on threads comes in turns that are fair between tenants."""

import asyncio
from threading import Event

from quire_router.api.aside import OF_ONE_TENANT, Aside

from tests.support.waiting import until


async def test_a_tenant_leaves_a_thread_to_others_however_much_it_asks_for():
    aside, release, begun = Aside(), Event(), []

    def block(number: int) -> int:
        begun.append(number)
        release.wait(20)
        return number

    many = [asyncio.create_task(aside.run("many", lambda number=number: block(number))) for number in range(8)]
    await until(lambda: len(begun) == OF_ONE_TENANT)
    many[0].cancel()  # its thread is not free before the work has ended
    assert await asyncio.wait_for(aside.run("other", lambda: "done"), 10) == "done"
    assert len(begun) == OF_ONE_TENANT
    release.set()
    assert await asyncio.gather(*many[1:]) == [*range(1, 8)]
    aside.close()


async def test_what_work_raises_is_raised_and_its_place_is_free_again():
    aside = Aside()

    def fail() -> None:
        raise ValueError("no")

    failures = await asyncio.gather(*(aside.run("", fail) for _ in range(10)), return_exceptions=True)
    assert {str(failure) for failure in failures} == {"no"}
    assert await aside.run("", lambda: 1) == 1
    aside.close()
