"""A server that answers polls and does not do its work is set aside, probed, and taken back; never all of them are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines.attempt import EngineLost, EngineStalled
from quire_router.engines.external import fitness
from quire_router.engines.external.client import ExternalEngine
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.pool import EnginePool

from tests.support.http_engines import HttpEngine, VllmEngine, continuation, demo_tokenizer, serving
from tests.support.waiting import until
from tests.unit.router.engines.external.test_client import PROMPT, QUICK, connected, read, submit

STALLS = replace(QUICK, stall_timeout=0.3)


@pytest.fixture(autouse=True)
def probed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "FIRST_PROBE", 0.05)
    monkeypatch.setattr(fitness, "LAST_PROBE", 0.1)


class FailingEngine(VllmEngine):
    """Fails every request in one ``way``, or none; it answers all polls."""

    way = ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.way:
            return await super()._generate(request)
        self.requests.append({})
        if self.way == "error":
            return web.json_response({"error": {"message": "CUDA error", "code": 500}}, status=500)
        if self.way == "proxy":
            return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")
        if self.way == "garbage":
            return web.Response(text="data: {nonsense\n\n", content_type="text/event-stream")
        if self.way == "nothing":
            return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError


WAYS = ["error", "proxy", "garbage", "nothing", "cut"]


async def lose(client: ExternalEngine, count: int) -> None:
    """So many requests one after the other, all of which are lost."""
    for number in range(count):
        await until(lambda: client._connected and not client._broken)
        stream = client.submit(submit(f"r{number}"))
        with pytest.raises(EngineLost):
            await read(stream)
        stream.close()


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_fails_at_once_is_set_aside_until_it_generates(way: str) -> None:
    engine = FailingEngine()
    async with connected(engine, has_substitute=lambda: True) as client:
        engine.way = way
        await lose(client, fitness.MAX_FAILURES - 1)
        await until(lambda: client.ready)
        await lose(client, 1)
        assert (client.ready, client.condition) == (False, "failing")
        asked = len(engine.requests)
        await until(lambda: len(engine.requests) > asked + 1)  # probes, which find that it still fails
        assert not client.ready
        engine.way = ""
        await until(lambda: client.ready)
        assert await read(client.submit(submit("after"))) == {0: continuation(PROMPT, 5)}


async def test_requests_that_succeed_between_failures_keep_a_server() -> None:
    engine = FailingEngine()
    async with connected(engine, has_substitute=lambda: True) as client:
        for number in range(2 * fitness.MAX_FAILURES):
            engine.way = "error"
            await lose(client, fitness.MAX_FAILURES - 1)
            engine.way = ""
            await read(client.submit(submit(f"good{number}")))
        assert client.ready


@pytest.mark.parametrize(("status", "count"), [(400, 9), (413, 9), (429, 9), (503, 9)])
async def test_what_the_request_or_the_load_is_to_blame_for_is_no_failure_of_the_server(
    status: int, count: int
) -> None:
    engine = VllmEngine()
    async with connected(engine, has_substitute=lambda: True) as client:
        engine.refusal = status, {"error": {"message": "no", "code": status}}
        for number in range(count):
            stream = client.submit(submit(f"r{number}", output_token_ids=[5]))  # which another engine began
            with pytest.raises(Exception, match="no"):
                await read(stream)
        assert client.ready


async def test_the_choices_of_one_request_count_once() -> None:
    engine = FailingEngine()
    async with connected(engine, has_substitute=lambda: True) as client:
        engine.way = "error"
        with pytest.raises(EngineLost):
            await read(client.submit(submit(n=8, best_of=8)))
        await until(lambda: not client._running)
        assert client.ready


@asynccontextmanager
async def pool_of(*engines: HttpEngine, stall_timeout: float = 600) -> AsyncIterator[EnginePool]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(serving(engine))
        addresses = [f"{engine.kind}+{engine.url}" for engine in engines]
        settings = replace(QUICK, stall_timeout=stall_timeout)
        pool = EnginePool(StaticDiscovery(addresses), ["m"], settings, tokenizers={"m": demo_tokenizer()})
        await pool.start()
        try:
            await until(lambda: pool.ready("m") == len(engines))
            yield pool
        finally:
            await pool.close()


async def test_never_all_servers_are_set_aside_and_the_last_one_is_taken_back() -> None:
    engines = [FailingEngine() for _ in range(3)]
    async with pool_of(*engines) as pool:
        clients = [each.connection for each in pool.engines()]
        for engine in engines:
            engine.way = "error"
        for client in clients:
            await lose(client, 2 * fitness.MAX_FAILURES)  # type: ignore[arg-type]
        assert [client.ready for client in clients] == [False, False, True]
        await engines[2].stop()
        await until(lambda: pool.ready("m") > 0)


async def begun(client: ExternalEngine, request_id: str) -> tuple[OutputStream, asyncio.Task[dict[int, list[int]]]]:
    """A stream that has had its first tokens."""
    stream = client.submit(submit(request_id, max_tokens=50))
    task = asyncio.create_task(read(stream))
    await until(lambda: next(each for each in client._running if each.stream is stream).started)
    return stream, task


async def test_streams_leave_a_server_none_of_whose_streams_advances() -> None:
    engine = VllmEngine()
    async with connected(engine, STALLS, has_substitute=lambda: True) as client:
        engine.hold_after = 3
        (_, first), (_, second) = await begun(client, "a"), await begun(client, "b")
        waiting = client.submit(submit("c"))
        for task in (first, second, asyncio.create_task(read(waiting))):
            with pytest.raises(EngineStalled):
                await task
        assert (client.ready, client.condition) == (False, "failing")
        await until(lambda: engine.aborted >= 3)
        engine.hold_after = None
        await until(lambda: client.ready)
        assert engine.polls > 5


async def test_a_server_with_one_stream_that_advances_keeps_all() -> None:
    engine = VllmEngine(seconds_per_token=0.1)
    async with connected(engine, STALLS, has_substitute=lambda: True) as client:
        engine.hold_after = 2
        _, held = await begun(client, "held")
        engine.hold_after = None
        assert len((await read(client.submit(submit("slow", max_tokens=10))))[0]) == 10
        assert client.ready
        assert not held.done()
        held.cancel()


async def test_waiting_for_first_tokens_is_no_stall() -> None:
    engine = VllmEngine()
    async with connected(engine, STALLS, has_substitute=lambda: True) as client:
        engine.hold_after = 0
        task = asyncio.create_task(read(client.submit(submit())))
        await asyncio.sleep(1)
        assert client.ready
        engine.released.set()
        assert await task == {0: continuation(PROMPT, 5)}


async def test_a_slow_server_has_ten_of_its_own_steps() -> None:
    engine = VllmEngine(seconds_per_token=0.2)
    async with connected(engine, STALLS, has_substitute=lambda: True) as client:
        await read(client.submit(submit("before", max_tokens=4)))
        engine.hold_after = 2
        _, task = await begun(client, "a")
        await asyncio.sleep(1)
        assert client.ready
        with pytest.raises(EngineStalled):
            await task


@pytest.mark.parametrize("others", [False, True])
async def test_streams_stay_where_no_other_server_is_or_where_they_have_just_come_to(others: bool) -> None:
    engine = VllmEngine()
    async with connected(engine, STALLS, has_substitute=lambda: others) as client:
        engine.hold_after = 2
        stream, task = await begun(client, "a")
        stream.stays_until = asyncio.get_running_loop().time() + 60 * others
        await asyncio.sleep(1)
        assert not task.done()
        assert client.ready is not others
        engine.released.set()
        assert await task == {0: continuation(PROMPT, 50)}


async def test_servers_that_all_stand_still_are_not_all_set_aside() -> None:
    engines = [VllmEngine(), VllmEngine()]
    async with pool_of(*engines, stall_timeout=0.3) as pool:
        clients = [each.connection for each in pool.engines()]
        for engine in engines:
            engine.hold_after = 2
        tasks = [(await begun(client, "a"))[1] for client in clients]  # type: ignore[arg-type]
        await until(lambda: pool.ready("m") == 1)
        await asyncio.sleep(1)
        assert pool.ready("m") == 1
        assert sum(task.done() for task in tasks) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
