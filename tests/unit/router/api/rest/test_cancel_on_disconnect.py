"""A request's work runs in the request's own task, and ends with its client."""

import asyncio
from typing import Any

import pytest
from quire_router.api.rest.http import ClientDisconnectedError, HttpExchange, HttpResponse
from quire_router.api.rest.openai_format import CHAT
from starlette.types import Message


class Client:
    """The ASGI messages of a client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Takes a part of the response. Servers say behind the last that nothing more comes from the client."""
        if not message.get("more_body", True):
            self.left.set()

    @property
    def exchange(self) -> HttpExchange:
        return HttpExchange({}, self.receive, HttpResponse(self.send, 60, "id"), CHAT)


async def test_the_result_of_the_work_is_returned_and_nothing_is_left_running() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert await Client().exchange.cancel_on_disconnect(work()) == "done"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise KeyError("the work's own")

    with pytest.raises(KeyError, match="own"):
        await Client().exchange.cancel_on_disconnect(work())


@pytest.mark.parametrize("as_error", [False, True])
async def test_the_work_is_cancelled_when_its_client_leaves_and_the_task_lives_on(as_error: bool) -> None:
    client, cleaned = Client(), False

    async def work() -> None:
        nonlocal cleaned
        client.left.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if as_error:
                raise KeyError("what the end of the work makes of it") from None
            raise
        finally:
            cleaned = True

    with pytest.raises(ClientDisconnectedError):
        await client.exchange.cancel_on_disconnect(work())
    task = asyncio.current_task()
    assert cleaned
    assert task is not None
    assert not task.cancelling()
    await asyncio.sleep(0)  # raises if a cancellation were left


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_cancellation_from_elsewhere_stays_one(leaves: bool) -> None:
    client, began = Client(), asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(client.exchange.cancel_on_disconnect(work()))
    await began.wait()
    if leaves:
        client.left.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_done_behind_a_whole_response_is_not_cancelled() -> None:
    exchange, done = Client().exchange, False

    async def work() -> None:
        nonlocal done
        await exchange.response.send(200, b"{}")
        for _ in range(3):
            await asyncio.sleep(0)
        done = True

    await exchange.cancel_on_disconnect(work())
    assert done
