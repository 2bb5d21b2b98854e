"""The short form of the chaos run: real processes die under streams, and every answer is the undisturbed one.
``make chaos`` is the long form.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.chaos.changes import named
from tests.chaos.client import Manners
from tests.chaos.run import Plan, chaos
from tests.chaos.stack import KEYS, Form, Stack, running_stack
from tests.chaos.workload import requests

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.flaky(reruns=0),  # what is lost once is lost
]

SHORT = (
    "kill_engine", "kill_router", "cut_connections", "drain_engine", "drain_router", "kill_redis", "empty_redis",
    "stop_engine", "stop_router", "stop_redis", "kill_all_engines", "kill_all_routers", "rotate_certificates",
    "rename_engine", "replace_engine", "kill_api_server", "full_redis", "forget_scripts",
    "half_open_redis_down", "half_open_engine_up",
)  # fmt: skip
STREAMS = 42
PAIRS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    async with running_stack(folder, Form(delay=0.5)) as stack:
        yield stack


async def test_two_requests_with_one_key_at_two_routers_run_once(stack: Stack) -> None:
    made = _generated(stack)
    async with httpx.AsyncClient(timeout=60) as http:
        answers = await asyncio.gather(*(_two_at_once(stack, http, number) for number in range(PAIRS)))
    assert all(one == other for one, other in answers)
    assert _generated(stack) - made == sum(one["usage"]["completion_tokens"] for one, _ in answers)


@pytest.mark.timeout(900)
async def test_every_stream_is_the_undisturbed_one_whatever_dies(stack: Stack) -> None:
    plan = Plan(Manners(cut=0.005, silence=3.0), seed=1, pause=3.5, rest=0.2, pairs=1.0, concurrency=8)
    report = await chaos(stack, requests(STREAMS, seed=1), named(SHORT), plan)
    assert report.clean, str(report)
    assert report.counts["streams"] >= STREAMS
    assert report.counts["resumed"] > 0
    assert set(report.faults) == set(SHORT)


async def _two_at_once(stack: Stack, http: httpx.AsyncClient, number: int) -> list[Any]:
    """One request at both routers in the same moment."""
    body = {"model": "quire-demo", "prompt": f"Once {number}", "max_tokens": 20, "ignore_eos": True}
    headers = {"Idempotency-Key": f"twice {number}", "Authorization": f"Bearer {KEYS['guests']}"}
    sent = (http.post(f"{url}/v1/completions", json=body, headers=headers) for url in stack.urls)
    return [response.json() for response in await asyncio.gather(*sent)]


def _generated(stack: Stack) -> float:
    return sum(engine.process.metric("quire_engine_generation_tokens_total") for engine in stack.engines)
