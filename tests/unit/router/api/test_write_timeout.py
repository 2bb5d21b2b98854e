"""Clients that do not read, and the one timer that watches all writes of an answer."""

import asyncio

import pytest
from quire_router.api.request_limits import WriteTimeout


async def writes(patience: WriteTimeout, *seconds: float) -> None:
    for pause in seconds:
        await patience.wait(asyncio.sleep(pause))


async def test_a_write_that_never_ends_times_out():
    patience = WriteTimeout(0.01)
    with pytest.raises(TimeoutError):
        await writes(patience, 0, 0, 3600)
    assert asyncio.current_task().cancelling() == 0


async def test_many_short_writes_may_take_longer_than_one():
    patience = WriteTimeout(0.5)
    await writes(patience, *[0.02] * 30)
    patience.close()


async def test_a_pause_between_writes_is_not_the_clients():
    patience = WriteTimeout(0.01)
    await writes(patience, 0)
    await asyncio.sleep(0.05)
    await writes(patience, 0)
    patience.close()


async def test_being_cancelled_for_another_reason_stays_a_cancellation():
    task = asyncio.create_task(writes(WriteTimeout(60), 3600))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_write_that_fails_fails_as_it_did():
    async def broken():
        raise OSError("broken pipe")

    with pytest.raises(OSError, match="broken pipe"):
        await WriteTimeout(60).wait(broken())
