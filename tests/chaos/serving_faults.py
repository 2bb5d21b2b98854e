"""What can be wrong with those who compute: they all come at once while requests wait for them, they lose the adapters
that were loaded while they served, and servers that others have written fail fast, or hang while they answer polls.
"""

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from redis.asyncio import Redis

from tests.chaos.faults import NOTICED, Fault, missed, one, ready_engines, until
from tests.chaos.stack import KEYS, MODEL, SMALL_POOLS, Stack
from tests.support.adapters import write_adapter
from tests.support.forked_engines import LAST, ForkedEngine, ForkedRouter
from tests.support.http_engines import DEMO, VllmEngine, continuation, demo_tokenizer
from tests.support.ports import free_port
from tests.support.processes import Process, Router, fetch

P = TypeVar("P", bound=Process)
_HEADERS = {"Authorization": f"Bearer {KEYS['house']}"}
_ANSWERED = 120.0  # seconds in which a request has its answer, whatever else goes wrong
_WAITING = 3  # requests at most: with more of them the moment of the fault is rarely met
_STALL = 3.0  # seconds
_CLIENTS, _TOKENS = 24, 40


async def capacity_at_a_start(stack: Stack, chance: random.Random, pause: float) -> None:
    """A router starts while all engines are stopped, requests wait, and all engines describe themselves in one moment.
    Every request is answered, and ``quire_engines_ready`` is right.
    """
    router = one(stack.routers, chance)
    async with AsyncExitStack() as locks:
        for part in (*stack.engines, router):
            await locks.enter_async_context(part.lock)
        with missed(stack, router):
            asking: list[asyncio.Task[httpx.Response]] = []
            try:
                for engine in stack.engines:
                    engine.signal(signal.SIGSTOP)
                router.kill()
                router.restart()
                await until(lambda: fetch(router.process.metrics_port, "/live")[0] == 200, NOTICED)
                async with httpx.AsyncClient(timeout=_ANSWERED, headers=_HEADERS) as http:
                    body = {"model": MODEL, "prompt": "Once", "max_tokens": 8}
                    url = f"{router.process.url}/v1/completions"
                    asking = [
                        asyncio.create_task(http.post(url, json=body)) for _ in range(chance.randint(1, _WAITING))
                    ]
                    await asyncio.sleep(0.5)
                    router.signal(signal.SIGSTOP)
                    for engine in stack.engines:
                        engine.signal(signal.SIGCONT)
                    await asyncio.sleep(min(1.0, pause))  # in which all of them have answered
                    router.signal(signal.SIGCONT)
                    answers = await asyncio.gather(*asking)
            finally:
                for part in (*stack.engines, router):
                    part.signal(signal.SIGCONT)
            await router.ready()
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        await until(lambda: ready_engines(router.process) == len(stack.engines), NOTICED)


async def load_adapters_while_engines_die(stack: Stack, chance: random.Random, _pause: float) -> None:
    """An engine dies while it loads an adapter, which is a typed error. Then all engines and a router die under a
    background request for one that was loaded before: no router says that it does not exist, and it is completed.
    """
    async with stack.redis_lock, _adapter_stack(stack) as (folder, engines, routers, http):
        sql, other = str(folder / "sql"), str(folder / "other")
        assert (await _load(http, routers[0], "sql", sql)).status_code == 200
        undisturbed = await _finish(http, routers, await _begin(http, routers[0]))
        loading = asyncio.create_task(_load(http, routers[0], "other", other))
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        await _revive(engines[1])
        assert (await loading).status_code in (200, 503), (await loading).text
        await until(lambda: ready_engines(routers[0].process) == len(engines), _ANSWERED)
        unloaded = await http.post(f"{routers[0].process.url}/v1/unload_lora_adapter", json={"lora_name": "other"})
        assert unloaded.status_code in (200, 404, 503), unloaded.text
        begun = await _begin(http, routers[0])
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        for part in (*engines, routers[0]):
            part.process.kill()
        routers[0].start()
        asking = [asyncio.create_task(_ask(http, routers[0])) for _ in range(4)]
        await asyncio.sleep(chance.uniform(0.0, 6.0))
        for engine in engines:
            engine.start()
        assert await _finish(http, routers, begun) == undisturbed
        statuses = set(await asyncio.gather(*asking))
        assert statuses <= {200, 503}, statuses


async def fail_fast_server(_stack: Stack, _chance: random.Random, _pause: float) -> None:
    """One of two servers that others have written answers every request at once with 500, and every poll with 200."""

    async def harm(server: VllmEngine) -> None:
        server.refusal = 500, {"error": {"message": "CUDA error", "code": 500}}

    await _with_servers(harm)


async def hang_server(_stack: Stack, chance: random.Random, _pause: float) -> None:
    """One of two servers that others have written sends nothing more on any stream, and answers every poll."""

    async def harm(server: VllmEngine) -> None:
        server.hold_after = chance.randint(1, _TOKENS - 1)

    await _with_servers(harm)


SERVING_FAULTS: tuple[Fault, ...] = (
    capacity_at_a_start, load_adapters_while_engines_die, fail_fast_server, hang_server,
)  # fmt: skip


async def _with_servers(harm: Callable[[VllmEngine], Awaitable[None]]) -> None:
    """A router in front of two such servers, of which one is harmed while clients stream: every answer is right."""
    async with AsyncExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="quire-chaos-servers-")))
        servers = [VllmEngine(seconds_per_token=0.01) for _ in range(2)]
        for server in servers:
            await server.start()
            ending.push_async_callback(server.stop)
        addresses = [f"vllm+{server.url}" for server in servers]
        router = ForkedRouter(DEMO, addresses, folder, "--stall-timeout", str(_STALL), name="m")
        ending.callback(router.kill)
        await until(lambda: ready_engines(router) == len(servers), NOTICED)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=_ANSWERED, limits=limits) as http:
            asking = [asyncio.create_task(_check_answer(http, router, number)) for number in range(_CLIENTS)]
            await asyncio.sleep(0.1)
            await harm(servers[0])
            asking += [asyncio.create_task(_check_answer(http, router, number)) for number in range(_CLIENTS)]
            await asyncio.gather(*asking)
            await _check_answer(http, router, _CLIENTS)


async def _check_answer(http: httpx.AsyncClient, router: Router, number: int) -> None:
    tokenizer = demo_tokenizer()
    prompt = tokenizer.encode(f"Once upon a time there were {number}")
    body = {"model": "m", "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
    answer = await http.post(f"{router.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(continuation(prompt, _TOKENS))


class _Again(Generic[P]):
    """A process of the stack for adapters, which starts again on its ports."""

    def __init__(self, make: Callable[[], P]) -> None:
        self._make = make
        self.process = make()

    def start(self) -> None:
        self.process = self._make()


@asynccontextmanager
async def _adapter_stack(
    stack: Stack,
) -> AsyncIterator[tuple[Path, list[Any], list[Any], httpx.AsyncClient]]:
    """Two engines that serve adapters, and two routers that load them, beside the others; Redis is the same."""
    async with AsyncExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="quire-chaos-adapters-")))
        for seed, name in enumerate(("sql", "other")):
            await asyncio.to_thread(write_adapter, folder / name, DEMO, rank=4, seed=seed)
        url = f"redis://127.0.0.1:{stack.redis.port}/1"
        async with Redis.from_url(url) as redis:
            await redis.flushdb()  # these adapters' folder is a new one
        lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--dtype", "float32", *SMALL_POOLS)
        made: list[Any] = []
        for _ in range(2):
            port = free_port()
            made.append(_Again(lambda port=port: ForkedEngine(DEMO, folder, *lora, port=port, **{LAST: "yes"})))
        addresses = [engine.process.address for engine in made]
        flags = ("--allow-lora-updates", "--redis-url", url)
        for _ in range(2):
            ports = free_port(), free_port(), free_port()
            made.append(_Again(lambda ports=ports: ForkedRouter(DEMO, addresses, folder, *flags, ports=ports)))
        try:
            for router in made[2:]:
                await until(lambda router=router: ready_engines(router.process) == 2, _ANSWERED)
            async with httpx.AsyncClient(timeout=_ANSWERED) as http:
                yield folder, made[:2], made[2:], http
        finally:
            for part in made:
                with suppress(ProcessLookupError):
                    part.process.kill()


async def _revive(part: Any) -> None:
    part.process.kill()
    part.start()


async def _load(http: httpx.AsyncClient, router: Any, name: str, path: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path}
    return await http.post(f"{router.process.url}/v1/load_lora_adapter", json=body)


async def _begin(http: httpx.AsyncClient, router: Any) -> str:
    """Begins a background request for the adapter; returns its id."""
    body = {"model": "sql", "prompt": "Once", "max_tokens": 400, "seed": 7, "ignore_eos": True, "background": True}
    answer = await http.post(f"{router.process.url}/v1/completions", json=body)
    assert answer.status_code == 202, answer.text
    name: str = answer.json()["id"]
    return name


async def _finish(http: httpx.AsyncClient, routers: list[Any], name: str) -> str:
    """The text of a background request, once it has ended."""
    async with asyncio.timeout(_ANSWERED):
        while True:
            for router in routers:
                with suppress(httpx.TransportError):
                    answer = await http.get(f"{router.process.url}/v1/requests/{name}")
                    assert answer.status_code in (200, 503), answer.text
                    if answer.status_code == 200 and answer.json()["status"] != "running":
                        assert answer.json()["status"] == "completed", answer.text
                        text: str = answer.json()["response"]["choices"][0]["text"]
                        return text
            await asyncio.sleep(0.2)


async def _ask(http: httpx.AsyncClient, router: Any) -> int:
    """The status of a request for the adapter, as soon as the router answers."""
    body = {"model": "sql", "prompt": "Once", "max_tokens": 4}
    async with asyncio.timeout(_ANSWERED):
        while True:
            try:
                return (await http.post(f"{router.process.url}/v1/completions", json=body)).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.02)
