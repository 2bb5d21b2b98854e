"""A time that others have for an answer, without that in which this process could not hear them."""

import asyncio
import time

import pytest
from quire_router.core.retry import fair_timeout


async def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        async with fair_timeout(0.3):
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_an_answer_that_came_while_the_process_was_frozen_is_read() -> None:
    async def answer() -> None:
        time.sleep(1.0)  # noqa: ASYNC251 - as a machine that is frozen
        await asyncio.sleep(0.05)  # which it takes to read what has come

    async with fair_timeout(0.3):
        await answer()


async def test_nothing_is_left_of_a_time_that_was_not_needed() -> None:
    async with fair_timeout(0.05):
        pass
    await asyncio.sleep(0.2)


async def test_a_cancellation_is_none_of_its_own() -> None:
    async def wait() -> None:
        async with fair_timeout(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
