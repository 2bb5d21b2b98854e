"""What can be wrong with servers that others have written: they fail fast, or hang, and answer polls meanwhile."""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from tests.chaos.faults import NOTICED, Fault, ready_engines, until
from tests.chaos.stack import Stack
from tests.support.forked_engines import ForkedRouter
from tests.support.http_engines import DEMO, VllmEngine, continuation, demo_tokenizer
from tests.support.processes import Router

_ANSWERED = 120.0  # seconds in which a request has its answer, whatever else goes wrong
_STALL = 3.0  # seconds
_CLIENTS, _TOKENS = 24, 40


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


SERVING_FAULTS: tuple[Fault, ...] = (fail_fast_server, hang_server)


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
